"""A `Collection` keeps further tensors of `calibrate(collect=...)`; a line of `COLLECTIONS` defines each of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saf.calibration.measure import Strip
from saf.errors import InputError, check_name
from saf.heads import HeadSet

NUM_POSITIONS = 64
"""Default number of query positions whose rows are collected: neighbouring rows are nearly the same."""


class Collected(NamedTuple):
    """The shape of a collected tensor, and its value in a strip of query rows.

    Letters of the shape: F heads, N sequences, Q queries, R chosen queries, K keys (or distances). The value has Q or R
    rows of the strip; without either it is summed over strips, in float64.
    """

    shape: str
    value: Callable[[Strip], Tensor]
    beyond: float = 0.0
    """Entries above the diagonal."""

    @property
    def is_sum(self) -> bool:
        """Whether values are summed over the query rows."""
        return not {"Q", "R"} & set(self.shape)


def _variance(values: Tensor, mean: Tensor) -> Tensor:
    """Return the variance over sequences about their mean, dividing by N - 1, Eq. (S.2)."""
    return (values - mean).square_().sum(0) / max(len(values) - 1, 1)


def _logits(strip: Strip) -> Tensor:
    return strip.logits.masked_fill(~strip.causal, 0)


COLLECTIONS: dict[str, Collected] = {
    "mean": Collected("FQK", lambda strip: strip.mean),
    "entry_variance": Collected("FQK", lambda strip: _variance(strip.pattern, strip.mean)),
    "logit_mean": Collected("FQK", lambda strip: _logits(strip).mean(0)),
    "logit_variance": Collected("FQK", lambda strip: _variance(_logits(strip), _logits(strip).mean(0))),
    "row_variance": Collected("FQ", lambda strip: _variance(strip.pattern, strip.mean).sum(-1)),
    "sharp_eta_abs": Collected("FK", lambda strip: strip.sharp.eta_abs),
    "sharp_eta_rel": Collected("FK", lambda strip: strip.sharp.eta_rel),
    "sharp_row_entropy": Collected("F", lambda strip: strip.sharp.entropy / strip.length),
    "mean_rows": Collected("FRK", lambda strip: strip.mean),
    "rows": Collected("FNRK", lambda strip: strip.pattern.transpose(0, 1)),
    "logit_rows": Collected("FNRK", lambda strip: strip.logits.transpose(0, 1), -torch.inf),
}
"""Names for `calibrate(collect=...)`; scores read them as arguments of the same names.

Means and variances over the sequences (dividing by N - 1) are of each entry of the pattern and of its logits.
`row_variance` sums `entry_variance` over keys. `sharp_*` are the marginals and entropy (nats) of the floored sharp
mean. `mean_rows` are rows of `mean` at chosen query positions, `rows` and `logit_rows` those of every sequence.
"""


def latter_half(length: int, count: int = NUM_POSITIONS) -> tuple[int, ...]:
    """Return at most `count` positions, evenly over the latter half of `length`, with the last one."""
    return tuple(torch.linspace(length // 2, length - 1, count, dtype=torch.float64).round().long().unique().tolist())


class Collection:
    """The tensors of `calibrate(collect=...)`, filled strip by strip by `take`; on "meta" they take no memory."""

    def __init__(
        self,
        collect: Sequence[str],
        heads: HeadSet,
        *,
        sequences: int,
        length: int,
        dtype: torch.dtype,
        positions: Sequence[int] | None = None,
        device: str = "cpu",
    ):
        for name in collect:
            check_name("collect", name, COLLECTIONS)
        rows = latter_half(length) if positions is None else tuple(positions)
        if list(rows) != sorted(set(rows)) or not all(0 <= row < length for row in rows):
            raise InputError(f"positions must ascend within [0, {length}); got {rows}")
        kinds, sizes = {name: COLLECTIONS[name] for name in collect}, {"F": len(heads), "N": sequences, "R": len(rows)}
        self.positions = rows if any("R" in kind.shape for kind in kinds.values()) else ()
        self._heads = heads
        self.tensors = {
            name: torch.full(
                [sizes.get(letter, length) for letter in kind.shape],
                kind.beyond,
                dtype=torch.float64 if kind.is_sum else dtype,
                device=device,
            )
            for name, kind in kinds.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, layer: int, strip: Strip) -> None:
        """Read a strip of a layer."""
        chosen = self._heads.in_layer(layer)
        first = self._heads.index((layer, chosen[0]))
        rows, keys = slice(strip.start, strip.end), slice(0, strip.end)
        at = [number for number, row in enumerate(self.positions) if strip.start <= row < strip.end]
        picked = [self.positions[number] - strip.start for number in at]
        for name, whole in self.tensors.items():
            kind, tensor = COLLECTIONS[name], whole[first : first + len(chosen)][strip.heads]
            if kind.is_sum:
                place = (slice(None), keys)[: len(kind.shape)]
                tensor[place] += kind.value(strip).to(tensor)
            elif "Q" in kind.shape:
                place = (slice(None), rows, keys)[: len(kind.shape)]
                tensor[place] = kind.value(strip).to(tensor)
            elif at:
                tensor[..., at, keys] = kind.value(strip)[..., picked, :].to(tensor)
