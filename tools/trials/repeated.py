"""Trials that are repeated: runs started together, killed at any moment, and writing to a disk that fails or is full.

Runs are of a second: processes of a pool that has imported everything already are forked for each, so that they are
killed as any process is, and start within milliseconds of one another.
"""

import builtins
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saf.errors import SafError
from saf.freezing.config import FreezeConfig
from saf.records.files import read_json, read_lines
from saf.train import TrainConfig, latest, pretrain
from tools.trials.folders import prepare_text, run_settings

DONE, REFUSED, OTHER = 0, 3, 4
"""How a process ends."""

Found = Iterator[tuple[str, str, str]]


def try_starts(root: Path, count: int, seed: int) -> Found:
    """Start two runs together in one folder: one trains to its end, the other is refused, naming the folder."""
    torch.set_num_threads(1)
    data = prepare_text(root, seed)
    alone = _config(data, root / "alone")
    pretrain(alone)
    whole = _outcome(Path(alone.out))
    for number in range(count):
        config = _config(data, root / f"both-{number}")
        said = [root / f"said-{number}-{each}" for each in (0, 1)]
        begin = time.time() + 0.05
        children = [_child(_at(begin, partial(pretrain, config)), path) for path in said]
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        texts = "; ".join(path.read_text() for path in said if path.exists())
        if codes != [DONE, REFUSED]:
            what = f"lost: the processes ended with {codes}: {texts}"
        elif config.out not in texts:
            what = f"nameless: {texts}"
        else:
            what = "one trained" if _outcome(Path(config.out)) == whole else "lost: the run has other numbers"
        yield "two runs in one folder", f"trial {number}", what
        shutil.rmtree(config.out, ignore_errors=True)


