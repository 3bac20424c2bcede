"""A training run from top to bottom: `pretrain` starts it, does its updates and events, stops at a signal, and reports.

An update is `run_update`, which calls the `Updater` (step.py). An event freezes or prunes heads, or makes them live
again: `apply_event`, which calls `freeze_` and which the `Trainer` callback of transformers shares. `start_run`
(start.py) builds or restores a `Run` (run.py), which holds the state, logs and checkpoints.
"""

import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from saf.calibration import plan_calibration
from saf.checkpoint import checkpoint_hash, latest
from saf.distributed import all_ranks_or_raise, on_rank0, process_group
from saf.errors import DivergenceError, InputError
from saf.freeze_config import FreezeConfig
from saf.freezing import freeze_
from saf.heads import Head, HeadSet
from saf.machine import Execution, Stopwatch, one_host_thread
from saf.records.files import write_json
from saf.records.run import STATE_AFTER, EventRecord, append_event
from saf.schedules import Event, Freeze, OneTime, Outcome, Undo
from saf.surgery import uninstall_
from saf.train.config import TrainConfig
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
    done = run.update + 1 if share is None else run.start
    progress = (done - config.lr_start) / (config.updates - config.lr_start)
    if share is not None:
        # At matched time the rate follows elapsed time: a faster arm does more updates along the same curve.
        begin = max(progress, 0.0)
        progress = begin + (1 - begin) * min(share, 1.0)
    rate = learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=config.warmup_share)
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


# --- events


def _apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them, unless there is one (`saved`)."""
    budget, proposer = run.budget_share(), run.proposer
    if budget is not None and budget > 1:
        return  # the budget allows no update after an event, so it would only cost
    while proposer and (event := proposer.propose(run.update)):
        # A run that is killed during an event goes on from here, where the schedule proposes it again.
        if not saved:
            run.save()
        saved = True
        proposer.done(event, _apply_and_record_(run, resolve_event(event, run.config)))
        if not needs_gradient(run.config, proposer):
            run.updater.gradient = None  # no later event reads it, and averaging costs time in every update


def _apply_and_record_(run: Run, event: Event) -> Outcome:
    """Apply one event and record it, with the controller loss before and after."""
    before = run.controller_loss(f"before_{event.kind}", batches=event.batches)
    with run.elapsed("freeze"), run.updater.parallel.whole(moments=True):
        # An edit that fails on one rank is undone on all: none trains on with other heads than the rest.
        with all_ranks_or_raise():
            change = apply_event(run, event)
        run.updater.compile_()  # still inside `whole`: the new engine takes the gathered weights over
    after = run.controller_loss(f"after_{event.kind}", batches=event.batches)
    losses = {"loss_before": before, "loss_after": after}
    with run.elapsed("freeze"):
        # Memory and times from before the heads changed say nothing about the updates to come.
        run.last_change, run.peak_memory = run.update, None
        run.recent.clear()
        line = {"update": run.update, "reason": event.reason, "heads": change.heads.to_list(), **losses}
        line |= {"seconds": change.seconds, **change.values}
        number = on_rank0(lambda: append_event(run.folder, event.kind, line, change.tensors).number)
    run.say(f"{change.summary}; took {sum(change.seconds.values()):.1f} s")
    return change.outcome(number, **losses)


class TrainerLike(Protocol):
    """The parts of a training that an event reads: a run has them, and the callback of a Trainer of transformers."""

    model: Any
    updater: Any
    """Its `optimizer`, and the `gradient` average that scores may read, or None."""
    task: Any
    """Its `calibration()` and `heldout()` sequences."""
    config: Any
    """Its `freeze` and `schedule` settings."""

    @property
    def execution(self) -> Execution: ...

    @property
    def events(self) -> list[EventRecord]: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an event did to the heads, for its record and for the schedule."""

    heads: HeadSet
    """The heads that it froze, pruned, or made live again."""
    summary: str
    """The heads in words."""
    seconds: dict[str, float]
    """Seconds of its parts."""
    lowest_score: float | None = None
    """Lowest score among the heads frozen or pruned."""
    deferred: tuple[Head, ...] = ()
    """Heads chosen for later events."""
    values: dict[str, Any] = field(default_factory=dict)
    """Entries of its kind in the line of events.jsonl."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def outcome(self, number: int, *, loss_before: float, loss_after: float) -> Outcome:
        """Return what the schedule reads of it, with its number in the run and the losses around it."""
        chosen = {"lowest_score": self.lowest_score, "deferred": self.deferred}
        return Outcome(number=number, heads=self.heads, loss_before=loss_before, loss_after=loss_after, **chosen)


def resolve_event(event: Event, config: Any) -> Event:
    """Return the event to apply: schedules propose to freeze where the settings may say to prune."""
    if isinstance(event, Freeze) and config.freeze is not None and config.freeze.operation == "prune":
        return replace(event, kind="prune")
    return event


def apply_event(trainer: TrainerLike, event: Event, *, guard: list[Tensor] | None = None) -> Change:
    """Change the model and its optimiser between two updates; errors are those of `freeze_` and `uninstall_`.

    With the sequences `guard` no training follows, and an event that costs too much on them is refused.
    """
    return _undo(trainer, event) if isinstance(event, Undo) else _freeze(trainer, event, guard)


def _freeze(trainer: TrainerLike, event: Freeze, guard: list[Tensor] | None) -> Change:
    """Freeze or prune the event's share of heads by the recipe that the settings describe."""
    freeze, schedule = trainer.config.freeze, trainer.config.schedule
    batches = trainer.task.calibration()
    inputs = {"gradient": trainer.updater.gradient} if trainer.updater.gradient else {}
    if "outputs" in freeze.needs:
        inputs["outputs"] = trainer.task.heldout()
    heldout = trainer.task.heldout() if freeze.uses_joint_cost and guard is None else guard
    # Attention is measured in the precision in which it trains.
    with trainer.execution.autocast():
        trainer.say(str(plan_calibration(trainer.model, batches, collect=freeze.collect)))
        report = freeze_(
            trainer.model,
            batches,
            _settings_of(event, freeze),
            optimizer=trainer.updater.optimizer,
            heldout=heldout,
            accept_loss=guard is None,
            score_inputs=inputs,
            max_heads=event.first,
            # One event that freezes nothing is an error. Of several, a later one may find no head that is left.
            allow_empty=event.below is not None or not isinstance(schedule, OneTime) or freeze.asks_for_none,
        )
    return Change(
        heads=report.heads,
        summary=report.summary,
        seconds=report.seconds,
        lowest_score=min((float(report.scores[head]) for head in report.heads), default=None),
        deferred=report.deferred,
        values=report.to_dict(),
        tensors=report.tensors(),
    )


