"""Calibration sequences as users of transformers have them: token tensors, rows of a data set, or text."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from saf.calibration import read_batches
from saf.errors import InputError


def text_sequences(
    texts: Iterable[str], tokenizer: Any, *, length: int, count: int = 32, batch_size: int = 8, bos: bool = False
) -> list[Tensor]:
    """Return calibration sequences of some texts for `saf.freeze_`: token ids in batches `[<= batch_size, length]`.

    >>> saf.freeze_(model, text_sequences(texts, tokenizer, length=2048), saf.FreezeConfig(rate=0.25))  # doctest: +SKIP

    Texts are tokenised without a token that begins a text, joined with the tokenizer's end of text, and cut into the
    first `count` sequences. With `bos` each sequence begins with the tokenizer's token that begins a text. Raises
    InputError for too little text, and for a tokenizer without such a token.
    """
    cut = {"length": length, "count": count, "batch_size": batch_size}
    return sequences(texts, tokenizer=tokenizer, name="texts", bos=bos, **cut)


def sequences(
    given: Iterable[Any],
    *,
    tokenizer: Any,
    length: int | None,
    count: int,
    batch_size: int,
    name: str,
    bos: bool = False,
) -> list[Tensor]:
    """Return token ids in batches `[<= batch_size, T]`; `name` is what the caller calls them.

    Tensors `[B, T]` and mappings with such `input_ids` are taken as they are. Rows (`input_ids` of one sequence, as a
    data set has them) are batched. Texts are tokenised, joined with the tokenizer's end of text, and cut into the first
    `count` sequences of `length` tokens, with `bos` the one that begins a text and `length - 1` others. Raises
    InputError for text without a tokenizer or length, or too little of it, and for padded or packed sequences.
    """
    if isinstance(given, str | Tensor | Mapping):
        raise InputError(f"{name} is an iterable of texts or batches, such as a list of one; got one by itself")
    items = list(given)
    if any(isinstance(item, str) for item in items):
        cut = {"length": length, "count": count, "batch_size": batch_size}
        return _of_text(items, tokenizer=tokenizer, name=name, bos=bos, **cut)
    if length is not None:
        raise InputError(f"length is of {name} given as text; these are tokens, {length} would have no effect")
    rows = [_row(item) for item in items]
    if any(row is not None for row in rows):
        if any(row is None for row in rows) or len({len(row) for row in rows if row is not None}) > 1:
            raise InputError(f"sequences of {name} must have one length; cut or pack them to it")
        return list(torch.stack([row for row in rows if row is not None]).split(batch_size))
    return read_batches(items)


def _row(item: Any) -> Tensor | None:
    """Return the tokens of one sequence `[T]`; None for what holds a batch of them.

    Raises InputError where what stands beside them tells of padding or of several documents.
    """
    tokens = item.get("input_ids") if isinstance(item, Mapping) else item
    if isinstance(item, Mapping) and isinstance(tokens, list) and tokens and isinstance(tokens[0], int):
        tokens = torch.tensor(tokens)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        return None
    if isinstance(item, Mapping):
        told = {name: item[name] for name in ("attention_mask", "position_ids") if item.get(name) is not None}
        batch = {"input_ids": tokens[None]} | {name: torch.as_tensor(of)[None] for name, of in told.items()}
        lengths = item.get("seq_lengths")  # of the documents that TRL packed into it
        packed = {"cu_seq_lens_q": item.get("cu_seq_lens_q"), "seq_lengths": None if lengths is None else [lengths]}
        read_batches([batch | packed])
    return tokens.long().cpu()


def _of_text(
    texts: list[Any], *, tokenizer: Any, length: int | None, count: int, batch_size: int, name: str, bos: bool
) -> list[Tensor]:
    """Return the first `count` sequences of `length` tokens of some texts, in batches."""
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} holds texts beside tokens; give one or the other")
    if tokenizer is None:
        raise InputError(
            f"{name} is text: give the model's tokenizer, as tokenizer= or as the Trainer's processing_class"
        )
    if length is None:
        raise InputError(
            f"{name} is text: say with length= into sequences of how many tokens to cut it; with heads frozen the "
            "model takes no longer inputs"
        )
    if bos and (tokenizer.bos_token_id is None or length < 2):
        what = "has no token that begins a text (BOS)" if length > 1 else "is to begin sequences of one token by BOS"
        raise InputError(f"the tokenizer of {name} {what}; leave bos out")
    own = length - bos
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(stream) >= count * own:
            break
    if len(stream) < count * own:
        raise InputError(
            f"{name} has {len(stream)} tokens, {count} sequences of {length} need {count * own}; give more text, or "
            "fewer sequences"
        )
    rows = torch.tensor(stream[: count * own]).view(count, own)
    if bos:
        rows = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), rows], dim=1)
    return list(rows.split(batch_size))
