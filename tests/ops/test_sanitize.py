"""What runs under compute-sanitizer, on the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

REPOSITORY = Path(__file__).parents[2]
QUICKLY = "import runpy, tests.quick_interpreter; runpy.run_path('tools/sanitize_cases.py', run_name='__main__')"


@pytest.mark.slow
def test_every_case_runs():
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = ("toeplitz", "fused", "decode", "loss", "activation", "sums", "calibration")
    assert done.stdout.splitlines() == [f"{case}: ran" for case in cases]
