"""Run the kernels in a process of their own, so that the interpreter's switch reaches no other test."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


def run_worker(script: str, *arguments: str, interpret: bool) -> dict:
    """Run a script of this folder and return the JSON object on its last line."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def has_gpu() -> bool:
    """Tell, in a process of its own, whether a CUDA device is at hand."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def toeplitz_results() -> dict:
    """Results of every Toeplitz case by name."""
    return run_worker("kernel_worker.py", "toeplitz.product_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def linear_results() -> dict:
    """Results of every case of the linear product by name."""
    return run_worker("kernel_worker.py", "linear.product_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def row_results() -> dict:
    """Results of every case of single rows by name."""
    return run_worker("kernel_worker.py", "rows.row_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def split_results() -> dict:
    """Results of every case of live and frozen rows in one launch by name."""
    return run_worker("kernel_worker.py", "rows.split_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def fused_results() -> dict:
    """Results of every fused case by name."""
    return run_worker("kernel_worker.py", "fused.fused_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def softmax_results() -> dict:
    """Results of every case of the loss kernel by name."""
    return run_worker("kernel_worker.py", "decoder.softmax_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def gelu_results() -> dict:
    """Results of every case of the GELU kernels by name."""
    return run_worker("kernel_worker.py", "decoder.gelu_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def convolution_results() -> dict:
    """Results of every case of the causal convolution and of gradients of logits by name."""
    areas = "toeplitz.convolution_cases", "toeplitz.trained_cases"
    return run_worker("kernel_worker.py", *areas, interpret=not has_gpu())


@pytest.fixture(scope="session")
def trained_results(convolution_results) -> dict:
    """Results of every case of gradients of logits by name, from the same process."""
    return convolution_results


@pytest.fixture(scope="session")
def sweep_results() -> dict:
    """Results of the seam's sweep by name."""
    return run_worker("kernel_worker.py", "sweep_cases", interpret=not has_gpu())


@pytest.fixture(scope="session")
def sm90() -> dict:
    """Resources of every configuration of the written rules, compiled for compute capability 9.0."""
    return run_worker("sm90_worker.py", interpret=False)
