"""A `Collection` holds the tensors of `calibrate(collect=...)`, filled strip by strip in the pass of the statistics."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saf.calibration.strips import Strip, Take
from saf.errors import InputError
from saf.heads import HeadSet
from saf.statistics import COLLECTIONS

NUM_POSITIONS = 64
"""Query positions whose rows are kept by default: neighbouring rows are nearly the same."""


def collection_bytes(
    collect: Sequence[str],
    *,
    heads: int,
    sequences: int,
    length: int,
    positions: int = NUM_POSITIONS,
    itemsize: int = 4,
) -> int:
    """Bytes that `collect` keeps; raises InputError for an unknown name."""
    if unknown := set(collect) - set(COLLECTIONS):
        raise InputError(f"unknown name to collect {sorted(unknown)}; expected some of {sorted(COLLECTIONS)}")
    sizes = {"F": heads, "N": sequences, "T": length, "R": positions}
    entries = {name: math.prod(sizes[dimension] for dimension in COLLECTIONS[name]) for name in collect}
    return sum(count * (8 if name.startswith("sharp") else itemsize) for name, count in entries.items())


def latter_half(length: int, count: int = NUM_POSITIONS) -> tuple[int, ...]:
    """At most `count` positions spread evenly over the latter half of `length`, the last one included."""
    return tuple(torch.linspace(length // 2, length - 1, count, dtype=torch.float64).round().long().unique().tolist())


class Collection:
    """Tensors that `collect` names, for all heads; `of_layer` fills those of one layer."""

    def __init__(
        self,
        collect: Sequence[str],
        heads: HeadSet,
        *,
        sequences: int,
        length: int,
        positions: Sequence[int] | None,
        dtype: torch.dtype,
    ):
        rows = latter_half(length) if positions is None else tuple(positions)
        if list(rows) != sorted(set(rows)) or not all(0 <= row < length for row in rows):
            raise InputError(f"positions must ascend within [0, {length}); got {rows}")
        self.positions = rows if any("R" in COLLECTIONS[name] for name in collect) else ()
        self._heads = heads
        sizes = {"F": len(heads), "N": sequences, "T": length, "R": len(rows)}
        self.tensors = {
            name: torch.full(
                [sizes[dimension] for dimension in COLLECTIONS[name]],
                -torch.inf if name == "logit_rows" else 0.0,
                dtype=torch.float64 if name.startswith("sharp") else dtype,
            )
            for name in collect
        }

    def of_layer(self, layer: int) -> Take | None:
        """Return a function that takes in the strips of a layer; None when there is nothing to collect."""
        if not self.tensors:
            return None
        chosen = self._heads.in_layer(layer)
        first = self._heads.index((layer, chosen[0]))
        tensors = {name: tensor[first : first + len(chosen)] for name, tensor in self.tensors.items()}

        def take(strip: Strip) -> None:
            heads, rows, keys = strip.heads, slice(strip.start, strip.end), slice(0, strip.end)
            at = [number for number, row in enumerate(self.positions) if strip.start <= row < strip.end]
            picked = [self.positions[number] - strip.start for number in at]
            for name, tensor in tensors.items():
                values, shape = _VALUES[name](strip), COLLECTIONS[name]
                if name == "sharp_row_entropy":
                    tensor[heads] += values.to(tensor) / strip.length
                elif name.startswith("sharp"):
                    tensor[heads, keys] += values.to(tensor)
                elif "R" in shape:
                    if at:
                        tensor[heads][..., at, keys] = values[..., picked, :].to(tensor)
                elif shape == "FT":
                    tensor[heads, rows] = values.to(tensor)
                else:
                    tensor[heads, rows, keys] = values.to(tensor)

        return take


def _variance(values: Tensor, mean: Tensor) -> Tensor:
    """Variance over sequences about their mean, dividing by N - 1."""
    return (values - mean).square_().sum(0) / max(len(values) - 1, 1)


def _logits(strip: Strip) -> Tensor:
    """Logits with zeros above the diagonal."""
    return strip.logits.masked_fill(~strip.causal, 0)


def _logit_variance(strip: Strip) -> Tensor:
    logits = _logits(strip)
    return _variance(logits, logits.mean(0))


_VALUES: dict[str, Callable[[Strip], Tensor]] = {
    "mean": lambda strip: strip.mean,
    "entry_variance": lambda strip: _variance(strip.pattern, strip.mean),
    "row_variance": lambda strip: _variance(strip.pattern, strip.mean).sum(-1),
    "logit_mean": lambda strip: _logits(strip).mean(0),
    "logit_variance": _logit_variance,
    "sharp_eta_abs": lambda strip: strip.sharp.eta_abs,
    "sharp_eta_rel": lambda strip: strip.sharp.eta_rel,
    "sharp_row_entropy": lambda strip: strip.sharp.entropy,
    "mean_rows": lambda strip: strip.mean,
    "rows": lambda strip: strip.pattern.transpose(0, 1),
    "logit_rows": lambda strip: strip.logits.transpose(0, 1),
}
"""Values of each name of `COLLECTIONS` in a strip: of its rows, or what its rows add to sums."""