def try_kills(root: Path, count: int, seed: int) -> Found:
    """Kill a run at drawn moments until it ends by itself: it has the numbers of one that was left alone."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    data = prepare_text(root, seed)
    alone = _config(data, root / "alone")
    began = time.perf_counter()
    pretrain(alone)
    began = time.perf_counter()
    pretrain(_config(data, root / "again"))
    seconds = time.perf_counter() - began
    whole = _outcome(Path(alone.out))
    for number in range(count):
        config = _config(data, root / f"killed-{number}")
        kills = 0
        while True:
            child = _child(partial(_start_or_resume, config), root / f"said-{number}")
            # Moments over the whole run, the last resumption alone.
            code = _wait(child, draw.uniform(0, seconds) if kills < 4 else None)
            if code != -signal.SIGKILL:
                break
            kills += 1
        if code != DONE:
            what = f"lost: after {kills} kills {(root / f'said-{number}').read_text()}"
        else:
            what = "same bits" if _outcome(Path(config.out)) == whole else f"lost: other numbers after {kills} kills"
        yield f"killed {kills} times", f"trial {number}", what
        shutil.rmtree(config.out, ignore_errors=True)


def try_disk(root: Path, count: int, seed: int) -> Found:
    """Let the n-th write, flush, rename or new folder of a run fail for want of room, for each n; then resume it."""
    torch.set_num_threads(1)
    data = prepare_text(root, seed)
    alone = _config(data, root / "alone")
    with _Full(Path(alone.out), None) as counted:
        pretrain(alone)
    whole = _outcome(Path(alone.out))
    places = list(range(1, counted.calls + 1))
    random.Random(seed).shuffle(places)
    for place in sorted(places[: count or None]):
        config = _config(data, root / f"full-{place}")
        message = ""
        with _Full(Path(config.out), place) as full, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pretrain(config)
            except (SafError, OSError) as error:
                message = f"{error}"
            except BaseException as error:  # whatever comes is what is counted
                message = f"{type(error).__name__}: {error}"
        yield f"full at {full.where}", f"write {place}", _after(config, message, whole)
        shutil.rmtree(config.out, ignore_errors=True)


def try_full(root: Path, count: int, seed: int) -> Found:
    """Run on a file system (tmpfs) too small for the run, of drawn sizes; make it larger, and resume the run."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    data = prepare_text(root, seed)
    alone = _config(data, root / "alone")
    pretrain(alone)
    whole = _outcome(Path(alone.out))
    needed = sum(path.stat().st_blocks * 512 for path in Path(alone.out).rglob("*"))
    disk = root / "disk"
    disk.mkdir()
    for number in range(count):
        size = draw.randrange(4096, needed)
        _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk))
        try:
            config = _config(data, disk / "run")
            said = root / f"said-{number}"
            code = _wait(_child(partial(_start_or_resume, config), said), None)
            _mount("-o", f"remount,size={4 * needed}", str(disk))
            what = _after_full(config, code, said, whole)
            yield f"room for {size * 10 // needed * 10}% of a run", f"trial {number}", what
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def _mount(*words: str) -> None:
    """Mount a file system, or say what that takes."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        raise SystemExit("`full` mounts file systems of a given size, which takes Linux and root: run it as root")
    subprocess.run(["mount", *words], check=True)


def _after_full(config: TrainConfig, code: int, said: Path, whole: Any) -> str:
    """Return what came of a run that ended with `code` where room was short, and of resuming it."""
    if code == DONE:
        return "lost: the run has other numbers" if _outcome(Path(config.out)) != whole else "same bits"
    return _after(config, said.read_text(), whole)


def _after(config: TrainConfig, message: str, whole: Any) -> str:
    if message and config.out not in message:
        return f"nameless: {message}"
    if message:
        _start_or_resume(config)
    found = _outcome(Path(config.out))
    if found != whole:
        return "lost: the run has other numbers"
    return "refused, then same bits" if message else "same bits"


class _Full:
    """Make the n-th call that writes below a folder fail, and count those calls."""

    def __init__(self, folder: Path, place: int | None):
        self._folder, self._place = str(folder), place
        self.calls, self.where = 0, ""

    def __enter__(self) -> "_Full":
        self._real = {"open": builtins.open, **{name: getattr(os, name) for name in ("fsync", "replace", "mkdir")}}
        builtins.open = self._open  # type: ignore[assignment]
        os.fsync = lambda file: self._met("fsync", f"/proc/self/fd/{file}", self._real["fsync"], file)
        for name in ("replace", "mkdir"):
            setattr(os, name, self._named(name))
        return self

    def __exit__(self, *reason: object) -> None:
        builtins.open = self._real["open"]
        for name in ("fsync", "replace", "mkdir"):
            setattr(os, name, self._real[name])

    def _named(self, name: str) -> Callable[..., Any]:
        return lambda path, *rest, **named: self._met(name, path, self._real[name], path, *rest, **named)

    def _open(self, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if isinstance(file, str | Path) and set(mode) & set("wax+"):
            return self._met("open", file, self._real["open"], file, mode, *rest, **named)
        return self._real["open"](file, mode, *rest, **named)

    def _met(self, name: str, path: Any, real: Callable[..., Any], *given: Any, **named: Any) -> Any:
        at = os.path.realpath(path) if str(path).startswith("/proc") else str(path)
        if at.startswith(self._folder):
            self.calls += 1
            if self.calls == self._place:
                self.where = name
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), at)
        return real(*given, **named)


def _config(data: Path, out: Path) -> TrainConfig:
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    return TrainConfig(**run_settings(data, out, 0), freeze=freeze)


def _start_or_resume(config: TrainConfig) -> None:
    pretrain(config, resume=(Path(config.out) / "config.json").exists())


def _outcome(folder: Path) -> Any:
    """Return what may not depend on what happened on the way: tensors, losses and events."""
    final = latest(folder / "checkpoints")
    assert final is not None
    names = ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json")
    events = read_lines(folder / "events.jsonl")
    return {
        "final": final.name,
        **{name: (final / name).read_bytes() for name in names},
        "metrics": [{**line, "update_seconds": 0} for line in read_lines(folder / "metrics.jsonl")],
        "evaluations": read_lines(folder / "evaluations.jsonl"),
        "events": [{name: line[name] for name in ("number", "kind", "update", "heads", "tensors")} for line in events],
        "tensors": [(folder / line["tensors"]).read_bytes() for line in events],
        "report": read_json(folder / "result.json")["report_loss"],
    }


def _child(work: Callable[[], Any], said: Path) -> int:
    """Fork a process that does the work and says in a file why it did not; return its number."""
    child = os.fork()
    if child:
        return child
    code = OTHER
    try:
        sys.stdout = sys.stderr = builtins.open(os.devnull, "w")  # noqa: SIM115
        work()
        code = DONE
    except SafError as error:
        said.write_text(str(error))
        code = REFUSED
    except BaseException as error:  # whatever comes is told
        said.write_text(f"{type(error).__name__}: {error}")
    os._exit(code)


def _at(moment: float, work: Callable[[], Any]) -> Callable[[], Any]:
    def wait_then_work() -> Any:
        time.sleep(max(0.0, moment - time.time()))
        return work()

    return wait_then_work


def _wait(child: int, seconds: float | None) -> int:
    """Return how a process ends, killed after so many seconds unless it has ended."""
    if seconds is not None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
