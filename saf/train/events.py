"""The events of a training: `apply_due_events_` freezes, prunes or undoes what the schedule proposes, and records it.

It is called between two updates, by a `Run` of `saf pretrain` and by a Trainer of transformers (saf/hf/trainer.py).
`Training` lists what it needs of both.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from saf.calibration import plan_calibration
from saf.distributed import all_ranks_or_raise, on_rank0
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.heads import HeadSet
from saf.machine import Stopwatch
from saf.records.run import STATE_AFTER
from saf.schedules import Freeze, OneTime, Outcome, Undo
from saf.surgery import uninstall_


class Change(NamedTuple):
    """What an event did to the heads."""

    heads: HeadSet
    """The heads that it froze, pruned, or made live again."""
    summary: str
    """The heads in words."""
    seconds: dict[str, float]
    """Seconds of its parts."""
    report: FreezeReport | None = None
    """The report of a freeze or prune."""


class Training(Protocol):
    """The parts of a training that its events read and call.

    `updater` has the `optimizer`, and the `gradient` average that scores may read, or None. `task` has the sequences
    `calibration()` and `heldout()`, `config` the settings `freeze` and `schedule`. `update` counts the updates done.
    """

    model: Any
    updater: Any
    task: Any
    config: Any
    execution: Any
    proposer: Any
    update: Any
    events: Any

    def say(self, text: str) -> None:
        """Show a line about this moment."""

    def controller_loss(self, when: str, *, batches: int | None) -> float:
        """Return the loss by which schedules decide, nats per target, the same on every rank."""
        ...

    def editing(self) -> AbstractContextManager[None]:
        """Hold the whole model and optimiser for an edit, then prepare updates for the heads that there are now."""
        ...

    def record_event(self, kind: str, line: dict[str, Any], change: Change) -> int:
        """Record an event and return its number in the training, from 1."""
        ...


def apply_due_events_(training: Training, *, guard: list[Tensor] | None = None) -> None:
    """Apply the events that are due after the updates done; errors are those of `freeze_` and `uninstall_`.

    `guard` are held-out sequences, for events that no training follows: one that costs too much on them is refused.
    """
    proposer = training.proposer
    while event := proposer.propose(training.update):
        # Schedules propose to freeze, also where the settings say to prune.
        kind = training.config.freeze.operation if isinstance(event, Freeze) else event.kind
        before = training.controller_loss(f"before_{kind}", batches=event.batches)
        # An edit that fails on one rank is undone on all: none trains on with other heads than the rest.
        with training.editing(), all_ranks_or_raise():
            change = _freeze(training, event, guard) if isinstance(event, Freeze) else _undo(training, event)
        after = training.controller_loss(f"after_{kind}", batches=event.batches)
        line = {
            "update": training.update,
            "reason": event.reason,
            "heads": change.heads.to_list(),
            "loss_before": before,
            "loss_after": after,
            "seconds": change.seconds,
        }
        if isinstance(event, Undo):
            line["undoes"] = event.event
        number, chosen = training.record_event(kind, line, change), {}
        if (report := change.report) is not None:
            lowest = min((float(report.scores[head]) for head in report.heads), default=None)
            chosen = {"lowest_score": lowest, "deferred": report.deferred}
        outcome = Outcome(number=number, heads=change.heads, loss_before=before, loss_after=after, **chosen)
        proposer.done(event, outcome)


def _freeze(training: Training, event: Freeze, guard: list[Tensor] | None) -> Change:
    freeze, schedule = training.config.freeze, training.config.schedule
    batches = training.task.calibration()
    inputs = {"gradient": training.updater.gradient} if training.updater.gradient else {}
    if "outputs" in freeze.needs:
        inputs["outputs"] = training.task.heldout()
    heldout = training.task.heldout() if freeze.uses_joint_cost and guard is None else guard
    # Attention is measured in the precision in which it trains.
    with training.execution.autocast():
        training.say(str(plan_calibration(training.model, batches, collect=freeze.collect)))
        report = freeze_(
            training.model,
            batches,
            _settings_of(event, freeze),
            optimizer=training.updater.optimizer,
            heldout=heldout,
            accept_loss=guard is None,
            score_inputs=inputs,
            max_heads=event.first,
            # One event that freezes nothing is an error. Of several, a later one may find no head that is left.
            allow_empty=event.below is not None or not isinstance(schedule, OneTime) or freeze.asks_for_none,
        )
    return Change(report.heads, report.summary, report.seconds, report)


def _settings_of(event: Freeze, freeze: FreezeConfig) -> FreezeConfig:
    """Return the settings of freezing with the event's own heads, count and limit."""
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


def _undo(training: Training, event: Undo) -> Change:
    """Make the heads of an earlier event live again, with the rows and moments that they had then."""
    recorded = on_rank0(lambda: training.events)  # other machines may see the file later
    record = next(each for each in recorded if each.number == event.event)
    heads, timer = HeadSet(record.heads), Stopwatch(training.execution.device)
    with timer("uninstall"):
        uninstall_(training.model, heads, optimizer=training.updater.optimizer)
    summary = f"{len(heads)} heads {STATE_AFTER[record.kind]} by event {event.event} are live again"
    return Change(heads, summary, timer.seconds)
