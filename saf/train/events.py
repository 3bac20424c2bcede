"""`apply_event` changes the heads of a model in training: it freezes or prunes some, or makes them live again.

`saf pretrain` and the `Trainer` callback of transformers share it; both record the event and the losses around it. The
checks that come before training follow it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from saf.calibration import COLLECTIONS, QKGradient, plan_calibration
from saf.distributed import on_rank0
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.freezing import freeze_
from saf.heads import Head, HeadLayout, HeadSet
from saf.machine import Execution, Stopwatch
from saf.ops.frozen_heads import choose_backend
from saf.records.run import STATE_AFTER, EventRecord
from saf.schedules import Event, Freeze, Gradual, OneTime, Outcome, Proposer, Undo, setting_of_moment
from saf.scores import HOW_TO_MEASURE, score_name
from saf.surgery import uninstall_
from saf.train.config import TrainConfig

GRADIENT = "qk_gradient"
"""Name of the Q/K-gradient average in a checkpoint's state.json."""


class TrainerLike(Protocol):
    """The parts of a training that an event reads: a run has them, and the callback of a Trainer of transformers."""

    model: Any
    updater: Any
    """Its `optimizer`, and the `gradient` average that scores may read, or None."""
    task: Any
    """Its `calibration()` and `heldout()` sequences."""
    config: Any
    """Its `freeze` and `schedule` settings."""
    execution: Execution

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
    assert freeze is not None
    batches = trainer.task.calibration()
    inputs = {"gradient": trainer.updater.gradient} if trainer.updater.gradient else {}
    if "outputs" in freeze.needs:
        inputs["outputs"] = trainer.task.heldout()
    heldout = trainer.task.heldout() if freeze.jointly and guard is None else guard
    with trainer.execution.autocast():
        trainer.say(str(plan_calibration(trainer.model, batches, collect=freeze.collect)))
        report = freeze_(
            trainer.model,
            batches,
            settings_of(event, freeze),
            optimizer=trainer.updater.optimizer,
            heldout=heldout,
            accept_loss=guard is None,
            score_inputs=inputs,
            max_heads=event.first,
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


def settings_of(event: Freeze, freeze: FreezeConfig) -> FreezeConfig:
    """Return the run's settings with the event's own kind, heads, count and limit."""
    freeze = replace(freeze, operation=event.kind)
    if event.among is not None:
        # Conditions on all heads applied when these were chosen; named heads are refused where one does not fit.
        named = {"heads": event.among} if freeze.heads is not None else {"only": event.among, "count": len(event.among)}
        free = {"heads": None, "exclude": (), "max_per_layer": None, "match": None, "match_heads": None, "below": None}
        freeze = replace(freeze, **{**free, **named})
    if event.below is not None:
        freeze = replace(freeze, below=event.below)
    return freeze if event.count is None else replace(freeze, count=event.count)


def _undo(trainer: TrainerLike, event: Undo) -> Change:
    """Make the heads of an earlier event of this run live again, with the rows and moments that they had then."""
    recorded = on_rank0(lambda: trainer.events)
    undoable = {record.number: record for record in recorded if record.kind in ("freeze", "prune")}
    if event.event not in undoable:
        raise InputError(f"an event to undo must be one of {sorted(undoable)}, got {event.event}")
    record = undoable[event.event]
    heads, timer = HeadSet(record.heads), Stopwatch(trainer.execution.device)
    with timer("uninstall"):
        uninstall_(trainer.model, heads, optimizer=trainer.updater.optimizer)
    summary = f"{len(heads)} heads {STATE_AFTER[record.kind]} by event {event.event} are live again"
    return Change(heads=heads, summary=summary, seconds=timer.seconds, values={"undoes": event.event})


# --- before training


def check_freeze(config: Any, execution: Execution) -> None:
    """Raise InputError or UnsupportedError now, not at the freezing point, for settings that cannot work there."""
    freeze, schedule = config.freeze, config.schedule
    if freeze is None:
        return
    if schedule is not None and not isinstance(schedule, OneTime | Gradual):
        names = ("heads", "match", "match_heads", "max_per_layer", "below")
        if wrong := [name for name in names if getattr(freeze, name) is not None]:
            raise InputError(
                f"{' and '.join(wrong)} must be left out with a {schedule.name} schedule, which chooses heads anew at "
                "every event; give only or exclude"
            )
    if freeze.whole_groups and schedule is not None and not isinstance(schedule, OneTime):
        raise InputError(
            f"whole_groups needs a one_time schedule, got {schedule.name}, whose groups end inside a KV group"
        )
    dtype = torch.bfloat16 if execution.precision == "bf16" else torch.float32
    if freeze.operation == Freeze.kind:
        choose_backend(freeze.backend, device=execution.device, dtypes=[dtype], trainable=freeze.trainable)
    if unknown := sorted(freeze.needs - HOW_TO_MEASURE.keys() - COLLECTIONS.keys()):
        known = ", ".join(sorted(HOW_TO_MEASURE))
        raise InputError(f"score {score_name(freeze.score)!r} must need some of {known}; got {', '.join(unknown)}")


def start_proposer(
    settings: Any, layouts: Sequence[HeadLayout], *, updates: int, state: dict[str, Any] | None
) -> Proposer | None:
    """Return the schedule's state machine, in `state` where training goes on; None without freezing."""
    if settings.freeze is None or settings.schedule is None:
        return None
    heads = sum(layout.num_heads for layout in layouts)
    live = sum(layout.num_live for layout in layouts)
    limit = settings.freeze.requested(heads)
    # A run that is resumed froze some of the live heads that it began with; the state has their number.
    proposer = settings.schedule.start(updates=updates, heads=heads, limit=min(limit, live) if state is None else limit)
    if state is not None:
        proposer.load_state_dict(state)
    return proposer


def recorded_gradient(model: nn.Module, state: Mapping[str, Any]) -> QKGradient | None:
    """Return the Q/K-gradient average in a checkpoint's `state`, or None."""
    if state.get(GRADIENT) is None:
        return None
    gradient = QKGradient(model)
    gradient.load_state_dict(state[GRADIENT])
    return gradient


def needs_gradient(config: TrainConfig, proposer: Proposer | None) -> bool:
    """Return whether an event that may still come, or a later arm, reads the average of Q/K gradients."""
    pending = proposer is not None and not proposer.finished
    return config.track_gradients or (pending and config.freeze is not None and "gradient" in config.freeze.needs)


def start_gradient(
    model: nn.Module, config: TrainConfig, proposer: Proposer | None, *, state: Mapping[str, Any], update: int
) -> QKGradient | None:
    """Return the average that a run updates from `update` on, or None.

    Raises InputError when heads are to be frozen right away by gradients that no run averaged.
    """
    if not needs_gradient(config, proposer):
        return None
    if (recorded := recorded_gradient(model, state)) is not None:
        return recorded
    moment, reads = config.freeze_update, config.freeze is not None and "gradient" in config.freeze.needs
    if reads and config.schedule is not None and moment is not None and moment <= update:
        raise InputError(
            f"a score needs an average of Q/K gradients before update {update}: train the parent with "
            f"track_gradients, or freeze later ({setting_of_moment(config.schedule)} above {update})"
        )
    return QKGradient(model)
