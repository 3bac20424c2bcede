"""Passes of a `Trainer` that frozen heads would not take: refused while heads are ordinary, before they compute."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening

from saf.adapters.transformers.mask import (
    beyond_window,
    check_begins,
    check_documents,
    check_one_sequence_a_row,
    check_padding,
    longest_document,
    window_of,
)
from saf.errors import InputError, UnsupportedError
from saf.integrations.transformers.editing import editing


def check_packing(trainer: Any) -> None:
    """Raise UnsupportedError where models with frozen heads are to get packed documents that they would refuse.

    These are any in compiled code or in passes with a cache, of evaluations too, and some longer than a layer's window,
    where the rows of the data tell it at once.
    """
    collator = trainer.data_collator
    # TRL's collators say so themselves.
    packs = isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False) is True
    if not packs or not (_trains_on(trainer) or _evaluates(trainer)):
        return
    if trainer.args.torch_compile:
        raise UnsupportedError(
            f"{type(collator).__name__} packs documents into one row, and with frozen heads compiled code attends to "
            "one sequence a row: leave torch_compile out, or pad each document in a row of its own"
        )
    # A batch of one row is one document there; other collators may get rows that are packed already.
    flat, args = isinstance(collator, DataCollatorWithFlattening), trainer.args
    trains = _trains_on(trainer) and not (flat and args.per_device_train_batch_size == 1)
    evaluates = _evaluates(trainer) and not (flat and args.per_device_eval_batch_size == 1)
    if (trains and _caches(trainer, training=True)) or (evaluates and _caches(trainer, training=False)):
        raise UnsupportedError(
            f"{type(collator).__name__} packs documents into one row, and in passes with a cache, which use_cache=True "
            "of the model's configuration asks for, transformers takes such a row for one sequence: leave use_cache "
            "out of the TrainingArguments, or set model.config.use_cache = False once the Trainer is made"
        )
    lengths, window = _document_lengths(trainer), window_of(getattr(trainer.model, "config", None))
    several = trainer.args.per_device_train_batch_size > 1
    if window is not None and several and lengths and max(lengths) > window:
        raise UnsupportedError(beyond_window(max(lengths), window))


def _caches(trainer: Any, *, training: bool, asked: bool | None = None) -> bool:
    """Return whether passes of training, or else of evaluations, make a cache; they are `asked` to, or the model is."""
    if asked is None:
        asked = bool(getattr(getattr(trainer.model, "config", None), "use_cache", False))
    # With it transformers leaves caches out of training.
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    return asked and not (training and checkpointing)


def _trains_on(trainer: Any) -> bool:
    """Return whether an update follows the first edit of heads, which may come after the last one."""
    firsts = [callback.first for callback in editing(trainer) if callback.first is not None]
    return min(firsts, default=trainer.state.max_steps) < trainer.state.max_steps


def _evaluates(trainer: Any) -> bool:
    """Return whether an evaluation follows the first edit of heads: one comes at the end, if any but at the start."""
    strategy = trainer.args.eval_strategy
    edits = any(callback.first is not None for callback in editing(trainer))
    return edits and getattr(strategy, "value", strategy) != "no"


def check_evaluation(trainer: Any, longest: int | None) -> None:
    """Raise InputError where an evaluation that follows an edit has a first row of more than `longest` tokens.

    Raises UnsupportedError for a first row of packed documents where evaluations make a cache. Lists and data sets are
    looked at, in front of a collator of transformers, which leaves rows as long as they are; others are refused when
    they come.
    """
    collator, given = trainer.data_collator, trainer.eval_dataset
    origin = getattr(collator, "__module__", type(collator).__module__)
    if not _evaluates(trainer) or origin.partition(".")[0] != "transformers":
        return
    caches = _caches(trainer, training=False) and not isinstance(collator, DataCollatorWithFlattening)
    sets: list[Any] = list(given.values()) if isinstance(given, dict) else [given]
    for rows in sets:
        indexed = isinstance(rows, list) or (hasattr(rows, "column_names") and hasattr(rows, "__getitem__"))
        readable = indexed or (caches and hasattr(rows, "__len__") and issubclass(type(rows), Dataset))
        first: Any = rows[0] if readable and len(rows) else None
        if not isinstance(first, Mapping):
            continue
        if "position_ids" in first:  # packed beforehand, of shorter documents
            if caches:
                positions, mask = torch.as_tensor(first["position_ids"]).view(1, -1), first.get("attention_mask")
                mask = None if mask is None else torch.as_tensor(mask).view(1, -1)
                check_one_sequence_a_row(positions, mask, positions.shape[-1])
        elif indexed and longest is not None and (length := len(first.get("input_ids", ()))) > longest:
            raise InputError(f"in evaluations {longer('rows', length, longest)}")


def _document_lengths(trainer: Any) -> list[int]:
    """Return the tokens of each document that a Trainer packs; none where only reading all of the data tells it."""
    rows, column = trainer.train_dataset, trainer.args.length_column_name
    if not isinstance(trainer.data_collator, DataCollatorWithFlattening):
        return []  # rows may be packed already
    if column in (getattr(rows, "column_names", None) or ()):
        return list(rows[column])
    return [len(row["input_ids"]) for row in rows] if isinstance(rows, list) else []


@contextmanager
def watched(trainer: Any) -> Iterator[None]:
    """Refuse rows that frozen heads will not take from the first pass on, while heads are still ordinary.

    These are packed documents longer than a layer's window, beside a mask or a cache, or in compiled code, rows and
    documents longer than the patterns that are to be fitted, and masks of other things than padding at either end.

    A pass is looked at in front of the module that a step calls, which is around compiled code: that stays as it is.
    """
    if not editing(trainer):
        yield
        return
    before = {name: vars(trainer)[name] for name in _STEPS if name in vars(trainer)}
    for name, follows in _STEPS.items():
        setattr(trainer, name, _looking(trainer, getattr(trainer, name), follows))
    try:
        yield
    finally:
        for name in _STEPS:
            vars(trainer).pop(name, None)
        vars(trainer).update(before)


_STEPS = {"training_step": _trains_on, "prediction_step": _evaluates}
"""Methods of a Trainer that call the model for a micro-batch, which they are given, wrapped as it is; and what tells
whether such ones follow an edit."""


def _looking(trainer: Any, step: Callable[..., Any], follows: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a step of a Trainer that looks at the passes it makes, where such ones follow an edit."""
    names = tuple(inspect.signature(type(trainer.model).forward).parameters)[1:]

    def look(called: nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at a pass."""
        if follows(trainer):
            told = dict(zip(names, positional, strict=False)) | given
            _check_pass(trainer, told, compiled=uncompiled(called) is not called, training=called.training)

    @wraps(step)
    def looking(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Look at passes of the model as it is called here, then no more."""
        hook = model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            return step(model, *arguments, **options)
        finally:
            hook.remove()

    return looking


def _check_pass(trainer: Any, given: dict[str, Any], *, compiled: bool, training: bool) -> None:
    """Raise what `watched` tells for the tokens `[B, T]` of a pass, its positions, its mask and its cache."""
    positions, mask, cache = (given.get(name) for name in ("position_ids", "attention_mask", "past_key_values"))
    if isinstance(mask, Mapping):  # made by hand for each kind of layer; attention looks at them
        return
    if mask is not None:
        check_padding(mask)
    rows = given.get("input_ids")
    rows = given.get("inputs_embeds") if rows is None else rows
    window = window_of(getattr(trainer.model, "config", None))
    past = 0 if cache is None else int(cache.get_seq_length())
    caches = _caches(trainer, training=training, asked=given.get("use_cache"))
    alone = compiled or mask is not None or cache is not None or caches
    if positions is None and rows is not None:
        check_begins(given.get("cu_seq_lens_q"), rows)
    if positions is not None and alone:
        check_one_sequence_a_row(positions, mask, past + positions.shape[-1], compiled=compiled)
    elif positions is not None and window is not None:
        check_documents(positions, window)
    limits = [callback.longest for callback in editing(trainer) if callback.longest is not None]
    length, what = 0 if rows is None else past + rows.shape[1], "rows"
    if not limits or length <= min(limits):
        return
    if positions is not None and not alone:
        length, what = longest_document(positions), "documents"
    if length > min(limits):
        raise InputError(longer(what, length, min(limits)))


def uncompiled(module: Any) -> Any:
    """Return the module under `torch.compile`."""
    return getattr(module, "_orig_mod", module)


def longer(what: str, length: int, longest: int) -> str:
    """Say that rows, or documents, are longer than the patterns that are to be fitted."""
    return (
        f"{what} of {length:,} tokens are longer than those of the calibration, {longest:,}, which the patterns of "
        f"frozen heads will cover: calibrate on sequences as long as the {what}, or give shorter ones"
    )
