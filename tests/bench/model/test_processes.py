"""Processes beside others: scripts in the place of workers, which tell by files what lives and what has failed."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saf.bench.harness.arms import Arm
from saf.bench.harness.timing import Budget
from saf.bench.model import processes, worker
from saf.bench.model.processes import Children
from saf.cli import main
from saf.records.files import read_json

WORKER = """#!{python} -S
import json, os, pathlib, subprocess, sys, time
arm, here = json.load(sys.stdin)["arm"], pathlib.Path("{folder}")
name = "busy" if arm["backend"] else arm["kernel"]
lives, failed = here / "lives", here / "failed"
def wait(path):
    until = time.monotonic() + 300
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
with (here / "log").open("a") as log:
    print(name, file=log)
if name == "small":
    lives.touch()
    wait(failed)
    time.sleep(0.3)
    lives.unlink()
elif name == "busy":
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.makedirs(cache)
    started = subprocess.Popen(["{python}", "-S", here / "writer.py", cache])
    (here / "starting").write_text(f"{{started.pid}} {{cache}}")
    (here / "starting").rename(here / "started")
    time.sleep(600)
elif name == "never":
    print("Warning: something", file=sys.stderr)
    sys.exit("ValueError: no such kernel. Take another one.")
elif name == "big" and (not failed.exists() or lives.exists()):
    wait(lives)
    failed.touch()
    print(json.dumps({{"error": "OutOfMemoryError: CUDA out of memory"}}))
    sys.exit()
print(json.dumps({{"peak_memory_bytes": 7, "memory_kind": "resident"}}))
"""

ANSWER = {"peak_memory_bytes": 7, "memory_kind": "resident"}
WRITER = """
import itertools, pathlib, sys
for number in itertools.count():
    try:
        pathlib.Path(sys.argv[1], str(number)).touch()
    except OSError:
        pass
"""


@pytest.fixture
def workers(tmp_path, monkeypatch) -> None:
    """Let workers be the script."""
    script = tmp_path / "worker"
    script.write_text(WORKER.format(python=sys.executable, folder=tmp_path))
    script.chmod(0o755)
    (tmp_path / "writer.py").write_text(WRITER)
    monkeypatch.setattr(processes.sys, "executable", str(script))


@pytest.fixture
def run(workers, said) -> Callable[..., list[dict]]:
    def run(*kernels: str, workers: int, budget: Budget | None = None) -> list[dict]:
        with Children(budget or Budget(), workers, said.append) as processes:
            return processes.run([{"arm": Arm(kernel).to_dict()} for kernel in kernels])

    return run


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def started(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_what_fails_beside_others_runs_again_when_they_have_ended(run, tmp_path, said):
    assert run("big", "small", workers=2) == [ANSWER] * 2
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


@pytest.fixture
def replied(monkeypatch) -> list[int]:
    """As many items as workers have replied."""
    replied, reply = [], processes._Child.reply
    monkeypatch.setattr(processes._Child, "reply", lambda child: replied.append(1) or reply(child))
    return replied


def test_nothing_runs_again_when_time_has_run_out(run, tmp_path, said, monkeypatch, replied):
    budget = Budget()
    monkeypatch.setattr(budget, "fits", lambda _: len(replied) < 2)
    assert run("big", "small", workers=2, budget=budget) == [
        {"error": "OutOfMemoryError: CUDA out of memory (beside others; no time to run it alone)"},
        ANSWER,
    ]
    assert sorted(started(tmp_path)) == ["big", "small"]
    assert said == []


def test_what_a_stopped_worker_started_ends_with_it_and_leaves_no_folder(run, tmp_path, said, monkeypatch):
    budget = Budget()
    monkeypatch.setattr(budget, "fits", lambda _: not (tmp_path / "started").exists())
    assert run("busy", workers=1, budget=budget) == [{"error": "out of time"}]
    pid, cache = (tmp_path / "started").read_text().split(maxsplit=1)
    assert not Path(cache).parent.exists()
    until = time.monotonic() + 300
    while time.monotonic() < until and not ended(int(pid)):
        time.sleep(0.01)
    assert ended(int(pid))
    assert said == []


def test_the_record_of_memory_is_whole_when_time_ends_a_worker(workers, tmp_path, monkeypatch, replied):
    """Time is over when one worker has replied and the other one is at work, whenever that is."""
    monkeypatch.setattr(Budget, "fits", lambda *_: not (replied and (tmp_path / "started").exists()))
    words = "bench update --model tiny --points 128x4x1 --rates 0.5 --others --backends toeplitz --no-free --memory"
    out = tmp_path / "memory.json"
    assert main([*words.split(), "--pairs", "0", "--workers", "2", "--seconds", "600", "--out", str(out)]) == 0
    record = read_json(out)
    assert record["finished"]
    assert [(entry["arm"], entry["bytes"]) for entry in record["memory"]] == [("ordinary auto", 7)]
    assert [entry["why"] for entry in record["left_out"]] == ["out of time"]
    _, cache = (tmp_path / "started").read_text().split(maxsplit=1)
    assert not Path(cache).parent.exists()


def test_a_folder_that_cannot_be_removed_is_told(monkeypatch, said):
    def never(_):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(processes, "REMOVALS", 2)
    with Children(Budget(), 1, said.append) as children:
        monkeypatch.setattr(type(children._folder), "cleanup", never)
    monkeypatch.undo()
    children._folder.cleanup()
    assert said == [f"{children._folder.name} could not be removed: [Errno 39] Directory not empty"]


def test_a_worker_ends_with_what_started_it(monkeypatch):
    parents, codes = iter([7, 7, 1]), []
    monkeypatch.setattr(worker, "PARENT_SECONDS", 0.0)
    monkeypatch.setattr(worker.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(worker.os, "_exit", codes.append)
    worker.end_with(7)
    assert codes == [1]
    assert next(parents, None) is None
