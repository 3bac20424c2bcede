"""What a callback that edits heads needs of the `Trainer` itself, beside what transformers tells callbacks.

A Trainer calls its model through wrappers that know its shapes, and loads checkpoints whose heads its model may not
have. Both are met here, in one place: `join_trainers` lets every Trainer tell such callbacks of itself and of the
checkpoints that it is about to load, and `rewrap_` fits the wrappers to the model as it is. What a Trainer pushes to a
hub it copies by names that it knows, and its model card is its own: files and section about heads are put beside them,
with such a callback or without.
"""

import gc
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from saf.adapters import adapter_for
from saf.adapters.description import STATE, TENSORS
from saf.adapters.transformers.attention import idle_tensors
from saf.adapters.transformers.folder import (
    CARD,
    forget_heads_,
    holds_heads,
    mark_of,
    section,
    section_of,
    with_section,
)
from saf.distributed import rank_and_size
from saf.errors import InputError, UnsupportedError
from saf.integrations.transformers.editing import editing
from saf.integrations.transformers.passes import uncompiled, watched
from saf.records.files import write_atomically


@cache
def join_trainers() -> None:
    """Let every `Trainer` tell its callbacks that edit heads of itself, of starting over, and of checkpoints to load.

    What it pushes of a model with frozen or pruned heads has the files about these, too, and its model card their
    section, whatever its callbacks.
    """
    from transformers.trainer import Trainer

    _tell_of_training(Trainer)
    _tell_of_loading(Trainer)
    _send_heads_along(Trainer)


def _tell_of_training(kind: Any) -> None:
    """Let a Trainer tell callbacks which one it is when it begins to train, and of starting over."""
    train, loop = kind.train, kind._inner_training_loop

    @wraps(train)
    def train_told(self: Any, *arguments: Any, **options: Any) -> Any:
        """Tell callbacks which Trainer it is, then train."""
        found = editing(self)
        if len(found) > 1:
            raise InputError(
                f"a Trainer takes one {type(found[0]).__name__}, whose progress its checkpoints hold; got "
                f"{len(found)}: give one of them a schedule of several events, such as saf.Gradual"
            )
        for callback in found:
            callback.trainer, callback.called = self, True
        return train(self, *arguments, **options)

    @wraps(loop)
    def training_loop(self: Any, *arguments: Any, **options: Any) -> Any:
        """Let callbacks start over where the Trainer does, as `auto_find_batch_size` has it; then train."""
        for callback in editing(self):
            if not callback.called:
                callback.start_over_(self.model, self.optimizer)
                rewrap_(self)
            elif self.args.torch_compile:
                torch.compiler.reset()  # torch would look in this model for heads of one that was frozen before
        with watched(self):
            return loop(self, *arguments, **options)

    kind.train, kind._inner_training_loop = train_told, training_loop


def _tell_of_loading(kind: Any) -> None:
    """Let the model of a Trainer follow the heads of checkpoints."""
    load, load_best = kind._load_from_checkpoint, kind._load_best_model

    @wraps(load)
    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Follow the checkpoint's heads, then load its weights."""
        _follow_(self, Path(resume_from_checkpoint), self.model if model is None else model)
        load(self, resume_from_checkpoint, model)

    @wraps(load_best)
    def load_best_model(self: Any) -> None:
        """Follow the best checkpoint's heads, then load its weights."""
        _follow_(self, Path(self.state.best_model_checkpoint), self.model)
        load_best(self)

    kind._load_from_checkpoint, kind._load_best_model = load_from_checkpoint, load_best_model


def _send_heads_along(kind: Any) -> None:
    """Let a Trainer push the files about heads, and write their section into its model card."""
    push, card = kind._push_from_checkpoint, kind.create_model_card

    @wraps(push)
    def push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        """Copy what a checkpoint has of heads to where the rest of it is copied, then push; or do neither."""
        checkpoint, folder = Path(checkpoint_folder), Path(self.args.output_dir)
        whole = (checkpoint / "config.json").is_file()  # a checkpoint of peft has adapters alone
        if self.is_world_process_zero() and whole and (holds_heads(checkpoint) or holds_heads(folder)):
            if not _pushes(self):
                return
            _copy_heads(checkpoint, folder)
        push(self, checkpoint_folder)

    @wraps(card)
    def create_model_card(self: Any, *arguments: Any, **options: Any) -> None:
        """Write the Trainer's card, with the section about heads at its end."""
        card(self, *arguments, **options)
        model, path = uncompiled(self.model), Path(self.args.output_dir) / CARD
        whole = isinstance(model, PreTrainedModel)  # as above
        if self.is_world_process_zero() and whole and mark_of(model.config) is not None:
            told = with_section(path.read_text(encoding="utf-8"), section(adapter_for(model)))
            write_atomically(path, told.encode())

    kind._push_from_checkpoint, kind.create_model_card = push_from_checkpoint, create_model_card


