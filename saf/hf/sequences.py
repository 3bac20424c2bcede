"""Calibration sequences from token tensors, rows of a data set, or text."""

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

    Texts are tokenised without BOS, joined with the tokenizer's end of text, and cut into the first `count` sequences;
    with `bos` each sequence begins with the tokenizer's BOS. Raises InputError for too little text.
    """
    return _of_text(list(texts), tokenizer, length=length, count=count, batch_size=batch_size, name="texts", bos=bos)


def sequences(
    source: Iterable[Any], *, tokenizer: Any, length: int | None, count: int, batch_size: int, name: str
) -> list[Tensor]:
    """Return token ids in batches `[<= batch_size, T]`; errors call them `name`.

    Tensors `[B, T]` and mappings with such `input_ids` stay as they are. Rows of a data set (`input_ids` of one
    sequence) are batched. Texts are cut as by `text_sequences`. Raises InputError for text without a tokenizer or
    length, or too little of it, and for padded or packed sequences.
    """
    if isinstance(source, str | Tensor | Mapping):
        raise InputError(f"{name} must be an iterable of texts or batches, such as a list of one")
    items = list(source)
    if any(isinstance(item, str) for item in items):
        return _of_text(items, tokenizer, length=length, count=count, batch_size=batch_size, name=name)
    if length is not None:
        raise InputError(f"length is for {name} of text; these are tokens")
    rows = [_row(item) for item in items]
    if not any(row is not None for row in rows):
        return read_batches(items)
    if any(row is None for row in rows) or len({len(row) for row in rows if row is not None}) > 1:
        raise InputError(f"sequences of {name} must have one length; cut or pack them to it")
    return list(torch.stack([row for row in rows if row is not None]).split(batch_size))


def _row(item: Any) -> Tensor | None:
    """Return the tokens of one sequence `[T]`, without padding; None for a batch. Raises InputError for packed rows."""
    tokens = item.get("input_ids") if isinstance(item, Mapping) else item
    if isinstance(item, Mapping) and isinstance(tokens, list) and tokens and isinstance(tokens[0], int):
        tokens = torch.tensor(tokens)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        return None
    if isinstance(item, Mapping):
        marks = {name: item[name] for name in ("attention_mask", "position_ids") if item.get(name) is not None}
        lengths = item.get("seq_lengths")  # of the documents that TRL packed into it
        packed = {"cu_seq_lens_q": item.get("cu_seq_lens_q"), "seq_lengths": None if lengths is None else [lengths]}
        row = {"input_ids": tokens[None], **{name: torch.as_tensor(of)[None] for name, of in marks.items()}, **packed}
        return read_batches([row])[0][0]
    return tokens.long().cpu()


def _of_text(
    texts: list[Any],
    tokenizer: Any,
    *,
    length: int | None,
    count: int,
    batch_size: int,
    name: str,
    bos: bool = False,
) -> list[Tensor]:
    """Return the first `count` sequences of `length` tokens of some texts, in batches."""
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} must be texts, or tokens, not both")
    if tokenizer is None or length is None:
        raise InputError(f"{name} of text need the model's tokenizer and length=, the tokens of a sequence")
    if bos and (tokenizer.bos_token_id is None or length < 2):
        raise InputError(f"bos needs a tokenizer with a BOS token and length 2 at least; leave it out for {name}")
    own = length - bos
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(stream) >= count * own:
            break
    if len(stream) < count * own:
        raise InputError(f"{name} must have {count * own} tokens for {count} sequences of {length}, got {len(stream)}")
    rows = torch.tensor(stream[: count * own]).view(count, own)
    if bos:
        rows = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), rows], dim=1)
    return list(rows.split(batch_size))
