"""Run kernels in a process of their own, so that the interpreter's switch reaches no other test."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run_worker(script: str, *arguments: str, interpret: bool, **settings: str) -> dict:
    """Run a script of tests/ with settings of the environment; return the JSON object on its last line."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **settings}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / script), *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def kernel_results(request: pytest.FixtureRequest) -> dict:
    """What is wrong with every case of the selected areas of tests/ops/kernels, by area and name, from one process."""
    import torch

    areas = [
        each.callspec.params["area"]
        for each in request.session.items
        if "kernel_results" in getattr(each, "fixturenames", ())
    ]
    return run_worker("ops/kernel_worker.py", *dict.fromkeys(areas), interpret=not torch.cuda.is_available())


@pytest.fixture(scope="session")
def sm90() -> dict:
    """Resources of every configuration of the written rules, compiled for compute capability 9.0."""
    return run_worker("ops/sm90_worker.py", interpret=False)
