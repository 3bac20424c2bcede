"""`FreezeCallback`: heads are frozen while a `Trainer` of transformers trains, when a schedule says so.

Schedules and what carries their events out are those of `saf pretrain` (`saf.train.events`). As there, an event comes
between two updates, after the checkpoint of the state before it: a run that resumes there meets the event again.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from saf.adapters import adapter_for
from saf.adapters.description import STATE, TENSORS
from saf.adapters.transformers.entrance import covered
from saf.adapters.transformers.folder import mark_of
from saf.calibration import read_sequences
from saf.calibration.capture import check_heads as check_measurable
from saf.calibration.capture import check_vocabulary
from saf.distributed import all_ranks_or_raise
from saf.errors import CheckpointError, InputError, LossError, UnsupportedError
from saf.freeze_config import FreezeConfig, check_heads
from saf.frozen_state import restore_
from saf.heads import EDITED
from saf.integrations.transformers.editing import Editing
from saf.integrations.transformers.passes import check_evaluation, check_packing, longer
from saf.integrations.transformers.restarts import PROGRESS, Before, moments_of, stored_in, warn_of_others
from saf.integrations.transformers.sequences import sequences
from saf.integrations.transformers.trainer import check_arguments, check_wrappers, join_trainers, rewrap_
from saf.loss_guard import heldout_loss
from saf.machine import Execution
from saf.optimizer_state import unwrap_optimizer
from saf.records.events import EventRecord
from saf.records.files import read_json, read_tensors, tensors_hash, to_json
from saf.schedules import OneTime, Outcome, Proposer, Schedule, ValidationBudget, schedule_to_dict
from saf.sidecar import check_sums
from saf.surgery import check_editable, uninstall_
from saf.train.events import apply_event, check_freeze, resolve_event, start_proposer
from saf.train.parallel import Parallel, Replicas

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Settings:
    """Hold whose heads are frozen, and when."""

    freeze: FreezeConfig | None
    schedule: Schedule | None


@dataclass(kw_only=True)
class _Sequences:
    """Hold the sequences that events measure on."""

    batches: list[Tensor]
    held_out: list[Tensor]

    def calibration(self) -> list[Tensor]:
        """Return the calibration sequences."""
        return self.batches

    def heldout(self) -> list[Tensor]:
        """Return the sequences that output-aware scores read, and the controller losses are of."""
        return self.held_out

    def sum(self) -> str:
        """Return the SHA-256 of all of them."""
        given = {"calibration": self.batches, "heldout": self.held_out}
        return tensors_hash({name: torch.cat(batches) for name, batches in given.items() if batches})


@dataclass(kw_only=True)
class _Updater:
    """Hold the optimiser that events carry along; gradients are not averaged here."""

    optimizer: Any = None
    gradient: None = None


@dataclass(kw_only=True)
class _Training:
    """Be what events ask of whoever trains, see `saf.train.events.TrainerLike`."""

    model: nn.Module
    config: _Settings
    task: _Sequences
    execution: Execution
    parallel: Parallel
    proposer: Proposer
    folder: Path
    events: list[EventRecord]
    updates: int
    """Of how many updates the schedule's shares are."""
    updater: _Updater = field(default_factory=_Updater)
    update: int = 0
    stepped: bool = False
    """Whether the optimiser has made its state, so that it was looked at."""
    guard_sequences: list[Tensor] | None = None
    """Sequences on which an event that costs too much is refused; None where training follows."""

    def say(self, text: str) -> None:
        """Say nothing: a Trainer has its own progress."""

    def controller_loss(self, batches: int | None) -> float:
        """Return the mean loss of the held-out sequences, nats a token; NaN without any."""
        if not self.task.held_out:
            return float("nan")
        with self.execution.autocast():
            return heldout_loss(self.model, self.task.held_out[:batches])


