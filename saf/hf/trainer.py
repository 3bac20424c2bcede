"""`FreezeCallback` freezes heads by a schedule while a `Trainer` of transformers trains.

Schedules and events are those of `saf pretrain` (saf/train/events.py). An event runs between two updates, after the
checkpoint of the first one. A run that resumes from that checkpoint repeats the event.

A Trainer passes callbacks neither itself nor the checkpoints that it loads. `patch_trainer` therefore wraps the methods
of `Trainer` that train, load checkpoints, and push a model to a hub.
"""

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copyfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from saf.calibration import read_batches, read_sequences
from saf.distributed import on_rank0
from saf.errors import CheckpointError, InputError, LossError, UnsupportedError
from saf.freeze_config import FreezeConfig, check_config
from saf.freezing import check_event
from saf.frozen_state import STATE_FILE, TENSORS_FILE, read_description, restore_
from saf.heads import EDITED
from saf.heldout import heldout_loss
from saf.hf.attention import NAME, config_entry, state_of
from saf.hf.model_card import write_section
from saf.hf.pretrained import wrap_method
from saf.machine import Execution
from saf.models.adapter import adapter_for, unwrap
from saf.optimizer_state import unwrap_optimizer
from saf.records.files import read_json, to_json
from saf.records.run import EventRecord, event_records
from saf.schedules import OneTime, Proposer, Schedule, ValidationBudget, schedule_to_dict
from saf.surgery import accept_wrapper, check_editable, uninstall_
from saf.train.events import Change, apply_due_events_
from saf.train.start import check_freeze, start_proposer

logger = logging.getLogger(__name__)


