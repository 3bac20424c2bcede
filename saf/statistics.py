"""`AttentionStatistics` holds the measurements of calibration for every head; scores, targets and fits read it."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError
from saf.heads import HeadSet, head_pairs

# Causal entries of a mean pattern are raised to this before its rows are normalised again, Eq. (S.3), line 11 of the
# paper's Algorithm 1. Without it a key that no query attends to would need a key logit of minus infinity.
FLOOR = 1e-9


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of the attention patterns of `N` calibration sequences of `T` tokens; NaN for frozen heads.

    `eta_*` and `row_entropy` are of the mean pattern, whose entries are raised to `FLOOR` and its rows normalised.
    """

    variance: Tensor  # `[L, H]` attention variance, Eq. (1)
    forward_kl: Tensor  # `[L, H]` row-averaged KL from each sequence's pattern to the mean, in nats, Eq. (2)
    eta_abs: Tensor  # `[L, H, T]` weight of each key position, summed over queries, Eq. (S.4); it sums to T
    eta_rel: Tensor  # `[L, H, T]` weight at each distance from 0, summed over queries, Eq. (S.4); it sums to T
    row_entropy: Tensor  # `[L, H]` row-averaged entropy of the mean pattern, in nats, Eq. (S.4)
    length: int  # T, in tokens
    num_sequences: int  # N
    sequences_hash: str  # SHA-256 of the calibration tokens
    # Tokens of each sequence, longest first, where they are unequal; `length` is the longest. A row's mean and variance
    # are over the sequences that are long enough to have it. Scores average the rows that two or more have.
    lengths: tuple[int, ...] = ()
    # Further tensors by name, see `saf.calibration.COLLECTIONS`, with one entry for each of `collected_heads`.
    collected: Mapping[str, Tensor] = field(default_factory=dict)
    collected_heads: HeadSet = field(default_factory=HeadSet)
    positions: tuple[int, ...] = ()  # query positions of the collected `mean_rows`, `rows` and `logit_rows`

    def __repr__(self) -> str:
        # A dataclass's own would show the numbers of every tensor.
        layers, heads = self.variance.shape
        collected = f", with {', '.join(self.collected)}" if self.collected else ""
        measured = f"{self.num_sequences} sequences of up to {self.length:,} tokens"
        return f"AttentionStatistics({layers} x {heads} heads, {measured}{collected})"

    @property
    def measured(self) -> Tensor:
        """Whether each head was measured, `[L, H]`."""
        return ~self.variance.isnan()

    def take(self, name: str, heads: Iterable[tuple[int, int]]) -> Tensor:
        """Return the tensor collected under `name` for `heads`, in their order, `[F, ...]`.

        Raises InputError where it is missing.
        """
        pairs = head_pairs(heads)
        known = self.collected_heads if name in self.collected else HeadSet()
        if missing := [head for head in pairs if head not in known]:
            call = f"calibrate(model, batches, collect=({name!r},), heads=...)"
            raise InputError(f"these statistics have no {name!r} of heads {missing[:4]}; measure it with {call}")
        return self.collected[name][[self.collected_heads.index(head) for head in pairs]]

    def by_head(self, name: str) -> Tensor:
        """Return the tensor collected under `name` as `[L, H, ...]`, NaN for heads without it."""
        tensor, (layers, heads) = self.collected[name], zip(*self.collected_heads, strict=True)
        whole = tensor.new_full((*self.variance.shape, *tensor.shape[1:]), torch.nan)
        return whole.index_put((torch.tensor(layers), torch.tensor(heads)), tensor)


class LayerStatistics(NamedTuple):
    """Fields of `AttentionStatistics` for the measured heads of one layer: `[heads]` or `[heads, T]`, float64."""

    variance: Tensor
    forward_kl: Tensor
    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor


def required_keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the inputs of a score or target beyond the statistics: its keyword-only arguments without a default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty)
