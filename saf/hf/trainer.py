"""`FreezeCallback` freezes heads by a schedule while a `Trainer` of transformers trains.

Schedules and events are those of `saf pretrain` (`saf.train.events`). An event comes between two updates, after the
checkpoint of the state before it: a run that resumes there meets the event again.

A Trainer hands callbacks neither itself nor the checkpoints that it loads. `join_trainers` wraps the methods of
`Trainer` that load checkpoints, and those that push a model to a hub.
"""

import gc
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from shutil import copyfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from saf.calibration import read_sequences
from saf.calibration.capture import check_heads as check_measurable
from saf.calibration.capture import check_vocabulary
from saf.distributed import all_ranks_or_raise, rank_and_size
from saf.errors import CheckpointError, InputError, LossError, SafWarning, UnsupportedError
from saf.freeze_config import FreezeConfig, check_heads
from saf.frozen_state import restore_
from saf.heads import EDITED, HeadSet
from saf.heldout import heldout_loss
from saf.hf.attention import NAME, state_of
from saf.hf.card import CARD, forget_heads_, holds_heads, mark_of, section, section_of, write_section
from saf.hf.sequences import sequences as read_sequences_of
from saf.machine import Execution
from saf.models.adapter import Adapter, adapter_for
from saf.models.description import STATE, TENSORS
from saf.optimizer_state import unwrap_optimizer
from saf.records.events import EventRecord
from saf.records.files import read_json, read_tensors, tensors_hash, to_json
from saf.schedules import OneTime, Outcome, Proposer, Schedule, ValidationBudget, schedule_to_dict
from saf.sidecar import check_sums
from saf.surgery import check_editable, renewed_, uninstall_
from saf.train.events import apply_event, check_freeze, resolve_event, start_proposer
from saf.train.parallel import Parallel, Replicas

logger = logging.getLogger(__name__)
_WHOLE = "heads are rows of whole weights: leave FSDP, DeepSpeed and tensor parallelism out (torchrun alone is DDP)"


@dataclass(kw_only=True)
class _Run:
    """A Trainer's training as `saf.train.events` reads it, its `TrainerLike`, and the state of its schedule."""

    model: nn.Module
    config: Any
    """Settings `freeze` and `schedule`."""
    batches: list[Tensor]
    held_out: list[Tensor]
    execution: Execution
    parallel: Parallel
    proposer: Proposer
    folder: Path
    events: list[EventRecord]
    updates: int
    """Number of updates that the schedule's shares refer to."""
    updater: Any
    """Holds the `optimizer`, which events edit; `gradient` is None."""
    update: int = 0
    stepped: bool = False
    """Whether the optimiser has stepped, so that its state was checked."""
    guard_sequences: list[Tensor] | None = None
    """Sequences on which an event that costs too much is refused; None where training follows."""

    @property
    def task(self) -> Any:
        """The calibration and held-out sequences, as a task has them."""
        return SimpleNamespace(calibration=lambda: self.batches, heldout=lambda: self.held_out)

    def say(self, text: str) -> None:
        """Drop the text: a Trainer shows its own progress."""

    def controller_loss(self, batches: int | None) -> float:
        """Return the mean loss of the held-out sequences, nats a token; NaN without any."""
        if not self.held_out:
            return float("nan")
        with self.execution.autocast():
            return heldout_loss(self.model, self.held_out[:batches])

    def sequences_hash(self) -> str:
        """Return the SHA-256 of all sequences."""
        both = {"calibration": self.batches, "heldout": self.held_out}
        return tensors_hash({name: torch.cat(batches) for name, batches in both.items() if batches})