class FreezeCallback(TrainerCallback, ExportableState):
    """Freeze heads of a `Trainer`'s model by a schedule, and edit the optimiser's state with them.

    >>> callback = FreezeCallback(FreezeConfig(rate=0.25), [torch.ones(2, 8, dtype=torch.long)], OneTime(at=0.5))

    Checkpoints are complete: `save_pretrained` writes weights, layout, patterns and removed rows, and
    trainer_state.json has the schedule's state. Build the model as at the start and resume from any checkpoint by
    `train(resume_from_checkpoint=...)`. `load_best_model_at_end` restores the best checkpoint's heads too.
    """

    def __init__(
        self, config: FreezeConfig, calibration: Iterable[Any], schedule: Schedule | None = None, *,
        heldout: Iterable[Any] = (), accept_loss: bool = False,
    ):  # fmt: skip
        """Store the settings.

        Args:
            config: Settings of each event.
            calibration: Token tensors `[B, T]`, or mappings with such `input_ids`; `text_sequences` cuts text into
                them. Patterns cover T positions; longer inputs are refused once heads are frozen.
            schedule: `saf.OneTime(0.5)` by default. `TrainLoss` needs `logging_steps=1`.
            heldout: Sequences in the same forms, for `ValidationBudget`, joint cost and scores that read outputs. With
                them the losses before and after each event are logged, and in the model card.
            accept_loss: Keep an event after the last update that raises perplexity on `heldout` by more than 5%.
                Otherwise the event is undone, and `train` raises LossError once everything is saved.
        """
        check_config(config)
        self.config = config
        self.schedule: Schedule = OneTime() if schedule is None else schedule
        self.trainer: Any = None
        self._calibration, self._heldout = read_batches(calibration), read_batches(heldout) if heldout else []
        self._accept_loss = accept_loss
        self._training: Any = None  # a `_Training` from `on_train_begin` on
        if "gradient" in config.needs:
            raise UnsupportedError("a Trainer keeps no average of Q/K gradients; take another score")
        if config.trainable:
            raise UnsupportedError("a resumed Trainer has no optimiser state of trainable patterns; leave it out")
        decides = isinstance(self.schedule, ValidationBudget) or config.uses_joint_cost or "outputs" in config.needs
        if decides and not self._heldout:
            raise InputError("this choice of heads reads held-out sequences: give them as heldout=")
        patch_trainer()

    @property
    def events(self) -> list[EventRecord]:
        """The events so far, in order."""
        return self._training.events if self._training else []

    def state(self) -> dict[str, Any]:
        """Return the settings, the schedule's state and the events so far, for a checkpoint."""
        progress, training = None, self._training
        if training is not None:
            progress = {
                "settings": self._settings(),
                "updates": training.updates,
                "schedule": training.proposer.state_dict(),
                "events": [*training.lines],
            }
        return {"args": {}, "attributes": {"progress": progress}}  # the form of `ExportableState`

    # --- what a Trainer calls

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Check model and settings, and start the schedule, or continue it from the checkpoint's state."""
        model, optimizer = options["model"], options.get("optimizer")
        execution = Execution(torch.device(args.device), "bf16" if args.bf16 else "fp32", compile=False)
        check_freeze(self.config, self.schedule, execution)
        self._check_trainer(args, state.max_steps)
        self._check_model(model, optimizer)
        if (stored := self._stored(state)) is None:
            if self.events and self._training.model is model:
                raise InputError("this model was frozen before: pass resume_from_checkpoint=True, or a new callback")
            self._check_choice(model, state.max_steps)
            stored = {"updates": state.max_steps, "schedule": None, "events": []}
        updates = stored["updates"]  # a resumed schedule's shares refer to the original max_steps
        layouts = [site.layout for site in adapter_for(model).sites()]
        self._training = _Training(
            trainer=self.trainer,
            model=model,
            updater=SimpleNamespace(optimizer=optimizer, gradient=None),
            task=SimpleNamespace(calibration=lambda: self._calibration, heldout=lambda: self._heldout),
            config=SimpleNamespace(freeze=self.config, schedule=self.schedule),
            execution=execution,
            proposer=start_proposer(self.config, self.schedule, layouts, updates=updates, state=stored["schedule"]),
            updates=updates,
            lines=list(stored["events"]),
        )
        # The Trainer saves only states that are entered here; a checkpoint without this callback has no entry.
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Apply the events that are due before an update, after the previous update's checkpoint."""
        apply_due_events_(self._training)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Check the optimiser after its first step; apply the events after the last update."""
        training = self._training
        if not training.stepped:
            # Optimisers create their state in the first step; Adafactor's factored moments have no rows to move.
            check_editable(options["model"], options["optimizer"])
            training.stepped = True
        if state.global_step >= state.max_steps:
            # A ValidationBudget measures the cost of its events itself, and undoes them.
            accepts = self._accept_loss or isinstance(self.schedule, ValidationBudget) or not self._heldout
            try:
                apply_due_events_(training, guard=None if accepts else self._heldout)
            except LossError as error:
                training.refused = error

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise the LossError of an event after the last update. The Trainer has saved the model by now."""
        if self._training.refused is not None:
            raise self._training.refused

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Pass the loss of an update to the schedule."""
        if self._training and logs and "loss" in logs:
            self._training.proposer.observe(state.global_step, float(logs["loss"]))

    # --- checks before training

    def _check_trainer(self, args: Any, updates: int) -> None:
        """Raise InputError or UnsupportedError for arguments that do not fit the events or the schedule."""
        trainer = self.trainer
        inner = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # under torch.compile
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if sharded or not (inner is trainer.model or isinstance(inner, DistributedDataParallel)):
            raise UnsupportedError("FreezeCallback needs whole weights: leave FSDP, DeepSpeed and DataParallel out")
        # auto_find_batch_size starts over with the model as it is, perhaps frozen, when memory runs out.
        if args.fp16 or args.auto_find_batch_size:
            raise UnsupportedError("FreezeCallback takes neither fp16 nor auto_find_batch_size: use bf16, set a size")
        # A logged loss is the mean since the last log. Schedules without a first update decide by each loss.
        if self.schedule.first_update(updates) is None and (args.logging_steps, args.logging_strategy) != (1, "steps"):
            raise InputError(f"a {self.schedule.name} schedule reads every loss from the log: set logging_steps=1")

    def _check_model(self, model: nn.Module, optimizer: Any) -> None:
        """Raise InputError or UnsupportedError for a model that cannot be edited, or sequences that do not fit it."""
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"checkpoints of a {type(model).__name__} hold adapters alone; merge them first (merge_and_unload)"
            )
        check_editable(model, optimizer)
        adapter = adapter_for(model)
        adapter.check_tokens([*self._calibration, *self._heldout])
        if self._heldout:
            adapter.check_next_token()

    def _check_choice(self, model: nn.Module, updates: int) -> None:
        """Raise a SafError for what the events cannot do, and for rows longer than the patterns will be."""
        adapter, config = adapter_for(model), self.config
        check_event(adapter, read_sequences(self._calibration), config, allow_empty=config.asks_for_none)
        if config.operation != "freeze" or config.asks_for_none:
            return
        # The last token of a held-out sequence is a target, no input.
        longest = {"heldout": max((ids.shape[-1] for ids in self._heldout), default=1) - 1}
        if (self.schedule.first_update(updates) or 0) < updates:
            longest["train_dataset"] = _row_length(self.trainer)
        length = self._calibration[0].shape[-1]
        for name, tokens in longest.items():
            if tokens > length:
                raise InputError(f"rows of {name} must be at most the calibration's {length} tokens, got {tokens}")

    def _stored(self, state: TrainerState) -> dict[str, Any] | None:
        """Return this callback's state in a resumed checkpoint; None where it has none."""
        callbacks: Any = state.stateful_callbacks or {}
        # At update 0 nothing is resumed: the Trainer has entered this callback's own state, of an earlier training.
        entry = callbacks.get(type(self).__name__) if state.global_step else None
        stored = None if entry is None else entry["attributes"]["progress"]
        if stored is not None and stored["settings"] != self._settings():
            raise InputError(
                f"FreezeCallback must have the checkpoint's settings, {stored['settings']}: resume with those"
            )
        return stored

    def _settings(self) -> dict[str, Any]:
        """Return the settings as plain values; a resumed run must have the same."""
        return to_json({"config": self.config.to_dict(), "schedule": schedule_to_dict(self.schedule)})


