"""Processes beside others: scripts in the place of workers, which tell by files what lives and what has failed."""

import sys
from collections.abc import Callable

import pytest

from saf.bench.harness.arms import Arm
from saf.bench.harness.timing import Budget
from saf.bench.model import processes
from saf.bench.model.processes import Children

WORKER = """#!{python} -S
import json, pathlib, sys, time
name, here = json.load(sys.stdin)["arm"]["kernel"], pathlib.Path("{folder}")
lives, failed = here / "lives", here / "failed"
def wait(path):
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
with (here / "log").open("a") as log:
    print(name, file=log)
if name == "small":
    lives.touch()
    wait(failed)
    time.sleep(0.3)
    lives.unlink()
elif name == "never":
    print("Warning: something", file=sys.stderr)
    sys.exit("ValueError: no such kernel. Take another one.")
elif not failed.exists() or lives.exists():
    wait(lives)
    failed.touch()
    print(json.dumps({{"error": "OutOfMemoryError: CUDA out of memory"}}))
    sys.exit()
print(json.dumps({{"peak_memory_bytes": 7}}))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, said) -> Callable[..., list[dict]]:
    script = tmp_path / "worker"
    script.write_text(WORKER.format(python=sys.executable, folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(script))

    def run(*kernels: str, workers: int, budget: Budget | None = None) -> list[dict]:
        with Children(budget or Budget(), workers, said.append) as processes:
            return processes.run([{"arm": Arm(kernel).to_dict()} for kernel in kernels])

    return run


def started(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_what_fails_beside_others_runs_again_when_they_have_ended(run, tmp_path, said):
    assert run("big", "small", workers=2) == [{"peak_memory_bytes": 7}] * 2
    assert sorted(started(tmp_path)[:2]) == ["big", "small"]
    assert started(tmp_path)[2:] == ["big"]
    assert said == [
        "again, alone: ordinary big, which failed beside others: OutOfMemoryError: CUDA out of memory",
    ]


def test_what_fails_alone_too_is_an_error_told_in_short(run, tmp_path, said):
    replies = run("never", "never", workers=2)
    assert replies == [{"error": "its process ended with code 1: ValueError: no such kernel"}] * 2
    assert started(tmp_path) == ["never"] * 4
    assert len(said) == 2


def test_what_had_nothing_beside_it_does_not_run_again(run, tmp_path, said):
    (reply, _) = run("never", "never", workers=1)
    assert "no such kernel" in reply["error"]
    assert started(tmp_path) == ["never"] * 2
    assert said == []


def test_nothing_runs_again_when_time_has_run_out(run, tmp_path, said, monkeypatch):
    replied, reply = [], processes._Child.reply
    monkeypatch.setattr(processes._Child, "reply", lambda child: replied.append(1) or reply(child))
    budget = Budget()
    monkeypatch.setattr(budget, "fits", lambda _: len(replied) < 2)
    assert run("big", "small", workers=2, budget=budget) == [
        {"error": "OutOfMemoryError: CUDA out of memory (beside others; no time to run it alone)"},
        {"peak_memory_bytes": 7},
    ]
    assert sorted(started(tmp_path)) == ["big", "small"]
    assert said == []
