"""A training run from top to bottom: `pretrain` starts it, does its updates and events, stops at a signal, and reports.

An update is `run_update`, which calls the `Updater` (step.py). An event freezes or prunes heads, or makes them live
again (events.py). `start_run` (start.py) builds or restores a `Run` (run.py), which holds the state, logs and
checkpoints.
"""

import os
import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from saf.checkpoint import checkpoint_hash, latest
from saf.distributed import on_rank0, process_group
from saf.errors import DivergenceError, InputError
from saf.machine import one_host_thread
from saf.records.files import write_json
from saf.train.config import TrainConfig
from saf.train.events import apply_due_events_
from saf.train.run import Run, write_result
from saf.train.start import needs_gradient, start_run
from saf.train.step import learning_rate

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
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel of the settings cannot run here.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        OSError: The disk is full; checkpoints up to there are whole.
        RuntimeError: Another process of the group ended.
    """
    with process_group(config.device), one_host_thread(config.device), ExitStack() as locks:
        with StopRequest() as stop:
            run = start_run(config, resume=resume, locks=locks)
            try:
                finished = _train(run, stop)
            except DivergenceError as error:
                # Nothing of that update was applied, and updates before it had finite losses.
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


def _train(run: Run, stop: "StopRequest") -> bool:
    """Do all updates and events; return False when a signal stopped them."""
    config = run.config
    run.model.train()
    run.elapsed.enter("train")
    if run.update == 0 and run.parent_hash is None and 0 in config.branch_updates:
        run.save()
    # Where a branch begins with an event, the state before it is the parent's checkpoint.
    _apply_due_events_(run, saved=run.update == run.start and run.parent_hash is not None)
    _report_between(run)
    while not run.finished():
        loss = run_update(run)
        if run.proposer:
            run.proposer.observe(run.update, loss)
        if config.eval_every and run.update % config.eval_every == 0:
            run.controller_loss("periodic")
        periodic = config.save_every and run.update % config.save_every == 0
        finished = run.finished()
        # Any rank's signal stops all, after the same update. Read once: a signal that comes while this line runs waits
        # for the next update, which is then saved.
        stopping = run.updater.parallel.any(stop.requested) and not finished
        if not finished and (stopping or periodic or run.update in config.branch_updates):
            run.save()
        if stopping:
            return False
        _apply_due_events_(run)
        _report_between(run)
    # From here on nothing counts: arms are compared by the time that their training took.
    run.elapsed.enter(None)
    if run.update > run.start or run.just_changed:
        run.save()
    return True


def _apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them, unless there is one (`saved`)."""
    budget, proposer = run.budget_share(), run.proposer
    # Where the budget allows no update after an event, it would only cost.
    if proposer is None or (budget is not None and budget > 1) or not proposer.propose(run.update):
        return
    if not saved:
        run.save()  # a run that is killed during an event goes on from here, where the schedule proposes it again
    apply_due_events_(run)
    if not needs_gradient(run.config, proposer):
        run.updater.gradient = None  # no later event reads it, and averaging costs time in every update


# --- one update


def run_update(run: Run) -> float:
    """Do one update, log it as a line of metrics.jsonl, and return its loss in nats per target.

    Raises DivergenceError as `Updater.update` does.
    """
    cuda = run.execution.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate, compiling = _next_learning_rate(run), run.updater.compiling
    if compiling:
        run.say("compiling the model for the next update, which may take a minute or more ...")
    with run.elapsed("compile" if compiling else "train"):
        result = run.updater.update(rate)
    if not compiling:
        run.recent.append(result.seconds)
    if cuda and run.update >= run.timed_from:
        run.peak_memory = max(run.peak_memory or 0, torch.cuda.max_memory_allocated())
    if run.log:
        run.log.updated(result, rate)
    return result.loss


def _next_learning_rate(run: Run) -> float:
    """Return the learning rate of the next update; a budget stretches the rest of the schedule over itself.

    After an event the rate rises again from zero, over `rewarm_updates`.
    """
    config, share = run.config, run.budget_share()
    done, updates = run.update + 1 if share is None else run.start, config.updates - config.lr_start
    progress = (done - config.lr_start) / updates
    if share is not None:
        # At matched time the rate follows elapsed time: a faster arm does more updates along the same curve.
        begin = max(progress, 0.0)
        progress = begin + (1 - begin) * min(share, 1.0)
    warmup = config.warmup / updates if isinstance(config.warmup, int) else config.warmup
    rate = learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=warmup)
    if run.last_change is None or config.rewarm_updates == 0:
        return rate
    return rate * min((run.update - run.last_change + 1) / config.rewarm_updates, 1.0)


# --- reports


def _report_between(run: Run) -> None:
    """Report on the model where the settings ask for it before the end, unless a report is there from before."""
    path = run.report_path(run.update)
    if run.update not in run.config.report_at or run.finished() or on_rank0(path.is_file):
        return
    with run.elapsed(None), run.updater.parallel.whole():
        checkpoints = {"parent": run.parent_hash}
        report = run.task.report(run.model, run.execution, folder=path.parent, checkpoints=checkpoints)
        on_rank0(lambda: write_json(path, report))


def finish(run: Run) -> dict[str, Any]:
    """Evaluate the reporting partition, write result.json and return it; every rank calls this.

    Raises InputError where the run's time was over before the first update.
    """
    final, budget = on_rank0(lambda: latest(run.checkpoints)), run.config.time_budget_seconds
    if final is None or (budget is not None and run.update == run.start):
        spent = f"{run.elapsed.total:.1f} s passed before the first one"
        raise InputError(
            f"time_budget_seconds={budget:g} must allow an update, and {spent}; allow more, in another folder"
        )
    with run.updater.parallel.whole():
        checkpoints: dict[str, str | None] = {"final": on_rank0(lambda: checkpoint_hash(final))}
        report = run.task.report(run.model, run.execution, folder=run.folder, checkpoints=checkpoints)
    return on_rank0(lambda: write_result(run, final, report))


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