@dataclass(kw_only=True)
class _Training:
    """A training of a Trainer, with the parts that its events read and call (`saf.train.events.Training`)."""

    trainer: Any
    model: PreTrainedModel
    updater: Any
    task: Any
    config: Any
    execution: Execution
    proposer: Proposer
    updates: int
    """The number of updates that the schedule's shares refer to."""
    lines: list[dict[str, Any]]
    """A line for each event so far."""
    stepped: bool = False
    """Whether the optimiser was checked after its first step."""
    refused: LossError | None = None
    """The error of an event after the last update, raised once everything is saved."""

    @property
    def update(self) -> int:
        return self.trainer.state.global_step

    @property
    def events(self) -> list[EventRecord]:
        return event_records(Path(self.trainer.args.output_dir), self.lines)

    def say(self, text: str) -> None:
        """Show nothing: a Trainer prints its own progress."""

    def controller_loss(self, when: str, *, batches: int | None) -> float:
        """Return the mean held-out loss that rank 0 measures, nats per token; NaN without held-out sequences."""
        if not self.task.heldout():
            return math.nan
        with self.execution.autocast():
            return on_rank0(lambda: heldout_loss(self.model, self.task.heldout()[:batches]))

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Let an event edit the model, which is whole on every rank, and rebuild its DDP buckets afterwards."""
        yield
        rewrap_(self.trainer)

    def record_event(self, kind: str, line: dict[str, Any], change: Change) -> int:
        """Keep an event's line for the checkpoints, log its losses, and return its number."""
        number, trainer = len(self.lines) + 1, self.trainer
        self.lines.append(to_json({"number": number, "kind": kind, **line}))
        losses = {name: line[name] for name in ("loss_before", "loss_after")}
        # `freeze_` has recorded the event for the model card, but no update, and losses only where it measured them.
        card_events = config_entry(self.model.config).get("events", [])
        if card_events and card_events[-1]["heads"] == line["heads"]:
            card_events[-1] = to_json({"update": self.update, **losses}) | card_events[-1]
        if trainer.is_world_process_zero():
            words = "update %d: %s; held-out loss %.4f before, %.4f after"
            logger.info(words, self.update, change.summary, *losses.values())
        counts = {f"{kind}_heads": len(adapter_for(self.model).heads(kind)) for kind in EDITED}
        measured = {f"heldout_{name}": loss for name, loss in losses.items()} if self.task.heldout() else {}
        trainer.log({kind: count for kind, count in counts.items() if count} | measured)
        return number


def _row_length(trainer: Any) -> int:
    """Return the length of the first training row; 0 where unknown, packed, or perhaps cut by another collator."""
    if not trainer.data_collator.__module__.startswith("transformers."):
        return 0
    try:
        row = trainer.train_dataset[0]
    except (TypeError, LookupError, NotImplementedError):  # an iterable dataset, or an empty one
        return 0
    known = isinstance(row, Mapping) and "position_ids" not in row
    return len(row.get("input_ids", ())) if known else 0


# --- wrappers of the model


def rewrap_(trainer: Any) -> None:
    """Rebuild the DDP gradient buckets of a Trainer's model after heads were edited, and drop its compiled code.

    The training loop holds a reference to the DDP wrapper, so the object stays. DDP then ignores buffers of frozen
    heads, and weights of layers without live heads, which get no gradient.
    """
    wrapper = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    if isinstance(wrapper, DistributedDataParallel):
        ignored = getattr(wrapper.module, "_ddp_params_and_buffers_to_ignore", ())
        wrapper.parameters_to_ignore = {*ignored, *_unused_tensors(wrapper.module)}
        state = wrapper.__getstate__()
        # The old reducer's hooks expect gradients of the old shapes until it is freed; a reference cycle may hold it.
        del wrapper.reducer, wrapper.logger
        gc.collect()
        wrapper.__setstate__(state)
        accept_wrapper(wrapper)
        if (handler := trainer.accelerator.ddp_handler) is not None:
            handler.register_comm_hook(wrapper)
    if trainer.args.torch_compile:
        torch.compiler.reset()  # or each event would count towards Dynamo's limit of eight programs


