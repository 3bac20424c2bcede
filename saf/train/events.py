"""What a run does when its schedule proposes an event: freeze or prune heads, or make them live again, and record it.

`CARRY_OUT` holds one function a kind of event. Each changes the model and its optimiser between two updates and returns
what is recorded; the controller losses around it, the new graphs and the line of events.jsonl are the same for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from saf.calibration import QKGradient, plan_calibration
from saf.errors import InputError
from saf.freeze import freeze_
from saf.freeze_config import FreezeConfig, calibration_collect
from saf.heads import Head, HeadLayout, HeadSet
from saf.machine.execution import Execution
from saf.machine.processes import agreed, done_once
from saf.machine.stopwatch import Stopwatch
from saf.ops.backends import choose_backend
from saf.records.events import EventRecord
from saf.schedules import Event, Freeze, OneTime, Outcome, Proposer, Prune, Schedule, Undo, setting_of_moment
from saf.scores import HOW_TO_COLLECT, score_name
from saf.surgery import uninstall_
from saf.train.config import TrainConfig
from saf.train.run import GRADIENT, Run


class Settings(Protocol):
    """Say what of its settings decides whose heads are frozen, and when: `TrainConfig` has them."""

    freeze: FreezeConfig | None
    schedule: Schedule | None


class Trained(Protocol):
    """Say what an event asks of whoever trains: a `Run`, or a Trainer of transformers with its callback."""

    model: Any
    updater: Any
    """Its `optimizer`, and the `gradient` average that scores may read, or None."""
    task: Any
    """Its `calibration()` and `heldout()` sequences."""
    execution: Execution

    @property
    def config(self) -> Settings:
        """Return the settings."""
        ...

    @property
    def update(self) -> int:
        """Return how many updates are done."""
        ...

    @property
    def events(self) -> list[EventRecord]:
        """Return the events carried out so far."""
        ...

    @property
    def guard_sequences(self) -> list[Tensor] | None:
        """Return sequences on which an event that costs too much is refused; None where training follows."""
        ...

    def say(self, text: str) -> None:
        """Show people a line."""
        ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """Hold what an event changed, as it is recorded."""

    heads: HeadSet
    """The heads it froze, pruned, or made live again."""
    summary: str
    """The same in words, for people."""
    seconds: dict[str, float]
    """What its parts cost."""
    lowest_score: float | None = None
    """Lowest score among the heads frozen or pruned."""
    deferred: tuple[Head, ...] = ()
    """Heads chosen for later events."""
    values: dict[str, Any] = field(default_factory=dict)
    """What its kind adds to the line of events.jsonl."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def carry_out_due_(run: Run, *, saved: bool = False) -> None:
    """Carry out the events that are due, after a checkpoint of the state before them (unless `saved`: it is there).

    None of them is where the run's allowance has no room for an update behind it. The place in the training data does
    not move. Raises what `freeze_` and `uninstall_` raise; that event is not recorded then.
    """
    if run.allowance is not None and run.finished():
        return
    proposer, carried_out = run.proposer, 0
    while proposer and (events := proposer.propose(run.update)):
        if not (saved or carried_out):
            run.save()
        for event in events:
            proposer.done(event, _carry_out_(run, meant(event, run.config)))
            carried_out += 1
        if not (run.config.track_gradients or reads_gradient(run.config, proposer)):
            run.updater.gradient = None


def meant(event: Event, config: Settings) -> Event:
    """Return the event that a proposal stands for: a schedule proposes to freeze, the settings may say to prune."""
    if type(event) is Freeze and config.freeze is not None and config.freeze.operation == Prune.kind:
        return Prune(**vars(event))
    return event


def _carry_out_(run: Run, event: Event) -> Outcome:
    """Carry one event out and record it, with the controller loss before and after."""
    before = run.controller_loss(f"before_{event.kind}", batches=event.batches)
    with run.clock("intervention"), run.updater.parallel.whole(moments=True):
        with agreed():
            change = CARRY_OUT[event.kind](run, event)
        run.updater.compile_()
    after = run.controller_loss(f"after_{event.kind}", batches=event.batches)
    losses = {"loss_before": before, "loss_after": after}
    values = {**losses, "seconds": change.seconds, **change.values}
    with run.clock("intervention"):
        number = run.record_event(event, change.heads, values, change.tensors)
    run.clock.count()
    seconds = run.updater.parallel.first(sum(change.seconds.values()))
    run.say(f"{change.summary}; took {seconds:.1f} s")
    return Outcome(
        number=number,
        heads=change.heads,
        seconds=seconds,
        lowest_score=change.lowest_score,
        deferred=change.deferred,
        **losses,
    )


