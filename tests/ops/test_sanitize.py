"""What runs under compute-sanitizer, on the interpreter; and what is said where there is no sanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

REPOSITORY = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root."""
    added = {"PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | added, capture_output=True, text=True)


@pytest.mark.slow
def test_every_case_runs():
    quickly = "import runpy, tests.quick_interpreter; runpy.run_path('tools/sanitize_cases.py', run_name='__main__')"
    done = run(sys.executable, "-c", quickly, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    cases = ("toeplitz", "fused", "decode", "loss", "activation", "sums", "calibration")
    assert done.stdout.splitlines() == [f"{case}: ran" for case in cases]


def test_a_missing_sanitizer_is_said():
    done = run("tools/sanitize.sh", COMPUTE_SANITIZER="/nowhere/compute-sanitizer")
    assert done.returncode == 1
    assert "compute-sanitizer is not on this machine" in done.stderr