class FreezeCallback(TrainerCallback, ExportableState):
    """Freezes heads of the model that a `Trainer` trains, by a schedule; the optimiser's state follows.

    >>> callback = FreezeCallback(FreezeConfig(rate=0.25), [torch.ones(2, 8, dtype=torch.long)], OneTime(at=0.5))

    Checkpoints are complete: `save_pretrained` writes weights, layout, patterns and removed rows, trainer_state.json
    holds the schedule's state. `train(resume_from_checkpoint=...)` takes any of them with the model that training began
    with, and `load_best_model_at_end` loads the best one's heads. Where the Trainer starts over within `train`
    (`auto_find_batch_size`), events are undone and the schedule begins anew.
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
        """Store the settings; text is tokenised when training begins.

        Args:
            config: Settings of each event.
            calibration: Token tensors `[B, T]`, mappings with `input_ids`, rows of a data set, or texts. Patterns cover
                T positions; longer inputs are refused once heads are frozen.
            schedule: `saf.OneTime(0.5)` by default. `TrainLoss` needs `logging_steps=1`.
            heldout: Sequences in the same forms, for `ValidationBudget`, joint cost and scores that read outputs. With
                them the losses before and after each event are logged, and in the model card.
            accept_loss: Keep an event after the last update that raises perplexity on `heldout` by more than 5%.
                Otherwise `train` raises LossError once everything is saved, and the model stays as it was trained.
            tokenizer: Of text; the Trainer's `processing_class` by default.
            length: Tokens of the sequences that text is cut into.
            sequences: How many sequences text is cut into.
            batch_size: Sequences in a forward pass, of text and of rows.
        """
        self.config = config
        self.schedule: Schedule = OneTime() if schedule is None else schedule
        if calibration is None:
            raise InputError("calibration must be token tensors [B, T], rows of a data set, or texts; got None")
        for name, value in (("sequences", sequences), ("batch_size", batch_size), ("length", length)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if "gradient" in config.needs:
            raise UnsupportedError("a Trainer keeps no average of Q/K gradients; take another score")
        if config.trainable:
            raise UnsupportedError("a resumed Trainer has no optimiser state of trainable patterns; leave it out")
        heldout, decides = list(heldout), isinstance(self.schedule, ValidationBudget) or config.jointly
        if (decides or "outputs" in config.needs) and not heldout:
            raise InputError("this choice of heads reads held-out sequences: give them as heldout=")
        self.trainer: Any = None
        self.called = False
        """Whether `train` was called and its loop has not begun; a loop that begins later starts over."""
        self._sources = {"calibration": calibration, "heldout": heldout}
        self._batching = {"length": length, "count": sequences, "batch_size": batch_size}
        self._accept_loss, self._tokenizer = accept_loss, tokenizer
        self._refused: LossError | None = None
        self._run: _Run | None = None
        self._before = HeadSet()
        self._events_before = 0
        join_trainers()

    @property
    def events(self) -> list[EventRecord]:
        """The events so far, in order."""
        return [] if self._run is None else list(self._run.events)

    def state(self) -> dict[str, Any]:
        """Return the settings, the schedule's state and the events so far, for a checkpoint."""
        progress, run = None, self._run
        if run is not None:
            progress = {
                "settings": self._settings(),
                "updates": run.updates,
                "sequences": run.sequences_hash(),
                "schedule": run.proposer.state_dict(),
                "events": [event.values for event in run.events],
            }
        return {"args": {}, "attributes": {"progress": progress}}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse arguments that cannot work before anything is computed."""
        check_arguments(args)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Check model and settings, and start the schedule or take it up where the checkpoint has it."""
        model, optimizer = options["model"], options.get("optimizer")
        execution = Execution(torch.device(args.device), "bf16" if args.bf16 else "fp32", compile=False)
        config: Any = SimpleNamespace(freeze=self.config, schedule=self.schedule)
        check_freeze(config, execution)
        self._check_logging(args, state.max_steps)
        self._check_model(model, optimizer, restarts=not state.global_step)
        tokenizer, stored = self._tokenizer or options.get("processing_class"), self._stored(state)
        batches, held_out = (self._sequences(name, tokenizer) for name in ("calibration", "heldout"))
        self._check_sequences(model, batches, held_out)
        if stored is None:  # others were checked when they began
            self._check_choice(model, batches[0].shape[-1], held_out, state.max_steps)
        layouts = [site.layout for site in adapter_for(model).sites()]
        # Shares of training stay those of the training that began, whatever max_steps is now.
        updates = state.max_steps if stored is None else stored["updates"]
        proposer = start_proposer(config, layouts, updates=updates, state=stored and stored["schedule"])
        assert proposer is not None
        folder = Path(args.output_dir)
        self._run = _Run(
            model=model,
            config=config,
            batches=batches,
            held_out=held_out,
            execution=execution,
            parallel=Replicas() if args.world_size > 1 else Parallel(),
            proposer=proposer,
            folder=folder,
            events=[] if stored is None else [EventRecord(folder, values) for values in stored["events"]],
            updates=updates,
            updater=SimpleNamespace(optimizer=optimizer, gradient=None),
        )
        if stored is not None and not proposer.finished:
            self._warn_of_changes(stored, state.max_steps)
        # A checkpoint of training without this callback has no place for its state.
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Apply the events that are due before an update, after the checkpoint of the one before it."""
        self._apply_due_(state.global_step, options["optimizer"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Check the optimiser after its first step; apply the events after the last update."""
        run = self._run
        assert run is not None
        if not run.stepped:
            check_editable(options["model"], options["optimizer"])
            run.stepped = True
        if state.global_step >= state.max_steps:
            accepts = self._accept_loss or isinstance(self.schedule, ValidationBudget)
            run.guard_sequences = None if accepts else run.held_out or None
            try:
                self._apply_due_(state.global_step, options["optimizer"])
            except LossError as error:
                self._refused = error

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise the LossError of an event after the last update, now that the Trainer has saved the model."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Pass the loss of an update to the schedule."""
        run = self._run
        if run is not None and logs and "loss" in logs and state.global_step > run.update:
            run.update = state.global_step
            run.proposer.observe(state.global_step, float(logs["loss"]))

    def follow_(self, model: nn.Module, folder: Path, optimizer: Any = None) -> None:
        """Give a model the heads of a Trainer's checkpoint, whose weights are loaded next.

        Moments of the weights that change shape are dropped; a resumed Trainer loads the checkpoint's afterwards.
        """
        adapter = adapter_for(model)
        if adapter.heads(*EDITED):
            uninstall_(model, optimizer=optimizer)
        if (folder / STATE).is_file():
            state = read_json(folder / STATE, error=CheckpointError)
            check_sums(folder, state)
            restore_(model, state, read_tensors(folder / TENSORS, error=CheckpointError))
            saved = read_json(folder / "config.json", error=CheckpointError).get("saf") or {}
            (mark_of(adapter.model.config) or {}).update(saved)
        if (inner := unwrap_optimizer(optimizer)) is not None:
            for site in adapter.sites():
                for parameter, _ in site.projections().values():
                    inner.state.pop(parameter, None)

    def start_over_(self, model: nn.Module, optimizer: Any = None) -> None:
        """Undo the events of the present call of `train`, with the rows and moments of before."""
        if self._run is None or self._run.model is not model:
            return
        adapter = adapter_for(model)
        if heads := adapter.heads(*EDITED) - self._before:
            uninstall_(model, heads, optimizer=optimizer)
        if (mark := mark_of(adapter.model.config)) is not None:
            del mark["events"][self._events_before :]
        self._run = None

    def _apply_due_(self, update: int, optimizer: Any) -> None:
        """Apply the events that the schedule proposes, one after another."""
        run = self._run
        assert run is not None
        run.updater.optimizer = optimizer
        while events := run.proposer.propose(update):
            for proposed in events:
                run.proposer.done(proposed, self._apply_(run, resolve_event(proposed, run.config), update))

    def _apply_(self, run: _Run, event: Any, update: int) -> Outcome:
        """Apply one event, in all processes or in none, and record it with the first process's measurements."""
        before = run.controller_loss(event.batches)
        with all_ranks_or_raise():
            change = apply_event(run, event)
        rewrap_(self.trainer)
        after = run.controller_loss(event.batches)
        before, after, seconds = run.parallel.first((before, after, change.seconds))
        losses = {"loss_before": before, "loss_after": after}
        outcome = Outcome(
            number=len(run.events) + 1,
            heads=change.heads,
            seconds=sum(seconds.values()),
            lowest_score=change.lowest_score,
            deferred=change.deferred,
            **losses,
        )
        heads = outcome.heads.to_list()
        values = {"number": outcome.number, "kind": event.kind, "update": update, "reason": event.reason}
        values = to_json({**values, "heads": heads, "seconds": seconds, **losses})
        run.events.append(EventRecord(run.folder, values))
        listed = (mark_of(run.model.config) or {}).get("events", [])
        if listed and listed[-1]["heads"] == heads:
            listed[-1] |= to_json({"update": update, **losses})
        self._log(outcome, change.summary, update)
        return outcome

    def _log(self, outcome: Outcome, summary: str, update: int) -> None:
        """Log an event: a line for people, and its numbers among the Trainer's metrics."""
        model, losses = self.trainer.model, {}
        if not math.isnan(outcome.loss_before):
            losses = {"heldout_loss_before": outcome.loss_before, "heldout_loss_after": outcome.loss_after}
        if self.trainer.is_world_process_zero():
            text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            logger.info("update %d: %s", update, "; ".join(filter(None, [summary, text])))
        counts = {f"{kind}_heads": len(adapter_for(model).heads(kind)) for kind in EDITED}
        self.trainer.log({**{kind: count for kind, count in counts.items() if count}, **losses})

    def _sequences(self, name: str, tokenizer: Any) -> list[Tensor]:
        """Return the calibration or held-out sequences, and keep them: an iterator is read once."""
        self._sources[name] = list(self._sources[name])
        if name == "heldout" and not self._sources[name]:
            return []
        return read_sequences_of(self._sources[name], tokenizer=tokenizer, name=name, **self._batching)

    def _check_logging(self, args: Any, updates: int) -> None:
        """Raise InputError where a schedule that reads every loss would miss some."""
        each = args.logging_steps == 1 and getattr(args.logging_strategy, "value", args.logging_strategy) == "steps"
        if self.schedule.first_update(updates) is None and not each:
            raise InputError(f"a {self.schedule.name} schedule reads every loss from the log: set logging_steps=1")

    def _check_model(self, model: nn.Module, optimizer: Any, *, restarts: bool) -> None:
        """Raise UnsupportedError for a model that cannot be edited, InputError for one this callback edited before."""
        inner, trainer = _uncompiled(self.trainer.model_wrapped), self.trainer
        shares = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if shares or not (inner is trainer.model or isinstance(inner, DistributedDataParallel)):
            raise UnsupportedError(_WHOLE)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"checkpoints of a {type(model).__name__} hold adapters alone; merge them first (merge_and_unload)"
            )
        check_editable(model, optimizer)
        adapter = adapter_for(model)
        if self.called or self._run is None:
            if self._run is not None and self._run.model is model and restarts:
                self._refuse_more(adapter)
            self._before, self.called = adapter.heads(*EDITED), False
            self._events_before = len((mark_of(adapter.model.config) or {}).get("events", []))

    def _refuse_more(self, adapter: Adapter) -> None:
        """Raise InputError where training would begin anew with heads that this callback froze, and freeze more."""
        own = {head for event in self.events for head in HeadSet.from_list(event.heads)}
        edited = adapter.heads(*EDITED)
        if heads := (edited - self._before) | (edited & HeadSet(own)):
            raise InputError(
                f"this FreezeCallback froze {len(heads)} heads of this model before: pass resume_from_checkpoint=True, "
                "or give the Trainer a new callback"
            )

    def _check_sequences(self, model: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
        """Raise InputError or UnsupportedError for sequences that the model or the score cannot read."""
        adapter = adapter_for(model)
        check_vocabulary(adapter, [*batches, *held_out])
        self.config.check_calibration(sequences=read_sequences(batches).num_different)
        if held_out or "gates" in self.config.needs:
            adapter.check_next_token()

    def _check_choice(self, model: nn.Module, length: int, held_out: list[Tensor], updates: int) -> None:
        """Raise InputError for heads that cannot be chosen, and for rows longer than the patterns of `length`."""
        adapter = adapter_for(model)
        check_heads(self.config, [site.layout for site in adapter.sites()], allow_empty=self.config.asks_for_none)
        if self.config.heads is not None:
            check_measurable(adapter, self.config.heads)
        if self.config.operation == "freeze" and not self.config.asks_for_none:
            self._check_length(length, held_out, updates)

    def _warn_of_changes(self, stored: dict[str, Any], updates: int) -> None:
        """Warn where a resumed training has other sequences, or another number of updates, than the one that began."""
        run = self._run
        assert run is not None
        if stored["sequences"] != run.sequences_hash():
            message = "the checkpoint was trained with other calibration or held-out sequences of FreezeCallback"
            warnings.warn(message, SafWarning, stacklevel=3)
        if run.updates != updates:
            message = f"events come when they were to come with max_steps={run.updates}, not {updates}"
            warnings.warn(message, SafWarning, stacklevel=3)

    def _check_length(self, length: int, held_out: list[Tensor], updates: int) -> None:
        """Raise InputError for held-out sequences, or a first row of the data, longer than patterns will cover."""
        longest = {"heldout": max((ids.shape[-1] for ids in held_out), default=0)}
        collator, strategy = self.trainer.data_collator, self.trainer.args.eval_strategy
        module = getattr(collator, "__module__", type(collator).__module__)
        # Other collators than those of transformers may cut rows.
        if (self.schedule.first_update(updates) or 0) < updates and module.startswith("transformers."):
            names = (
                ("train_dataset",)
                if getattr(strategy, "value", strategy) == "no"
                else ("train_dataset", "eval_dataset")
            )
            longest |= {name: _row_length(getattr(self.trainer, name)) for name in names}
        for name, tokens in longest.items():
            most = length + (name == "heldout")  # whose last token is a target alone
            if tokens > most:
                raise InputError(
                    f"rows of {name} must be at most {most} tokens, by the calibration's {length}, got {tokens}: "
                    "calibrate on longer sequences"
                )

    def _stored(self, state: TrainerState) -> dict[str, Any] | None:
        """Return this callback's state in a resumed checkpoint; None where it has none."""
        callbacks: Any = state.stateful_callbacks or {}
        entry = callbacks.get(type(self).__name__) if state.global_step else None
        stored = None if entry is None else entry["attributes"]["progress"]
        if stored is not None and stored["settings"] != self._settings():
            raise InputError(
                f"the checkpoint was trained with other settings of FreezeCallback, {stored['settings']}: resume with "
                "those"
            )
        return stored

    def _settings(self) -> dict[str, Any]:
        """Return the settings as plain values; a resumed run must have the same."""
        return to_json({"config": self.config.to_dict(), "schedule": schedule_to_dict(self.schedule)})


def _row_length(dataset: Any) -> int:
    """Return the tokens of the first row of a list or map-style data set that is not packed; 0 where unknown."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, Mapping):
        return 0
    row: Any = dataset[0] if len(dataset) else None
    if not isinstance(row, Mapping) or "position_ids" in row or "input_ids" not in row:
        return 0
    return len(row["input_ids"])


def check_arguments(args: Any) -> None:
    """Raise UnsupportedError for arguments under which heads cannot be edited."""
    if args.world_size == 1 and (processes := rank_and_size()[1]) > 1:
        raise UnsupportedError(f"{processes} processes on a CPU must have use_cpu=True: else each trains alone")
    if any(getattr(args, name, None) for name in ("fsdp", "deepspeed", "parallelism_config")):
        raise UnsupportedError(_WHOLE)
    if args.n_gpu > 1:
        raise UnsupportedError(f"one process must have one GPU, got {args.n_gpu}: start a process for each (torchrun)")
    if args.fp16:
        raise UnsupportedError("frozen heads take float32, or bfloat16 under autocast: train with bf16=True")
    if getattr(args, "restore_callback_states_from_checkpoint", False):
        raise UnsupportedError("FreezeCallback takes up its own state: leave restore_callback_states out")


def rewrap_(trainer: Any) -> None:
    """Fit the wrappers of a Trainer's model to it after heads were edited.

    The training loop holds the DDP wrapper, so the object stays; its gradient buckets are rebuilt. It need not
    send tables of frozen heads, and weights that no pass reads have no gradient to wait for.
    """
    wrapper = _uncompiled(trainer.model_wrapped)
    if isinstance(wrapper, DistributedDataParallel):
        own = getattr(wrapper.module, "_ddp_params_and_buffers_to_ignore", ())
        wrapper.parameters_to_ignore = {*own, *_idle_tensors(wrapper.module)}
        state = wrapper.__getstate__()
        # The old buckets watch gradients of the old shapes until they are gone, and a graph may hold them in a cycle.
        del wrapper.reducer, wrapper.logger
        gc.collect()
        wrapper.__setstate__(state)
        renewed_(wrapper)
        if (handler := trainer.accelerator.ddp_handler) is not None:
            handler.register_comm_hook(wrapper)
    if trainer.args.torch_compile:
        torch.compiler.reset()


def _idle_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names of frozen heads' buffers, and of queries' and keys' weights in layers without live heads."""
    for name, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        yield from (f"{name}.{NAME}.{buffer}" for buffer, _ in state.named_buffers())
        if not state.layout.num_live:
            read = {id(one) for role in ("value", "output") for one in state.family.module(module, role).parameters()}
            read |= set(map(id, state.parameters()))
            yield from (f"{name}.{part}" for part, one in module.named_parameters() if id(one) not in read)


def _uncompiled(module: Any) -> Any:
    return getattr(module, "_orig_mod", module)


@cache
def join_trainers() -> None:
    """Wrap methods of `Trainer`: callbacks then know it and follow its checkpoints, and pushes include the heads."""
    from transformers.trainer import Trainer

    for name, wrapper in _WRAPPERS.items():
        ordinary = getattr(Trainer, name)
        setattr(Trainer, name, wraps(ordinary)(wrapper(ordinary)))


def _callbacks(trainer: Any) -> list[FreezeCallback]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, FreezeCallback)]


