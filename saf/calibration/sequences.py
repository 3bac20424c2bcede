"""`read_sequences` reads a user's batches once, into token ids on the CPU and the length of every sequence."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saf.errors import InputError, shown

Batch = Tensor | Mapping[str, Any]
"""Token ids `[B, T]`, or a mapping with `input_ids` and optionally `attention_mask` and `targets`."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Sequences:
    """Sequences on the CPU, longest first. Unlike an iterator of batches, they can be read any number of times."""

    tokens: list[Tensor]  # token ids of each sequence, LongTensor `[T]`
    sizes: list[int]  # number of sequences in each batch, which takes the next ones of `tokens`
    targets: list[Tensor] | None = None
    """The tokens to predict, `[T]` for each sequence, -100 where there is none; by default every next token."""

    @cached_property
    def ids(self) -> list[Tensor]:
        """Batches `[B, T]`; zeros follow shorter sequences, and causal attention keeps them out of every result."""
        rows = iter(self.tokens)
        return [pad_sequence([next(rows) for _ in range(size)], batch_first=True) for size in self.sizes]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(map(len, self.tokens))

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.tokens[0])

    @property
    def unequal_lengths(self) -> tuple[int, ...]:
        """The lengths where they differ; empty where all are the same."""
        return self.lengths if len(self.tokens[-1]) < self.length else ()

    @property
    def num_distinct(self) -> int:
        """Number of sequences that are no prefix of another."""
        # Attention is causal, so a prefix repeats rows of the longer sequence and adds nothing to a variance.
        distinct: list[Tensor] = []
        for row in self.tokens:
            if not any(torch.equal(row, longer[: len(row)]) for longer in distinct):
                distinct.append(row)
        return len(distinct)

    @property
    def hash(self) -> str:
        """SHA-256 of the tokens, and of the lengths where they differ; else reports have their number and length."""
        lengths = [torch.tensor(self.lengths)] if self.unequal_lengths else []
        return hashlib.sha256(torch.cat([*lengths, *self.tokens]).contiguous().numpy().tobytes()).hexdigest()

    def __str__(self) -> str:
        shortest = f"{self.lengths[-1]:,} to " if self.unequal_lengths else ""
        return f"{len(self.tokens)} sequences of {shortest}{self.length:,} tokens"

    def rows(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the tokens of each sequence, and its targets."""
        return zip(self.tokens, self.targets or [None] * len(self.tokens), strict=True)

    def __iter__(self) -> Iterator[Batch]:
        for row, targets in self.rows():
            yield {"input_ids": row[None]} | ({} if targets is None else {"targets": targets[None]})


def read_sequences(batches: Iterable[Batch]) -> Sequences:
    """Read all batches; sequences of unequal lengths are sorted, longest first.

    Raises InputError for no sequences, ids that are no integers `[B, T]`, a mask of another shape or with padding
    anywhere but on the right, a sequence without a token, packed documents, and targets of another shape or in only
    some batches.
    """
    if isinstance(batches, Sequences):
        return batches
    if isinstance(batches, Tensor | Mapping):
        raise InputError(f"batches is an iterable of batches, such as a list of one; got a bare {shown(batches)}")
    read = [_read_batch(batch) for batch in batches]
    # Sorting is stable, so that sequences of one length stay in order, and targets go with their tokens. Longest first,
    # the sequences that reach a row are always the first ones (`spans_of`).
    tokens = sorted((row for rows, _ in read for row in rows), key=len, reverse=True)
    targets = sorted((row for _, rows in read for row in rows), key=len, reverse=True)
    if not tokens:
        raise InputError("calibration needs at least one sequence, got none; an iterator is read once: pass a list")
    if not len(tokens[-1]):
        raise InputError("calibration sequences need at least one token; got none")
    if targets and len(targets) < len(tokens):
        raise InputError("targets must be in every batch or in none")
    return Sequences(tokens, [len(rows) for rows, _ in read if rows], targets or None)


def read_batches(batches: Iterable[Batch]) -> list[Tensor]:
    """Read batches `[B, T]` of sequences of one length; raise InputError where lengths differ."""
    sequences = read_sequences(batches)
    if sequences.unequal_lengths:
        raise InputError(f"sequences must have one length here; got {sequences.lengths[-1]} to {sequences.length}")
    return sequences.ids


def _read_batch(batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tokens of a batch's sequences without their padding, and their targets if there are any."""
    # A DataLoader over a TensorDataset yields lists of one tensor.
    item: Any = batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch
    fields: Mapping[str, Any] = item if isinstance(item, Mapping) else {"input_ids": item}
    tokens, targets = fields.get("input_ids"), fields.get("targets")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in _INTEGERS:
        found = shown(tokens) if "input_ids" in fields else f"the keys {list(fields)}"
        raise InputError(
            f"batches must be integer tensors [B, T] or mappings with such input_ids, got {found}; "
            "saf.integrations.transformers.text_sequences reads text"
        )
    ends = _ends(fields.get("attention_mask"), tokens)
    _check_not_packed(fields, ends)
    if targets is None:
        return _cut(tokens, ends), []
    if not isinstance(targets, Tensor) or targets.shape != tokens.shape or targets.dtype not in _INTEGERS:
        raise InputError(f"targets must be integers like input_ids, {shown(tokens)}; got {shown(targets)}")
    return _cut(tokens, ends), _cut(targets, ends)


def _cut(rows: Tensor, ends: list[int]) -> list[Tensor]:
    return [row[:end] for row, end in zip(rows.long().cpu(), ends, strict=True)]


def _ends(mask: Any, tokens: Tensor) -> list[int]:
    """Return how many tokens of each row are no padding; raise InputError unless all padding is on the right."""
    if mask is None:
        return [tokens.shape[1]] * len(tokens)
    mask = torch.as_tensor(mask).cpu().bool()
    if mask.shape != tokens.shape:
        raise InputError(f"attention_mask must have the shape of input_ids, {list(tokens.shape)}; got {shown(mask)}")
    ends = mask.sum(1)
    if not torch.equal(mask, torch.arange(mask.shape[1]) < ends[:, None]):
        raise InputError("padding of calibration sequences must follow their tokens; pad on the right")
    return ends.tolist()


def _check_not_packed(fields: Mapping[str, Any], ends: list[int]) -> None:
    """Raise InputError for rows with several documents: the batch has their boundaries, or positions that restart."""
    # As transformers' DataCollatorWithFlattening and TRL's packing name them.
    packed = bool({"cu_seq_lens_q", "seq_lengths"} & fields.keys())
    if (positions := fields.get("position_ids")) is not None:
        rows = torch.as_tensor(positions).cpu().expand(len(ends), -1)
        packed |= any(not torch.equal(row[:end].long(), torch.arange(end)) for row, end in zip(rows, ends, strict=True))
    if packed:
        raise InputError(
            "rows must be one document each, got several in a row (by position_ids, cu_seq_lens_q or seq_lengths); "
            "pad each document to a row of its own"
        )
