"""What `calibrate(collect=...)` keeps beside the statistics, filled strip by strip in the same pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saf.calibration.layer import Strip, Take, diagonal_sums, floor_rows
from saf.errors import InputError
from saf.heads import HeadSet
from saf.statistics import COLLECTIONS

COLLECT_BYTES = 16 << 30
"""Memory that collected tensors may take unless the caller allows more: a request beyond it is more often a mistake."""
NUM_POSITIONS = 64
"""Query positions whose rows are kept where the caller names none: neighbouring rows say nearly the same."""


def collection_bytes(
    collect: Sequence[str],
    *,
    heads: int,
    sequences: int,
    length: int,
    positions: int = NUM_POSITIONS,
    itemsize: int = 4,
) -> int:
    """Return how many bytes `collect` keeps for so many heads, sequences, tokens and query positions.

    Raises InputError for a name that nothing is kept under.
    """
    if unknown := set(collect) - set(COLLECTIONS):
        raise InputError(f"unknown name to collect {sorted(unknown)}; expected some of {sorted(COLLECTIONS)}")
    sizes = {"F": heads, "N": sequences, "T": length, "R": positions}
    total = 0
    for name in collect:
        each = 8 if name.startswith("sharp") else itemsize
        for dimension in COLLECTIONS[name]:
            each *= sizes[dimension]
        total += each
    return total


def latter_half(length: int, count: int = NUM_POSITIONS) -> tuple[int, ...]:
    """Return at most `count` positions spread evenly over the latter half of `length`, the last one included."""
    return tuple(torch.linspace(length // 2, length - 1, count, dtype=torch.float64).round().long().unique().tolist())


class Collection:
    """Hold the tensors asked for, for all heads; `layer` gives the part that the strips of one layer fill."""

    def __init__(
        self,
        collect: Sequence[str],
        heads: HeadSet,
        *,
        sequences: int,
        length: int,
        positions: Sequence[int] | None,
        limit: int,
        dtype: torch.dtype,
    ):
        by_row = any("R" in COLLECTIONS.get(name, "") for name in collect)
        self.positions = _check_positions(latter_half(length) if positions is None else positions, length, by_row)
        sizes = {"F": len(heads), "N": sequences, "T": length, "R": len(self.positions)}
        needed = collection_bytes(
            collect,
            heads=len(heads),
            sequences=sequences,
            length=length,
            positions=len(self.positions),
            itemsize=dtype.itemsize,
        )
        if needed > limit:
            raise InputError(
                f"collecting {', '.join(collect)} of {len(heads)} heads at T = {length} takes {needed / 1e9:.2f} GB, "
                f"collect_limit is {limit / 1e9:.2f} GB; name fewer heads with heads=, or raise collect_limit"
            )
        self._heads = heads
        self.tensors: dict[str, Tensor] = {}
        for name in collect:
            shape = [sizes[dimension] for dimension in COLLECTIONS[name]]
            fill = -torch.inf if name == "logit_rows" else 0.0
            self.tensors[name] = torch.full(shape, fill, dtype=torch.float64 if name.startswith("sharp") else dtype)

    def part(self, layer: int) -> dict[str, Tensor]:
        """Return views of what is kept of a layer's heads, by name."""
        chosen = self._heads.in_layer(layer)
        first = self._heads.index((layer, chosen[0]))
        return {name: tensor[first : first + len(chosen)] for name, tensor in self.tensors.items()}

    def layer(self, layer: int) -> Take | None:
        """Return what takes in a strip of some of the layer's heads; None when nothing was asked for."""
        if not self.tensors:
            return None
        tensors = self.part(layer)

        def take(heads: slice, strip: Strip) -> None:
            """Reduce one strip of probabilities into the results of these heads, each as its kind of result asks."""
            for name, tensor in tensors.items():
                if name in _ENTRIES:
                    _put(tensor[heads], strip, _ENTRIES[name](strip))
                elif name in _ROWS:
                    self._put_rows(tensor[heads], strip, _ROWS[name](strip))
            if sharp := {name: tensor[heads] for name, tensor in tensors.items() if name.startswith("sharp")}:
                _add_sharp(sharp, strip)

        return take

    def _put_rows(self, tensor: Tensor, strip: Strip, values: Tensor) -> None:
        """Write those rows of a strip that were asked for by position."""
        chosen = [(at, row - strip.start) for at, row in enumerate(self.positions) if strip.start <= row < strip.end]
        if chosen:
            at, rows = map(list, zip(*chosen, strict=True))
            tensor[..., at, : strip.end] = values[..., rows, :].to(tensor)


def _check_positions(positions: Sequence[int], length: int, used: bool) -> tuple[int, ...]:
    """Return the query positions; raise InputError unless they ascend within `length`, and () where none is read."""
    positions = tuple(int(position) for position in positions)
    if list(positions) != sorted(set(positions)) or not all(0 <= position < length for position in positions):
        raise InputError(f"positions must ascend within [0, {length}); got {positions}")
    return positions if used else ()


def _variance(values: Tensor, mean: Tensor) -> Tensor:
    """Return the variance over sequences about their mean, dividing by N - 1."""
    return (values - mean).square_().sum(0) / max(len(values) - 1, 1)


def _logits(strip: Strip) -> Tensor:
    """Return the strip's logits with zeros above the diagonal."""
    return strip.logits.masked_fill(~strip.causal, 0)


def _logit_variance(strip: Strip) -> Tensor:
    """Return the variance of the strip's logits over sequences."""
    logits = _logits(strip)
    return _variance(logits, logits.mean(0))


_ENTRIES: dict[str, Callable[[Strip], Tensor]] = {
    "mean": lambda strip: strip.mean,
    "entry_variance": lambda strip: _variance(strip.pattern, strip.mean),
    "row_variance": lambda strip: _variance(strip.pattern, strip.mean).sum(-1),
    "logit_mean": lambda strip: _logits(strip).mean(0),
    "logit_variance": _logit_variance,
}
_ROWS: dict[str, Callable[[Strip], Tensor]] = {
    "mean_rows": lambda strip: strip.mean,
    "rows": lambda strip: strip.pattern.transpose(0, 1),
    "logit_rows": lambda strip: strip.logits.transpose(0, 1),
}


def _put(tensor: Tensor, strip: Strip, values: Tensor) -> None:
    """Write a strip's values into its rows of what is kept: one number a row, or one an entry."""
    if values.ndim == 2:
        tensor[:, strip.start : strip.end] = values.to(tensor)
    else:
        tensor[:, strip.start : strip.end, : strip.end] = values.to(tensor)


def _add_sharp(tensors: dict[str, Tensor], strip: Strip) -> None:
    """Add a strip's share of the marginals and entropy of the floored sharp mean."""
    sharp = strip.logits.mean(0).softmax(-1)
    floored = floor_rows(sharp, strip.causal)
    sums = {
        "sharp_eta_abs": floored.sum(1, dtype=torch.float64),
        "sharp_eta_rel": diagonal_sums(floored),
        "sharp_row_entropy": -torch.xlogy(floored, floored).sum((1, 2), dtype=torch.float64),
    }
    for name, tensor in tensors.items():
        if name == "sharp_row_entropy":
            tensor += sums[name].to(tensor) / strip.length
        else:
            tensor[:, : strip.end] += sums[name].to(tensor)
