"""`measure_layer` sums a layer's statistics without a T x T array: by Triton kernels, else strip by strip here.

Either way is exact. A strip is some rows of the patterns of all sequences at once, so that deviations from their mean
are computed directly, never as differences of large sums. A `Collector` reads the same strips for
`calibrate(collect=...)`; a line of `COLLECTIONS` defines each tensor. The kernels (kernels.py) hold no whole row, so
collecting needs strips.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import InputError, check_name
from saf.heads import HeadSet
from saf.ops.backend import TRITON_DTYPES, has_triton
from saf.ops.live import capped, score_scale
from saf.statistics import FLOOR, LayerStatistics

MAX_DIM = 256  # most channels of a head that the kernels take: two steps of 128 fit into registers
ROWS = 128  # rows of a strip: products of that height run near a device's peak, and a strip stays small
STRIP_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}  # entries of a strip's patterns: 64 MB, or 1 GB, of float32
NUM_POSITIONS = 64  # default number of query positions whose rows are collected: neighbouring rows are nearly the same


def measure_layer(
    query: Tensor,
    key: Tensor,
    kv_head: Sequence[int],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    lengths: Sequence[int] | None = None,
    on_strip: Callable[["Strip"], None] | None = None,
    strip_elements: int | None = None,
) -> LayerStatistics:
    """Measure heads from rotated `query [N, heads, T, D]` and `key [N, K, T, D]`; head h reads key `kv_head[h]`.

    Logits are products times `scale`, `D ** -0.5` by default, then within the `soft_cap` c as `c * tanh(logit / c)`.
    Of sequences of unequal `lengths`, longest first and the first one T, a row's mean and variance are over the n(i)
    sequences that reach it. Variance and divergence average the rows that two sequences or more reach; marginals and
    entropy average all rows of the mean pattern.

    `on_strip` reads every strip once and must not change it. `strip_elements`, the most entries of a strip, changes
    results by rounding alone; where it is a number, no kernel runs. Strips are computed in float32
    (float64 for float64 inputs) and summed in float64.
    """
    count, heads, length, dim = query.shape
    spans = spans_of(lengths or [length] * count)
    needs_strips = strip_elements or on_strip or soft_cap or len(spans) > 1  # what the kernels do not know
    if not needs_strips and _kernels_run(query, key):
        from saf.calibration.kernels import measure_by_kernel  # imports Triton, which a CPU may lack

        return measure_by_kernel(query, key, kv_head=kv_head, scale=scale)
    limit = strip_elements or STRIP_ELEMENTS.get(query.device.type, STRIP_ELEMENTS["cpu"])
    rows = max(1, min(ROWS, length, limit // (count * length)))
    group_size = max(1, limit // (count * rows * length))  # heads that share a strip
    dtype, parts = torch.promote_types(query.dtype, torch.float32), []
    with torch.autocast(query.device.type, enabled=False):  # in 16 bits the strips would not be exact
        for first in range(0, heads, group_size):
            group = slice(first, min(first + group_size, heads))
            scaled = query[:, group].to(dtype) * score_scale(scale, dim)
            keys = key[:, list(kv_head[group])].to(dtype)
            parts.append(_measure_heads(scaled, keys, soft_cap, spans, rows, group, on_strip))
    return LayerStatistics(*map(torch.cat, zip(*parts, strict=True)))


def _kernels_run(query: Tensor, key: Tensor) -> bool:
    """Return whether the kernels can measure these queries and keys."""
    if query.device.type != "cuda" or not has_triton() or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return query.dtype in TRITON_DTYPES and key.dtype == query.dtype and query.shape[-1] <= MAX_DIM


def spans_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut the rows of sequences, longest first, where one of them ends; return (start, end, sequences that reach them).

    >>> spans_of([5, 5, 2])
    [(0, 2, 3), (2, 5, 2)]
    """
    ends = sorted(set(lengths))
    return [
        (start, end, sum(length > start for length in lengths))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


# --- one strip after another


class FlooredSums(NamedTuple):
    """Sums over a strip of floored pattern rows F: columns and distances `[heads, W]`, and -F log F `[heads]`."""

    eta_abs: Tensor
    eta_rel: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Strip:
    """R query rows, `start` to `end` of `length`, of some heads, over W = `end` keys, of the N sequences they reach."""

    heads: slice  # indices of the heads among those of the layer that are measured
    start: int
    end: int
    length: int
    causal: Tensor  # `[R, W]`, true on and below the diagonal
    logits: Tensor  # `[N, heads, R, W]`, -inf above the diagonal
    pattern: Tensor  # `[N, heads, R, W]`
    mean: Tensor  # `[heads, R, W]`

    @cached_property
    def sharp(self) -> FlooredSums:
        """Sums of the sharp mean, the softmax of the mean logits, Eq. (16)."""
        return floored_sums(self.logits.mean(0).softmax(-1), self.causal)


def _measure_heads(
    query: Tensor,
    key: Tensor,
    soft_cap: float | None,
    spans: Sequence[tuple[int, int, int]],
    rows: int,
    group: slice,
    on_strip: Callable[[Strip], None] | None,
) -> LayerStatistics:
    """Measure heads that share strips, from scaled queries and keys `[N, heads, T, D]`."""
    _, heads, length, _ = query.shape
    # Rows that two sequences or more reach: T of Eqs. (1) and (2) where lengths are unequal.
    compared_rows = max((end for _, end, count in spans if count > 1), default=length)
    zeros = query.new_zeros(heads, dtype=torch.float64)
    variance, forward_kl, entropy = zeros, zeros, zeros
    eta_abs, eta_rel = (query.new_zeros(heads, length, dtype=torch.float64) for _ in range(2))
    for first, last, count in spans:
        deviation, divergence = zeros, zeros
        for start in range(first, last, rows):
            end = min(start + rows, last)
            causal = torch.ones(end - start, end, dtype=torch.bool, device=query.device).tril(start)
            products = query[:count, :, start:end] @ key[:count, :, :end].mT  # Eq. (5)
            logits = capped(products, soft_cap).masked_fill_(~causal, -torch.inf)
            pattern = logits.softmax(-1)  # Eq. (6)
            mean = pattern.mean(0)  # Eq. (S.2)
            if on_strip is not None:
                on_strip(Strip(group, start, end, length, causal, logits, pattern, mean))
            if count > 1:
                divergence = divergence + _divergence(pattern, mean)
                # In place, so last: the pattern is gone afterwards. A copy would take up to 1 GB.
                deviation = deviation + pattern.sub_(mean).square_().sum((0, 2, 3), dtype=torch.float64)
            sums = floored_sums(mean, causal)
            entropy = entropy + sums.entropy
            eta_abs[:, :end] += sums.eta_abs
            eta_rel[:, :end] += sums.eta_rel
        variance = variance + deviation / (max(count - 1, 1) * compared_rows**2)  # Eq. (1)
        forward_kl = forward_kl + divergence / (count * compared_rows)  # Eq. (2)
    return LayerStatistics(variance, forward_kl, eta_abs, eta_rel, entropy / length)


def _divergence(pattern: Tensor, mean: Tensor) -> Tensor:
    """Sum KL(pattern || mean) over sequences and rows, `[heads]`; exactly 0 for one sequence."""
    tiny = torch.finfo(pattern.dtype).tiny
    # 0 log 0 = 0: a clamped log stays finite.
    log_mean = mean.clamp(min=tiny).log_()
    terms = pattern.clamp(min=tiny).log_().sub_(log_mean).mul_(pattern)
    return terms.sum((0, 2, 3), dtype=torch.float64)


def floored_sums(mean: Tensor, causal: Tensor) -> FlooredSums:
    """Floor causal entries of rows `[heads, R, W]` at 1e-9, normalise the rows again, and sum them."""
    floored = mean.clamp(min=FLOOR).mul_(causal)
    floored = floored.div_(floored.sum(-1, keepdim=True))  # Eq. (S.3)
    entropy = -torch.xlogy(floored, floored).sum((1, 2), dtype=torch.float64)
    return FlooredSums(floored.sum(1, dtype=torch.float64), diagonal_sums(floored), entropy)  # Eq. (S.4)


def diagonal_sums(strip: Tensor) -> Tensor:
    """Sum a strip of pattern rows over equal distances: `[heads, R, W]`, last row at query W-1, to `[heads, W]`.

    Flip both axes, pad each row to W + R, read with a stride of one more: row r moves r to the left.

    >>> diagonal_sums(torch.tensor([[[1, 2, 0], [3, 4, 5]]]))
    tensor([[7., 5., 3.]], dtype=torch.float64)
    """
    heads, rows, width = strip.shape
    padded = pad(strip.flip(1, 2), (0, rows))
    aligned = padded.as_strided((heads, rows, width), (rows * (width + rows), width + rows + 1, 1))
    return aligned.sum(1, dtype=torch.float64)


# --- further tensors, `calibrate(collect=...)`


class Collected(NamedTuple):
    """The shape of a collected tensor, and its value in a strip of query rows.

    Letters of the shape: F heads, N sequences, Q queries, R chosen queries, K keys (or distances). The value has Q or R
    rows of the strip; without either it is summed over strips, in float64.
    """

    shape: str
    value: Callable[[Strip], Tensor]
    above: float = 0.0  # entries above the diagonal

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
"""Names for `calibrate(collect=...)`; scores and targets read the tensors as arguments of the same names.

Means and variances over the sequences (dividing by N - 1) are of each entry of the pattern and of its logits.
`row_variance` sums `entry_variance` over keys. `sharp_*` are the marginals and entropy (nats) of the floored sharp
mean. `mean_rows` are rows of `mean` at chosen query positions, `rows` and `logit_rows` those of every sequence.
"""


def latter_half(length: int, count: int = NUM_POSITIONS) -> tuple[int, ...]:
    """Return at most `count` positions, evenly over the latter half of `length`, with the last one."""
    return tuple(torch.linspace(length // 2, length - 1, count, dtype=torch.float64).round().long().unique().tolist())


class Collector:
    """The tensors of `calibrate(collect=...)` for some heads, on the CPU; the first strip allocates them."""

    def __init__(
        self, collect: Sequence[str], heads: HeadSet, *, sequences: int, length: int, dtype: torch.dtype,
        positions: Sequence[int] | None = None,
    ):  # fmt: skip
        for name in collect:
            check_name("collect", name, COLLECTIONS)
        rows = latter_half(length) if positions is None else tuple(positions)
        if list(rows) != sorted(set(rows)) or not all(0 <= row < length for row in rows):
            raise InputError(f"positions must ascend within [0, {length}); got {rows}")
        self.heads = heads
        self.kinds = {name: COLLECTIONS[name] for name in collect}
        self.positions = rows if any("R" in kind.shape for kind in self.kinds.values()) else ()
        sizes = {"F": len(heads), "N": sequences, "Q": length, "R": len(rows), "K": length}
        wide = torch.promote_types(dtype, torch.float32)  # that of strips
        self._shapes = {
            name: ([sizes[letter] for letter in kind.shape], torch.float64 if kind.is_sum else wide)
            for name, kind in self.kinds.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {
            name: torch.full(shape, self.kinds[name].above, dtype=dtype)
            for name, (shape, dtype) in self._shapes.items()
        }

    def read(self, layer: int, strip: Strip) -> None:
        """Read a strip of a layer."""
        first = self.heads.index((layer, self.heads.in_layer(layer)[0]))  # heads of a layer follow one another
        numbers = [number for number, row in enumerate(self.positions) if strip.start <= row < strip.end]
        rows = [self.positions[number] - strip.start for number in numbers]
        index = {
            "F": slice(first + strip.heads.start, first + strip.heads.stop),
            "N": slice(None),
            "Q": slice(strip.start, strip.end),
            "R": numbers,
            "K": slice(0, strip.end),
        }
        for name, kind in self.kinds.items():
            chosen = "R" in kind.shape
            if chosen and not rows:
                continue
            tensor, at = self.tensors[name], tuple(index[letter] for letter in kind.shape)
            value = kind.value(strip)
            # Checked, as another shape might broadcast: of FQ, one row of numbers would stand for all heads.
            if not chosen and value.shape != (expected := tensor[at].shape):
                raise InputError(
                    f"collect {name!r} must be {kind.shape}, here {[*expected]} of a strip; got {[*value.shape]}"
                )
            value = (value[..., rows, :] if chosen else value).to(tensor)
            tensor[at] = tensor[at] + value if kind.is_sum else value