def _train(ordinary: Any) -> Any:
    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        """Give the callback its Trainer, then train."""
        callbacks = _callbacks(self)
        if len(callbacks) > 1:
            raise InputError(f"a Trainer takes one FreezeCallback, got {len(callbacks)}: use a schedule of many events")
        for callback in callbacks:
            callback.trainer, callback.called = self, True
        return ordinary(self, *arguments, **options)

    return train


def _training_loop(ordinary: Any) -> Any:
    def training_loop(self: Any, *arguments: Any, **options: Any) -> Any:
        """Let the callback start over where the Trainer does, under `auto_find_batch_size`; then train."""
        for callback in _callbacks(self):
            if not callback.called:
                callback.start_over_(self.model, self.optimizer)
                rewrap_(self)
            elif self.args.torch_compile:
                torch.compiler.reset()  # programs of a model that was frozen before have its heads
        return ordinary(self, *arguments, **options)

    return training_loop


def _load_checkpoint(ordinary: Any) -> Any:
    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Follow the checkpoint's heads, then load its weights."""
        _follow_(self, Path(resume_from_checkpoint), self.model if model is None else model)
        ordinary(self, resume_from_checkpoint, model)

    return load_from_checkpoint


def _load_best(ordinary: Any) -> Any:
    def load_best_model(self: Any) -> None:
        """Follow the best checkpoint's heads, then load its weights."""
        _follow_(self, Path(self.state.best_model_checkpoint), self.model)
        ordinary(self)

    return load_best_model