def _freeze_(run: Trained, event: Freeze) -> Change:
    """Freeze or prune the event's share of heads by the recipe that the run's settings describe."""
    freeze, schedule = run.config.freeze, run.config.schedule
    assert freeze is not None
    batches = run.task.calibration()
    inputs = {"gradient": run.updater.gradient} if run.updater.gradient else {}
    if "outputs" in freeze.needs:
        inputs["outputs"] = run.task.heldout()
    with run.execution.autocast():
        plan = plan_calibration(run.model, batches, collect=calibration_collect(freeze, inputs))
        run.say(str(plan))
        report = freeze_(
            run.model,
            batches,
            settings_of(event, freeze),
            optimizer=run.updater.optimizer,
            heldout=run.guard_sequences,
            accept_loss=False,
            score_inputs=inputs,
            max_heads=event.first,
            allow_empty=event.below is not None or (schedule is not None and schedule.several_events),
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
    """Return the settings that an event freezes or prunes by: those of the run, but for what the event says itself.

    Raises InputError for one that prunes in a run whose settings say something of patterns.
    """
    freeze = replace(freeze, operation=event.kind)
    if event.among is not None:
        # Conditions on all heads were kept when these were chosen; named heads are refused where one does not fit.
        named = {"heads": event.among} if freeze.heads is not None else {"only": event.among, "count": len(event.among)}
        free = {"heads": None, "exclude": (), "max_per_layer": None, "match": None, "match_heads": None, "below": None}
        freeze = replace(freeze, **{**free, **named})
    if event.below is not None:
        freeze = replace(freeze, below=event.below)
    return freeze if event.count is None else replace(freeze, count=event.count)


def _undo_(run: Trained, event: Undo) -> Change:
    """Make the heads of an earlier event of this run live again, with the rows and moments that they had then."""
    recorded = done_once(lambda: run.events)
    done = {record.number: record for record in recorded if record.kind in (Freeze.kind, Prune.kind)}
    if event.event not in done:
        raise InputError(f"a run undoes an event of its own, one of {sorted(done)}; got event {event.event}")
    heads = HeadSet.from_list(done[event.event].heads)
    watch = Stopwatch(run.execution.device)
    with watch("uninstall"):
        uninstall_(run.model, heads, optimizer=run.updater.optimizer)
    summary = f"{len(heads)} heads {done[event.event].made} by event {event.event} are live again"
    return Change(heads=heads, summary=summary, seconds=watch.seconds, values={"undoes": event.event})


CARRY_OUT: Mapping[str, Callable[[Trained, Any], Change]] = {
    Freeze.kind: _freeze_,
    Prune.kind: _freeze_,
    Undo.kind: _undo_,
}
"""What carries an event out, by its kind."""


def check_freeze(config: Settings, execution: Execution) -> None:
    """Raise InputError or UnsupportedError now, not at the freezing point, for settings that cannot work there."""
    freeze, schedule = config.freeze, config.schedule
    if freeze is None:
        return
    if schedule is not None and not schedule.chooses_once:
        names = ("heads", "match", "match_heads", "max_per_layer", "below")
        if wrong := [name for name in names if getattr(freeze, name) is not None]:
            raise InputError(
                f"{' and '.join(wrong)} cannot be kept by a {schedule.name} schedule, which chooses heads anew at "
                "every event; leave them out (only and exclude may be given), or choose another schedule"
            )
    if freeze.whole_groups and schedule is not None and not isinstance(schedule, OneTime):
        raise InputError(
            f"whole_groups is kept by a one_time schedule alone; a {schedule.name} schedule freezes so many heads at a "
            "time, which end inside a KV group: leave whole_groups out, or choose one_time"
        )
    dtype = torch.bfloat16 if execution.precision == "bf16" else torch.float32
    if freeze.operation == Freeze.kind:
        choose_backend(freeze.backend, device=execution.device, dtypes=[dtype], trainable=freeze.trainable)
    if unknown := sorted(freeze.needs - HOW_TO_COLLECT.keys()):
        raise InputError(
            f"score {score_name(freeze.score)!r} needs {', '.join(unknown)}, which a run cannot give; "
            f"it gives {', '.join(sorted(HOW_TO_COLLECT))}"
        )


def start_proposer(
    settings: Settings, layouts: Sequence[HeadLayout], *, updates: int, state: dict[str, Any] | None
) -> Proposer | None:
    """Return the schedule's state machine, where training of this `state` left it; None without freezing."""
    if settings.freeze is None or settings.schedule is None:
        return None
    heads = sum(layout.num_heads for layout in layouts)
    live = sum(layout.num_live for layout in layouts)
    asked = settings.freeze.requested(heads)
    # Where training goes on, its own events froze some of the live heads that it began with; the state tells how many.
    limit = min(asked, live) if state is None else asked
    proposer = settings.schedule.start(updates=updates, heads=heads, limit=limit)
    if state is not None:
        # Earlier checkpoints kept a schedule's name as "schedule".
        proposer.load_state_dict({"name": state["schedule"], **state} if "schedule" in state else state)
    return proposer


def recorded_gradient(model: nn.Module, state: Mapping[str, Any]) -> QKGradient | None:
    """Return the Q/K-gradient average that a checkpoint's `state` holds; None when its run kept none."""
    if state.get(GRADIENT) is None:
        return None
    gradient = QKGradient(model)
    gradient.load_state_dict(state[GRADIENT])
    return gradient


def reads_gradient(config: TrainConfig, proposer: Proposer | None) -> bool:
    """Return whether an event that may still come freezes by Q/K gradients."""
    expected = proposer is not None and not proposer.finished
    return expected and config.freeze is not None and "gradient" in config.freeze.needs


def start_gradient(
    model: nn.Module,
    config: TrainConfig,
    proposer: Proposer | None,
    *,
    state: Mapping[str, Any] | None,
    update: int,
) -> QKGradient | None:
    """Return the average that a run keeps from `update` on; None when neither a score nor a later arm needs it.

    Raises InputError when heads are to be frozen right away by gradients that nobody kept.
    """
    reads = reads_gradient(config, proposer)
    if not (reads or config.track_gradients):
        return None
    found = recorded_gradient(model, state or {})
    moment = config.freeze_update
    if reads and found is None and config.schedule is not None and moment is not None and moment <= update:
        later = f"freeze after some updates of this one ({setting_of_moment(config.schedule)} above {update})"
        kept = f"the checkpoint to start from holds none. Train its run with track_gradients, or {later}"
        raise InputError(
            f"a score reads an average of Q/K gradients, and {kept if update else f'nothing was trained yet: {later}'}"
        )
    return QKGradient(model) if found is None else found