def _settings_of(event: Freeze, freeze: FreezeConfig) -> FreezeConfig:
    """Return the run's settings with the event's own kind, heads, count and limit."""
    freeze = replace(freeze, operation=event.kind)
    if event.among is not None:
        # The conditions on all heads applied when these were chosen. Heads that the settings name are refused where one
        # does not fit; others are skipped.
        free = {"heads": None, "exclude": (), "max_per_layer": None, "match": None, "match_heads": None, "below": None}
        if freeze.heads is not None:
            chosen: dict[str, Any] = {"heads": event.among}
        else:
            chosen = {"only": event.among, "count": len(event.among)}
        freeze = replace(freeze, **(free | chosen))
    if event.below is not None:
        freeze = replace(freeze, below=event.below)
    return freeze if event.count is None else replace(freeze, count=event.count)


def _undo(trainer: TrainerLike, event: Undo) -> Change:
    """Make the heads of an earlier event of this run live again, with the rows and moments that they had then."""
    recorded = on_rank0(lambda: trainer.events)  # other machines may see the file later
    undoable = {record.number: record for record in recorded if record.kind in ("freeze", "prune")}
    if event.event not in undoable:
        raise InputError(f"an event to undo must be one of {sorted(undoable)}, got {event.event}")
    record = undoable[event.event]
    heads, timer = HeadSet(record.heads), Stopwatch(trainer.execution.device)
    with timer("uninstall"):
        uninstall_(trainer.model, heads, optimizer=trainer.updater.optimizer)
    summary = f"{len(heads)} heads {STATE_AFTER[record.kind]} by event {event.event} are live again"
    return Change(heads=heads, summary=summary, seconds=timer.seconds, values={"undoes": event.event})


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