def _follow_(trainer: Any, folder: Path, model: nn.Module) -> None:
    for callback in _callbacks(trainer):
        callback.follow_(model, folder, trainer.optimizer)
        rewrap_(trainer)


def _push(ordinary: Any) -> Any:
    def push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        """Copy a checkpoint's files about heads into the output folder if it is pushed now."""
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        pushes = self.args.hub_strategy != "end" and (self.args.hub_always_push or not busy)
        checkpoint, folder = Path(checkpoint_folder), Path(self.args.output_dir)
        if pushes and self.is_world_process_zero() and (checkpoint / "config.json").is_file():
            if holds_heads(checkpoint):
                for name in (STATE, TENSORS):
                    copyfile(checkpoint / name, folder / name)
                write_section(folder, section_of((checkpoint / CARD).read_text(encoding="utf-8")) or "")
            elif holds_heads(folder):
                forget_heads_(folder)
        ordinary(self, checkpoint_folder)

    return push_from_checkpoint


def _card(ordinary: Any) -> Any:
    def create_model_card(self: Any, *arguments: Any, **options: Any) -> None:
        """Write the Trainer's card, with the section about heads at its end."""
        ordinary(self, *arguments, **options)
        model = _uncompiled(self.model)
        if self.is_world_process_zero() and isinstance(model, PreTrainedModel) and mark_of(model.config) is not None:
            write_section(Path(self.args.output_dir), section(adapter_for(model)))

    return create_model_card


_WRAPPERS = {
    "train": _train,
    "_inner_training_loop": _training_loop,
    "_load_from_checkpoint": _load_checkpoint,
    "_load_best_model": _load_best,
    "_push_from_checkpoint": _push,
    "create_model_card": _card,
}
