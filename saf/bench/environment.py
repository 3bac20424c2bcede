"""Where a measurement was made."""

import subprocess
from typing import Any

import torch

from saf.machine.peaks import peak_of


def environment(device: torch.device, device_name: str) -> dict[str, Any]:
    """Return what a benchmark adds to its provenance: the device, its driver, memory and peak rates."""
    peak = peak_of(device_name)
    found = {
        "device": device_name,
        "driver": driver() if device.type == "cuda" else None,
        "peak": None if peak is None else {"flops": peak.flops, "bandwidth": peak.bandwidth, "source": peak.source},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


def driver() -> str | None:
    """Return the NVIDIA driver's version; None when it cannot be asked."""
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