def _unused_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names of frozen heads' buffers, and of parameters that layers without live heads do not use."""
    for name, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        yield from (f"{name}.{NAME}.{buffer}" for buffer, _ in state.named_buffers())
        if not state.layout.num_live:
            used = {id(each) for role in ("value", "output") for each in state.family.module(module, role).parameters()}
            used |= set(map(id, state.parameters()))
            yield from (f"{name}.{part}" for part, each in module.named_parameters() if id(each) not in used)


# --- the Trainer's methods


@cache
def patch_trainer() -> None:
    """Wrap methods of `Trainer`, so that its callback, checkpoints and pushes handle frozen heads."""
    from transformers.trainer import Trainer

    methods = (train, _load_from_checkpoint, _load_best_model, _push_from_checkpoint, create_model_card)
    for method in methods:
        wrap_method(Trainer, method)


def train(original: Any, trainer: Any, *arguments: Any, **options: Any) -> Any:
    """Train, with the Trainer known to its callback."""
    if (callback := _callback(trainer)) is not None:
        callback.trainer = trainer
        if trainer.args.torch_compile:
            torch.compiler.reset()  # code compiled before events of an earlier training would be reused
    return original(trainer, *arguments, **options)


def _load_from_checkpoint(original: Any, trainer: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
    """Load a checkpoint's weights into a model with its heads."""
    _load_heads_(trainer, resume_from_checkpoint, trainer.model if model is None else model)
    return original(trainer, resume_from_checkpoint, model)


def _load_best_model(original: Any, trainer: Any) -> Any:
    """Load the best checkpoint's weights into a model with its heads."""
    _load_heads_(trainer, trainer.state.best_model_checkpoint, trainer.model)
    return original(trainer)


def _push_from_checkpoint(original: Any, trainer: Any, checkpoint_folder: str) -> Any:
    """Push a checkpoint, with its files about heads copied into the folder that the Trainer pushes."""
    checkpoint, folder = Path(checkpoint_folder), Path(trainer.args.output_dir)
    if trainer.is_world_process_zero() and (checkpoint / STATE_FILE).is_file():
        for name in (STATE_FILE, TENSORS_FILE):
            copyfile(checkpoint / name, folder / name)
        write_section(folder, adapter_for(trainer.model))
    return original(trainer, checkpoint_folder)


def create_model_card(original: Any, trainer: Any, *arguments: Any, **options: Any) -> None:
    """Write the Trainer's model card, which overwrites that of `save_pretrained`, with the section about heads."""
    original(trainer, *arguments, **options)
    model = unwrap(trainer.model)
    edited = isinstance(model, PreTrainedModel) and config_entry(model.config)
    if edited and trainer.is_world_process_zero():
        write_section(Path(trainer.args.output_dir), adapter_for(model))


def _callback(trainer: Any) -> FreezeCallback | None:
    """Return the Trainer's callback; raise InputError for several."""
    callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, FreezeCallback)]
    if len(callbacks) > 1:
        raise InputError(f"a Trainer takes one FreezeCallback, got {len(callbacks)}: use a schedule of many events")
    return callbacks[0] if callbacks else None


def _load_heads_(trainer: Any, folder: str, model: Any) -> None:
    """Restore the heads of a checkpoint, before the Trainer loads its weights.

    Optimiser moments of the projections are dropped; a resumed Trainer loads the checkpoint's afterwards.
    """
    if _callback(trainer) is None:
        return
    adapter = adapter_for(model)
    if adapter.heads(*EDITED):
        uninstall_(model, optimizer=trainer.optimizer)
    # config.json decides: saf.json may be left from an earlier training in the same folder.
    if saved := read_json(Path(folder, "config.json"), error=CheckpointError).get("saf"):
        restore_(model, *read_description(Path(folder)))
        config_entry(adapter.model.config).update(saved)
    if (optimizer := unwrap_optimizer(trainer.optimizer)) is not None:
        for site in adapter.sites():
            for parameter, _ in site.projections().values():
                optimizer.state.pop(parameter, None)
    rewrap_(trainer)
