"""A training run from top to bottom: it starts, makes updates and events, saves, stops at a signal, and reports."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from saf.checkpoint import latest
from saf.distributed import all_ranks_or_raise, on_rank0, process_group
from saf.errors import DivergenceError, InputError
from saf.schedules import Event, Outcome
from saf.train.config import TrainConfig
from saf.train.events import apply_event, needs_gradient, resolve_event
from saf.train.finish import finish, report_between
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
    this with the same settings, and all return the same. See docs/parallel.md.

    Raises:
        InputError: The folder holds a run already, or other settings than the run to resume; too little memory.
        CheckpointError: A damaged checkpoint.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        OSError: The disk is full; checkpoints up to there are whole.
        RuntimeError: Another process of the group ended.
    """
    with process_group(config.device), _few_host_threads(config.device), ExitStack() as locks:
        with StopRequest() as stop:
            run = start_run(config, resume=resume, locks=locks)
            try:
                finished = _train(run, stop)
            except DivergenceError as error:
                good = latest(run.checkpoints) or config.parent or "the beginning"
                raise DivergenceError(f"{error}. Go on from {good} with a lower peak_lr") from None
            except torch.OutOfMemoryError as error:
                remedy = "lower batch_size or length, or pass activation_checkpointing"
                raise InputError(f"training must fit into the device's memory; {remedy} ({error})") from error
            finally:
                if run.log:
                    run.log.close()
        if not finished:
            return {"stopped_at": run.update, "checkpoint": str(on_rank0(lambda: latest(run.checkpoints)))}
        return finish(run)


@contextmanager
def _few_host_threads(device: str) -> Iterator[None]:
    """With a GPU, run host operations on one thread in this context.

    Copies of batches wake all threads, which then spin beside the one that launches kernels: an update of 34M at 4K
    takes 0.080 s with 64 threads and 0.055 s with one (four runs on an H200 host). The whole run has one number,
    since compiled code is compiled again where it changes.
    """
    threads = torch.get_num_threads()
    if device != "cpu" and torch.cuda.is_available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- updates and events


def _train(run: Run, stop: "StopRequest") -> bool:
    """Run updates to the end; return False when a signal stopped them."""
    config = run.config
    run.model.train()
    run.elapsed.enter("train")
    if run.update == 0 and run.parent_hash is None and 0 in config.branch_updates:
        run.save()
    apply_due_events_(run, saved=run.update == run.start and run.parent_hash is not None)
    report_between(run)
    while not run.finished():
        record = run.run_update()
        if run.proposer:
            run.proposer.observe(run.update, record["loss"])
        if config.eval_every and run.update % config.eval_every == 0:
            run.controller_loss("periodic")
        periodic = config.save_every and run.update % config.save_every == 0
        finished = run.finished()
        # Read once: a signal that comes while this line runs waits for the next update, which is then saved.
        stopping = run.updater.parallel.any(stop.requested) and not finished
        if not finished and (stopping or periodic or run.update in config.branch_updates):
            run.save()
        if stopping:
            return False
        apply_due_events_(run)
        report_between(run)
    run.elapsed.enter(None)
    if run.update > run.start or run.changed:
        run.save()
    return True


def apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them, unless there is one (`saved`).

    None is due where the run's budget leaves no update behind it. The place in the training data does not move.
    """
    budget, proposer = run.budget_share(), run.proposer
    if budget is not None and budget > 1:
        return
    while proposer and (event := proposer.propose(run.update)):
        if not saved:
            run.save()
        saved = True
        proposer.done(event, _apply_event_(run, resolve_event(event, run.config)))
        if not needs_gradient(run.config, proposer):
            run.updater.gradient = None


def _apply_event_(run: Run, event: Event) -> Outcome:
    """Apply one event and record it, with the controller loss before and after."""
    before = run.controller_loss(f"before_{event.kind}", batches=event.batches)
    with run.elapsed("freeze"), run.updater.parallel.whole(moments=True):
        with all_ranks_or_raise():
            change = apply_event(run, event)
        run.updater.compile_()
    after = run.controller_loss(f"after_{event.kind}", batches=event.batches)
    losses = {"loss_before": before, "loss_after": after}
    with run.elapsed("freeze"):
        values = {**losses, "seconds": change.seconds, **change.values}
        number = run.record_event(event, change.heads, values, change.tensors)
    run.say(f"{change.summary}; took {sum(change.seconds.values()):.1f} s")
    return change.outcome(number, loss_before=before, loss_after=after)


# --- signals


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
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence_lost_terminal_()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _silence_lost_terminal_() -> None:
    """Send output nowhere where its terminal is gone: progress lines must not prevent the checkpoint."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
