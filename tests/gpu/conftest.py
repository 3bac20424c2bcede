"""Kernels of the sweep, compiled by several processes at once: one after another they take most of its time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROCESSES = min(8, (os.cpu_count() or 1) // 2)
FEWEST = 20
"""Cases from which on starting processes pays."""
SHARE = """
import sys
from tests.gpu.test_sweep import CASES
from tests.ops.layers import mix
part, parts = map(int, sys.argv[1:])
for case in list(CASES.values())[part::parts]:
    mix(case, "cuda", case.pattern("cuda") if case.frozen else None)
"""


@pytest.fixture(scope="session")
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    """Fill Triton's cache on disk. What fails here is compiled, or fails for all to see, in the tests."""
    count = sum("compiled_kernels" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if count < FEWEST or PROCESSES < 2:
        return
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    shares = [[sys.executable, "-c", SHARE, str(part), str(PROCESSES)] for part in range(PROCESSES)]
    running = [
        subprocess.Popen(
            share,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for share in shares
    ]
    for part, process in enumerate(running):
        _, errors = process.communicate()
        if process.returncode:
            print(f"compiling share {part} ahead failed: {errors.decode()[-500:]}")
