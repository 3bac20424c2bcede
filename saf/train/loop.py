"""Training from the first update, or the last checkpoint, to the final numbers, and how a signal stops it politely."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from saf.errors import CheckpointError, DivergenceError
from saf.machine.processes import done_once, joined
from saf.records.folders import no_room
from saf.train.ahead import CompilingAhead
from saf.train.checkpoint import latest
from saf.train.clock import Clock
from saf.train.config import TrainConfig
from saf.train.events import carry_out_due_
from saf.train.results import finish, report_between, warn_of_gaps
from saf.train.run import Run
from saf.train.start import start_run

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped after saving: start it again with `--resume`."""


def pretrain(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train one arm in the folder `config.out` and return its result.json.

    With `resume` it goes on from the folder's newest checkpoint (from the beginning when there is none); on a CPU
    the outcome is bit for bit that of a run that never stopped. After a first SIGINT, SIGTERM or SIGHUP the current
    update ends, a checkpoint is saved, and `{"stopped_at": update, "checkpoint": path}` is returned.

    Processes that `torchrun` started, or that are in a `torch.distributed` group already, train together: each calls
    this with the same settings, and all see what one would see. See docs/parallel.md.

    Raises:
        InputError: The folder holds a run already, or other settings than the run to resume.
        CheckpointError: A damaged checkpoint, or no space left for one.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        SafError: Another process of the group ended.
    """
    with joined(config.device):
        return _pretrain(config, resume)


def _pretrain(config: TrainConfig, resume: bool) -> dict[str, Any]:
    """Do what `pretrain` does, in the group of processes that is there."""
    clock = Clock()
    with ExitStack() as held:
        with StopRequest() as stop:
            run = start_run(config, resume=resume, clock=clock)
            held.enter_context(run.lock or nullcontext())  # until the result is written, too
            warn_of_gaps(run)
            ahead = CompilingAhead()
            try:
                with _full_disk_explained(run, "logs"):
                    finished = _train(run, stop, ahead)
            except DivergenceError as error:
                raise DivergenceError(f"{error}. {run.last_good()}, with a lower peak_lr") from None
            finally:
                ahead.stop()
                run.close()
        if not finished:
            return {"stopped_at": run.update, "checkpoint": str(done_once(lambda: latest(run.checkpoints)))}
        with _full_disk_explained(run, "result"):
            return finish(run)


@contextmanager
def _full_disk_explained(run: Run, files: str) -> Iterator[None]:
    """Turn an error about a full disk into one that says what is lost, what is kept, and how to go on."""
    try:
        yield
    except OSError as error:
        if (reason := no_room(error)) is None:
            raise
        raise CheckpointError(
            f"{reason}: the run's {files} could not be written to {run.folder}. {run.last_good()}; "
            "nothing up to there is lost: make room, then resume"
        ) from error


def _train(run: Run, stop: "StopRequest", ahead: CompilingAhead) -> bool:
    """Run updates to the end; return False when a signal stopped them."""
    config, clock = run.config, run.clock
    run.model.train()
    clock.enter("training")
    _save_beginning(run)
    carry_out_due_(run, saved=run.update == run.start and run.parent_hash is not None)
    report_between(run)
    while not run.finished():
        if run.observer and run.updater.compiling:
            run.observer.progress.compiling(run.update + 1)
        record = run_update(run)
        ahead.begin(run)  # not before: now it is known what memory of the device training leaves
        if run.observer:
            run.observer.updated(record)
        if run.proposer:
            run.proposer.observe(run.update, record["loss"])
        if config.eval_every and run.update % config.eval_every == 0:
            run.controller_loss("periodic")
        periodic = config.save_every and run.update % config.save_every == 0
        finished = run.finished()
        # Looked at once: a signal that comes while this line runs waits for the next update, which it then saves.
        stopping = run.updater.parallel.any(stop.requested) and not finished
        if not finished and (stopping or periodic or run.update in config.branch_updates):
            run.save()
        if stopping:
            return False
        carry_out_due_(run)
        report_between(run)
    clock.end()
    if run.update > run.start or run.changed:
        run.save()
    return True


def _save_beginning(run: Run) -> None:
    """Save a run before its first update where others are to branch from there, unless it has a parent."""
    if run.update == 0 and run.parent_hash is None and 0 in run.config.branch_updates:
        run.save()


def run_update(run: Run) -> dict[str, Any]:
    """Do one update and return its line for metrics.jsonl; raise DivergenceError as `Updater.update` does."""
    cuda = run.execution.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate, compiling, before = run.next_learning_rate(), run.updater.compiling, run.updater.uncaptured
    done = run.updater.update(rate)
    after = run.updater.uncaptured
    run.clock.updated(done.seconds, compiled=compiling)
    if cuda and run.update >= run.timed_from:
        run.peak_memory = max(run.peak_memory or 0, torch.cuda.max_memory_allocated())
    return {
        "update": run.update,
        "tokens": run.tokens,
        "loss": done.loss,
        "lr": rate,
        "grad_norm": done.grad_norm,
        "update_seconds": done.seconds,
        **({} if before is None or after is None else {"uncaptured": after - before}),
    }


_HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal of a run is closed; unknown to some platforms."""


class StopRequest:
    """Let SIGINT, SIGTERM and SIGHUP set `requested` in this context; a second one raises KeyboardInterrupt at once.

    Outside the main thread handlers cannot be set, and nothing is caught. A SIGHUP that the process was started to
    ignore (`nohup`) stays ignored.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in _asking():
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, which stops the run after its checkpoint; a second one interrupts at once."""
        if number == _HANGUP:
            _silence_lost_terminal_()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def _asking() -> list[int]:
    hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else [_HANGUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _silence_lost_terminal_() -> None:
    """Send standard output and error nowhere where their terminal is gone: telling of the stop must not prevent it."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