def _pushes(trainer: Any) -> bool:
    """Return whether a Trainer pushes checkpoints, and would one now: an earlier push may be under way."""
    free = trainer.args.hub_always_push or trainer.push_in_progress is None or trainer.push_in_progress.is_done()
    return trainer.args.hub_strategy != "end" and free


def _copy_heads(checkpoint: Path, folder: Path) -> None:
    """Make a folder's files about heads and its card's section those of a checkpoint, which may have none."""
    if not holds_heads(checkpoint):
        forget_heads_(folder)
        return
    for name in (STATE, TENSORS):
        if (checkpoint / name).is_file():
            write_atomically(folder / name, (checkpoint / name).read_bytes())
    told, card = (_text(each / CARD) for each in (checkpoint, folder))
    if told is not None and (text := section_of(told)) is not None:
        write_atomically(folder / CARD, with_section(card, text).encode())


def _text(path: Path) -> str | None:
    """Return the text of a file; None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


def check_arguments(args: Any) -> None:
    """Raise UnsupportedError for arguments by which a Trainer shares out what edits need whole."""
    if args.world_size == 1 and (processes := rank_and_size()[1]) > 1:
        raise UnsupportedError(
            f"{processes} processes were started, and the Trainer lets each train by itself, into one folder: pass "
            "use_cpu=True where they are to train together on a CPU, or start one process"
        )
    if any(getattr(args, name, None) for name in ("fsdp", "deepspeed", "parallelism_config")):
        raise UnsupportedError(_SHARES)
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"one process with {args.n_gpu} GPUs trains through DataParallel, which copies the model anew for every "
            "update; start a process for each GPU (torchrun --nproc-per-node N, or accelerate launch), or show it one "
            "by CUDA_VISIBLE_DEVICES"
        )
    if args.fp16:
        raise UnsupportedError(
            "frozen heads take values in float32 or, under autocast, in bfloat16; fp16=True would give them float16: "
            "train with bf16=True"
        )


def check_wrappers(trainer: Any) -> None:
    """Raise UnsupportedError where something else than DistributedDataParallel stands between Trainer and model."""
    inner = uncompiled(trainer.model_wrapped)
    shares = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if shares or not (inner is trainer.model or isinstance(inner, DistributedDataParallel)):
        raise UnsupportedError(_SHARES)


_SHARES = (
    "with FSDP, DeepSpeed or tensor parallelism a process has a share of each weight, and heads are rows of whole "
    "ones: leave it out (torchrun or accelerate launch alone, which is DistributedDataParallel)"
)


def rewrap_(trainer: Any) -> None:
    """Fit what a Trainer calls its model through to the model as it is now; call it whenever heads were edited.

    The wrapper of several processes stays the object that the training loop holds; its buckets of gradients are made
    anew, with the settings that it has. Tables of frozen heads are the same everywhere and stay as they are, so it need
    not send them; weights that no pass reads have no gradient that it could wait for. Compiled programs are dropped.
    """
    wrapper = uncompiled(trainer.model_wrapped)
    if isinstance(wrapper, DistributedDataParallel):
        own = getattr(wrapper.module, "_ddp_params_and_buffers_to_ignore", ())
        wrapper.parameters_to_ignore = {*own, *idle_tensors(wrapper.module)}
        state = wrapper.__getstate__()
        # The old buckets watch gradients of the old shapes until they are gone, and a graph may hold them in a cycle.
        del wrapper.reducer, wrapper.logger
        gc.collect()
        wrapper.__setstate__(state)
        if (handler := trainer.accelerator.ddp_handler) is not None:
            handler.register_comm_hook(wrapper)
    if trainer.args.torch_compile:
        torch.compiler.reset()


def _follow_(trainer: Any, folder: Path, model: nn.Module) -> None:
    """Give a Trainer's model the heads of a checkpoint where a callback of its edits heads."""
    for callback in editing(trainer):
        callback.follow_(model, folder, trainer.optimizer)
        rewrap_(trainer)
