"""What NVIDIA's driver says of the GPUs, asked from outside: no context on a device, no memory of it."""

import subprocess

SECONDS = 5
"""How long the driver may take to answer; a round number."""


def asked(question: str, *which: str, seconds: float | None = None) -> str:
    """Return what nvidia-smi answers, a line a GPU; "" where it is not there, fails or takes longer."""
    words = ["nvidia-smi", *which, f"--query-gpu={question}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=True, timeout=seconds or SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout
