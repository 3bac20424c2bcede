"""How a run or a measurement is made: the words of its command, and a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from saf.experiments.planned_run import PlannedRun
from saf.experiments.store import Store
from saf.train.loop import EXIT_STOPPED


class Stop(Protocol):
    """Say whether runs shall stop after a checkpoint."""

    @property
    def requested(self) -> bool:
        """Return whether they shall."""
        ...


Launch = Callable[..., int]
"""Runs `saf` with the words given, its output in a file, on one device, until it ends or a stop is requested; returns
its exit code."""

_LOOK_EVERY = 0.2
"""Seconds between looks at a process: far below the seconds that the smallest run takes to start."""
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
"""What PyTorch and its compiler read how many threads they may use from; each takes every core of the machine else."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where PyTorch's compiler and Triton keep what they compiled."""


def words(run: PlannedRun, store: Store, data: Path) -> list[str]:
    """Return the words after `saf` that train a run, or resume it."""
    folder, flags = store.run_folder(run.key), dict(run.flags)
    if run.work is None and store.begun(run.key):
        return [run.verb, "--out", str(folder), "--resume"]
    parent = store.checkpoint(run)
    start = ["--parent", str(parent)] if parent else ["--data", str(data)]
    if run.match:
        start += ["--match-time", str(store.run_folder(run.match))]
    if run.heads:
        start += ["--freeze.heads", *(f"{layer}:{head}" for layer, head in store.heads(run))]
    if run.like:
        del flags["task"]
        start += ["--like", str(store.run_folder(run.like))]
    elif run.files:
        start += ["--data", str(run.files.train), "--test", str(run.files.test)]
    # Runs that choose the number of epochs for a finetuned one are in its folder before it begins.
    start += ["--resume"] * (run.work is not None and folder.is_dir())
    return [run.verb, *start, "--out", str(folder), *(word for item in flags.items() for word in flag_words(*item))]


def in_a_process(
    arguments: Sequence[str],
    log: Path,
    device: str | None,
    stop: Stop,
    processes: int = 1,
    *,
    held: Sequence[int] = (),
    threads: int | None = None,
    compiles_anew: bool = False,
) -> int:
    """Run `saf` in a process of its own, on one CUDA device where one is named, and return its exit code.

    Several `processes` are started by torchrun, a device each. What is started has a session of its own, so that a
    terminal's Ctrl-C comes to it once, from here: it then saves and stops. It inherits the open files `held`, which
    hold a store: if this process is killed, the run goes on, and nothing else begins there. It computes and compiles
    with so many `threads`, where the environment does not say how many; None is as many as there are cores.
    One that `compiles_anew` finds nothing of what other processes compiled, and leaves nothing behind.
    """
    shared = {} if threads is None else dict.fromkeys(THREADS, str(threads))
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    group = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    module = ["experiments.analyses", *arguments[1:]] if arguments[0] == "analyze" else ["saf", *arguments]
    command = [sys.executable, "-m", *(group if processes > 1 else []), *module]
    with ExitStack() as kept:
        if compiles_anew:
            folder = kept.enter_context(TemporaryDirectory(prefix="saf-compiled-", ignore_cleanup_errors=True))
            chosen |= dict.fromkeys(CACHES, folder)
        file, environment = kept.enter_context(open(log, "ab")), {**shared, **os.environ, **chosen}
        process = kept.enter_context(
            subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True, pass_fds=held)
        )
        asked = False
        while process.poll() is None:
            if stop.requested and not asked:
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(_LOOK_EVERY)
        # Before its first update and after its last one a run does not catch the signal: its checkpoints are there.
        return EXIT_STOPPED if asked and process.returncode == -signal.SIGTERM else process.returncode


def flag_words(name: str, value: Any) -> list[str]:
    """Return one setting as words of the command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, dict):
        return [flag, *(str(part) for item in value.items() for part in item)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def last_line(log: Path) -> str:
    """Return the last line that a process wrote, which says why it failed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it wrote nothing"