class FreezeCallback(Editing, ExportableState):
    """Freeze heads of the model that a `Trainer` trains, when a schedule says so, its optimiser carried along.

    >>> callback = FreezeCallback(FreezeConfig(rate=0.25), [torch.ones(2, 8, dtype=torch.long)], OneTime(at=0.5))

    Checkpoints of the Trainer hold everything: weights, layout, patterns and kept rows by `save_pretrained`, and the
    schedule's state in trainer_state.json. `train(resume_from_checkpoint=...)` goes on from any of them with the model
    that training began with, and `load_best_model_at_end` takes the best one's heads along with its weights.

    Where the Trainer starts over within a call of `train` (`auto_find_batch_size`), the events are undone, and the
    schedule begins anew. Another call of `train` on a model that its events froze is refused unless it resumes.
    """

    def __init__(
        self,
        config: FreezeConfig,
        calibration: Iterable[Any],
        schedule: Schedule | None = None,
        *,
        heldout: Iterable[Any] = (),
        accept_loss: bool = False,
        tokenizer: Any = None,
        length: int | None = None,
        sequences: int = 32,
        batch_size: int = 8,
    ):
        """Take what is frozen, and on what it is measured; nothing is tokenised before training begins.

        Args:
            config: Settings of each event.
            calibration: Token tensors `[B, T]`, mappings with `input_ids`, rows of a data set, or texts. Patterns
                cover T positions; inputs longer than that are refused once heads are frozen.
            schedule: When: `saf.OneTime(0.5)` by default, or any other schedule, also of your own class. `TrainLoss`
                reads every update's loss from the log, so it needs `logging_steps=1`.
            heldout: Sequences given in the same forms, for `ValidationBudget` and scores that read outputs. With them
                the losses before and after each event are logged, and in the model card.
            accept_loss: Whether to keep an event after the last update that raises perplexity on `heldout` by more than
                5%. Otherwise `train` raises LossError once everything is saved, and the model stays as it was trained.
            tokenizer: Of text; the Trainer's `processing_class` by default.
            length: Tokens of the sequences that text is cut into.
            sequences: Into how many calibration text is cut; of held-out text as many.
            batch_size: Sequences in a forward pass, of text and of rows.

        Raises:
            InputError: Settings that are none.
        """
        self.config = config
        self.schedule: Schedule = OneTime() if schedule is None else schedule
        if calibration is None:
            raise InputError("calibration must be token tensors [B, T], rows of a data set, or texts; got None")
        for name, value in (("sequences", sequences), ("batch_size", batch_size), ("length", length)):
            if value is not None and value < 1:
                raise InputError(f"{name} is a whole number from 1; got {value}")
        self._given = {"calibration": calibration, "heldout": heldout}
        self._cut = {"length": length, "count": sequences, "batch_size": batch_size}
        self._accept_loss = accept_loss
        self._refused: LossError | None = None
        self._tokenizer = tokenizer
        self._training: _Training | None = None
        self._before = Before()
        join_trainers()

    @property
    def events(self) -> list[EventRecord]:
        """Return the events carried out so far, first one first."""
        return [] if self._training is None else list(self._training.events)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: settings, the schedule's state, and the events so far."""
        progress = None
        if self._training is not None:
            progress = {
                "settings": self._settings(),
                "updates": self._training.updates,
                "sequences": self._training.task.sum(),
                "schedule": self._training.proposer.state_dict(),
                "events": [event.values for event in self._training.events],
            }
        return {"args": {}, "attributes": {PROGRESS: progress}}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse what cannot work before anything is computed."""
        check_arguments(args)
        if getattr(args, "restore_callback_states_from_checkpoint", False):
            raise UnsupportedError(
                "restore_callback_states_from_checkpoint makes callbacks anew, which FreezeCallback cannot be; leave "
                "it out: this callback takes up its own state"
            )

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Check the model and the settings, and start the schedule or take it up where the checkpoint has it."""
        model, optimizer = given["model"], given.get("optimizer")
        check_wrappers(self.trainer)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"a Trainer's checkpoint of a {type(model).__name__} does not hold the weights that heads are rows of, "
                "as that of LoRA, which holds adapters alone; merge them first (merge_and_unload of peft)"
            )
        execution = Execution(torch.device(args.device), "bf16" if args.bf16 else "fp32", compile=False)
        settings = _Settings(freeze=self.config, schedule=self.schedule)
        self._check(args, state, execution)
        check_editable(model, optimizer)
        if self.called or self._training is None:
            if self._training is not None and self._training.model is model and not state.global_step:
                self._before.refuse_more(model, self._training.events)
            self._before, self.called = Before.of(model), False
        tokenizer = self._tokenizer or given.get("processing_class")
        task = _Sequences(batches=self._sequences("calibration", tokenizer), held_out=self._heldout(tokenizer))
        stored = stored_in(state, type(self).__name__) if state.global_step else None
        adapter = adapter_for(model)
        layouts = [site.layout for site in adapter.sites()]
        if stored is None:  # others were checked when they began
            check_heads(self.config, layouts)
            if self.config.heads is not None:
                check_measurable(adapter, self.config.heads)
        updates = state.max_steps if stored is None else moments_of(stored, self._settings(), state.max_steps)
        check_vocabulary(adapter, [*task.batches, *task.held_out])
        different = read_sequences(task.batches).num_different
        self.config.check_calibration(sequences=different)
        if task.held_out or "gates" in self.config.needs:
            adapter.check_next_token()
        proposer = start_proposer(settings, layouts, updates=updates, state=stored and stored["schedule"])
        assert proposer is not None
        warn_of_others(stored, task.sum(), proposer)
        heads = sum(layout.num_heads for layout in layouts)
        self._expect(updates, heads, task, covered(model) if proposer.finished else None)
        check_packing(self.trainer)
        check_evaluation(self.trainer, self.longest)
        folder = Path(args.output_dir)
        self._training = _Training(
            model=model,
            config=settings,
            task=task,
            execution=execution,
            parallel=Replicas() if args.world_size > 1 else Parallel(),
            proposer=proposer,
            folder=folder,
            events=[] if stored is None else [EventRecord(folder, values) for values in stored["events"]],
            updates=updates,
        )
        # A checkpoint of training without this callback has no place for its state.
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Carry out the events that are due before an update, after the checkpoint of the one before it."""
        self._carry_out_due_(state.global_step, given)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Refuse an optimiser that cannot be edited once its state shows it; carry out events after the last update."""
        assert self._training is not None
        if not self._training.stepped:
            check_editable(given["model"], given["optimizer"])
            self._training.stepped = True
        if state.global_step >= state.max_steps:
            decides = self._accept_loss or isinstance(self.schedule, ValidationBudget)
            self._training.guard_sequences = None if decides else self._training.task.held_out or None
            try:
                self._carry_out_due_(state.global_step, given)
            except LossError as error:
                self._refused = error

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise what refused the event after the last update, now that the Trainer has saved what it trained."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Let the schedule see the loss of an update."""
        if self._training is not None and logs and "loss" in logs and state.global_step > self._training.update:
            self._training.update = state.global_step
            self._training.proposer.observe(state.global_step, float(logs["loss"]))

    def follow_(self, model: nn.Module, folder: Path, optimizer: Any = None) -> None:
        """Give a model the heads of a Trainer's checkpoint, whose weights are loaded next.

        Moments of the weights that change shape are dropped; a resumed Trainer loads the checkpoint's afterwards.
        Raises InputError where heads of the model cannot be undone, CheckpointError for damaged files.
        """
        adapter = adapter_for(model)
        if len(adapter.live_heads()) < sum(site.layout.num_heads for site in adapter.sites()):
            uninstall_(model, optimizer=optimizer)
        if (folder / STATE).is_file():
            state = read_json(folder / STATE, error=CheckpointError)
            check_sums(folder, state)
            restore_(model, state, read_tensors(folder / TENSORS, error=CheckpointError))
            told = read_json(folder / "config.json", error=CheckpointError).get("saf") or {}
            (mark_of(adapter.model.config) or {}).update(told)
        if (inner := unwrap_optimizer(optimizer)) is not None:
            for site in adapter.sites():
                for parameter, _ in site.projections().values():
                    inner.state.pop(parameter, None)

    def start_over_(self, model: nn.Module, optimizer: Any = None) -> None:
        """Undo what events changed since the present call of `train` began; raise what says why that cannot be."""
        if self._training is not None and self._training.model is model:
            self._before.restore_(model, optimizer)
            self._training = None

    def _carry_out_due_(self, update: int, given: dict[str, Any]) -> None:
        """Carry out the events that the schedule proposes, one after another."""
        training = self._training
        assert training is not None
        training.updater.optimizer = given["optimizer"]
        while events := training.proposer.propose(update):
            for proposed in events:
                training.proposer.done(proposed, self._carry_out_(resolve_event(proposed, training.config), update))

    def _carry_out_(self, event: Any, update: int) -> Outcome:
        """Carry out one event, in all processes or in none, and record it; what the first one measured counts."""
        training = self._training
        assert training is not None
        before = training.controller_loss(event.batches)
        with all_ranks_or_raise():
            change = apply_event(training, event)
        rewrap_(self.trainer)
        after = training.controller_loss(event.batches)
        before, after, seconds = training.parallel.first((before, after, change.seconds))
        outcome = Outcome(
            number=len(training.events) + 1,
            heads=change.heads,
            loss_before=before,
            loss_after=after,
            seconds=sum(seconds.values()),
            lowest_score=change.lowest_score,
            deferred=change.deferred,
        )
        training.events.append(_recorded(training, event, outcome, seconds, update))
        self._log(outcome, change.summary, update)
        return outcome

    def _log(self, outcome: Outcome, summary: str, update: int) -> None:
        """Log an event: a line for people, and its numbers among the Trainer's metrics."""
        model, losses = self.trainer.model, {}
        if not math.isnan(outcome.loss_before):
            losses = {"heldout_loss_before": outcome.loss_before, "heldout_loss_after": outcome.loss_after}
        if self.trainer.is_world_process_zero():
            told = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            logger.info("update %d: %s", update, "; ".join(filter(None, [summary, told])))
        counts = {f"{kind}_heads": len(adapter_for(model).heads(kind)) for kind in EDITED}
        self.trainer.log({**{kind: count for kind, count in counts.items() if count}, **losses})

    def _sequences(self, name: str, tokenizer: Any) -> list[Tensor]:
        """Return the sequences given under a name, and keep them: an iterator is read once."""
        self._given[name] = list(self._given[name])
        return sequences(self._given[name], tokenizer=tokenizer, name=name, **self._cut)

    def _heldout(self, tokenizer: Any) -> list[Tensor]:
        """Return the held-out sequences; none where none were given."""
        self._given["heldout"] = list(self._given["heldout"])
        return self._sequences("heldout", tokenizer) if self._given["heldout"] else []

    def _check(self, args: Any, state: TrainerState, execution: Execution) -> None:
        """Raise what events would raise later, or decide wrongly for the lack of."""
        check_freeze(_Settings(freeze=self.config, schedule=self.schedule), execution)
        needs = self.config.needs
        if "gradient" in needs:
            raise UnsupportedError(
                "scores of Q/K gradients are an average over updates, which a Trainer does not keep; take another score"
            )
        if self.config.trainable:
            raise UnsupportedError(
                "a Trainer makes its optimiser anew when it resumes, without places for trained patterns; leave "
                "trainable out, or train in a loop of your own"
            )
        missing = "outputs" in needs or self.schedule.name == "validation_budget"
        if missing and not list(self._given["heldout"]):
            raise InputError("this score or schedule reads held-out sequences: give them as heldout=")
        each = args.logging_steps == 1 and getattr(args.logging_strategy, "value", args.logging_strategy) == "steps"
        if self.schedule.first_update(state.max_steps) is None and not each:
            raise InputError(
                f"a {self.schedule.name} schedule reads the loss of every update from the log: set logging_steps=1 and "
                "logging_strategy='steps'"
            )

    def _expect(self, updates: int, heads: int, task: _Sequences, fitted: int | None) -> None:
        """Say from when on, in `updates` updates, a model of so many heads takes what rows alone.

        Once no event is to come, patterns cover as many positions as are `fitted`. Raises InputError for held-out
        sequences whose loss could not be told then.
        """
        edits, length = self.config.requested(heads) > 0, task.batches[0].shape[-1]
        self.first = (self.schedule.first_update(updates) or 0) if edits else None
        self.longest = (fitted or length) if edits and self.config.operation == "freeze" else None
        most = max((ids.shape[-1] for ids in task.held_out), default=0) - 1  # the last token is a target alone
        if self.longest is not None and fitted is None and most > self.longest:
            raise InputError(f"heldout: {longer('sequences', most, self.longest)}")

    def _settings(self) -> dict[str, Any]:
        """Return the settings as plain values, by which a resumed run is known."""
        return to_json({"config": self.config.to_dict(), "schedule": schedule_to_dict(self.schedule)})


def _recorded(training: _Training, event: Any, outcome: Outcome, seconds: dict[str, float], update: int) -> EventRecord:
    """Return the record of an event, and tell the model's card of it."""
    losses = {"loss_before": outcome.loss_before, "loss_after": outcome.loss_after}
    values = {
        "number": outcome.number,
        "kind": event.kind,
        "update": update,
        "reason": event.reason,
        "heads": outcome.heads.to_list(),
        "seconds": seconds,
        **losses,
    }
    known = (mark_of(training.model.config) or {}).get("events", [])
    if known and known[-1]["heads"] == values["heads"]:
        known[-1] |= to_json({"update": update, **losses})
    return EventRecord(training.folder, to_json(values))
