"""One layer's statistics from its queries and keys: by the Triton kernels where they run, else strip by strip here.

A strip is some rows of the patterns of all sequences: strips outside, all sequences inside. The kernels
(`saf.calibration.tiles`) take square tiles instead and keep no pattern, so what collects entries needs strips.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.live import capped, score_scale
from saf.ops.operator import TRITON_DTYPES, has_triton
from saf.statistics import FLOOR

BACKENDS = ("auto", "strips", "triton")
MAX_DIM = 256
"""Channels of a head that the kernels take: two steps of 128, more would not fit into registers."""
ROWS = 128
"""Rows of a strip: products of that height run near a device's peak, and a strip stays small."""
STRIP_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Entries of patterns that a strip holds: 64 MB of float32 on a CPU, 1 GB on a GPU."""


class LayerStatistics(NamedTuple):
    """Hold the fields of `AttentionStatistics` for the live heads of one layer: `[heads]` or `[heads, T]`, float64."""

    variance: Tensor
    forward_kl: Tensor
    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor


class Strip(NamedTuple):
    """Hold query rows `start` to `end` of some heads, keys 0 to `end`: R rows, W = end keys, of `length` in all.

    N sequences reach these rows: of unequal lengths the longest ones.
    """

    start: int
    end: int
    length: int
    causal: Tensor
    """`[R, W]` which entries are on or below the diagonal."""
    logits: Tensor
    """`[N, heads, R, W]`, -inf above the diagonal."""
    pattern: Tensor
    """`[N, heads, R, W]`."""
    mean: Tensor
    """`[heads, R, W]`."""


Take = Callable[[slice, Strip], None]
"""Called with the place of some heads among those measured, and their strip, which it must leave as it is."""


def measure_layer(
    query: Tensor,
    key: Tensor,
    *,
    kv_head: Sequence[int],
    scale: float | None = None,
    soft_cap: float | None = None,
    rows: int = ROWS,
    strip_elements: int | None = None,
    take: Take | None = None,
    backend: str = "auto",
    lengths: Sequence[int] | None = None,
) -> LayerStatistics:
    """Measure heads from rotated `query [N, heads, T, D]` and `key [N, K, T, D]`; head h reads key `kv_head[h]`.

    Logits are products times `scale`, `D ** -0.5` by default, then within the `soft_cap` c as `c * tanh(logit / c)`.

    A strip of `rows` query rows holds the patterns of all N sequences, so deviations from the mean are taken
    directly: no difference of large sums. Strips are computed in float32 (float64 for float64 inputs), summed in
    float64. Results do not depend on `rows` or `strip_elements` beyond rounding. `take` sees every strip once.
    Where the Triton kernels can run, `backend="auto"` takes them instead, "strips" does not, and "triton" raises
    UnsupportedError where they cannot: they hold no strip for `take`, and know no soft cap.

    Of sequences of unequal `lengths`, longest first and the first one T, a row's mean and variance are over the n(i)
    sequences that reach it; what stands behind a sequence never enters. Variance and divergence average the rows that
    two sequences or more reach (`compared_rows`), marginals and entropy all rows of the mean pattern alike.
    """
    if _uses_kernels(query, key, backend, strips_wanted=take is not None, soft_cap=soft_cap):
        from saf.calibration.tiles import measure_by_kernel

        return measure_by_kernel(query, key, kv_head=kv_head, scale=scale, lengths=lengths)
    count, heads, length, dim = query.shape
    factor = score_scale(scale, dim)
    limit = strip_limit(query.device) if strip_elements is None else strip_elements
    rows, together = _cut(count, length, rows, limit)
    parts, spans = [], spans_of(lengths or [length] * count)
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, heads, together):
            at = slice(first, min(first + together, heads))
            parts.append(_measure(query[:, at], key[:, list(kv_head[at])], factor, soft_cap, rows, at, take, spans))
    return LayerStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _uses_kernels(query: Tensor, key: Tensor, backend: str, *, strips_wanted: bool, soft_cap: float | None) -> bool:
    """Return whether the Triton kernels measure these queries and keys; "auto" says yes wherever they can.

    Raises:
        InputError: An unknown backend.
        UnsupportedError: "triton" where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "strips":
        return False
    dtypes = query.dtype, key.dtype
    reason = obstacle(query.device, dtypes, query.shape[-1], strips_wanted=strips_wanted, soft_cap=soft_cap)
    if reason and backend == "triton":
        raise UnsupportedError(f"the calibration kernels cannot measure this layer: {reason}; use backend='strips'")
    return not reason


def obstacle(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    dim: int,
    *,
    strips_wanted: bool,
    soft_cap: float | None = None,
) -> str:
    """Return why the kernels cannot measure queries and keys of these dtypes with `dim` channels, or nothing."""
    if device.type != "cuda" or not has_triton():
        return f"they need CUDA tensors and Triton, the queries are on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 or later"
    if dtypes[0] not in TRITON_DTYPES or len(set(dtypes)) > 1:
        return f"queries and keys must be both bfloat16, float16 or float32, got {' and '.join(map(str, dtypes))}"
    if dim > MAX_DIM:
        return f"they take at most {MAX_DIM} channels a head, got {dim}"
    if soft_cap is not None:
        return f"they know no soft cap of logits, got {soft_cap:g}"
    return "whole rows are to be collected, and they hold none" if strips_wanted else ""


def strip_limit(device: torch.device) -> int:
    """Return how many entries of patterns a strip may hold on a device."""
    return STRIP_ELEMENTS.get(device.type, STRIP_ELEMENTS["cpu"])


def strip_bytes(count: int, heads: int, length: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> int:
    """Return about how much memory the strips of `heads` heads take: five arrays of a strip, and wide operands."""
    wide = 8 if dtype == torch.float64 else 4
    rows, together = _cut(count, length, ROWS, strip_limit(device))
    together = min(together, max(heads, 1))
    return wide * count * together * length * (5 * rows + 2 * dim)


def _cut(count: int, length: int, rows: int, limit: int) -> tuple[int, int]:
    """Return the rows of a strip and how many heads share one, so that it has at most `limit` entries if it can."""
    rows = max(1, min(rows, length, limit // (count * length)))
    return rows, max(1, limit // (count * rows * length))


class Span(NamedTuple):
    """Hold rows `start` to `end` that the same `count` sequences reach."""

    start: int
    end: int
    count: int


def spans_of(lengths: Sequence[int]) -> list[Span]:
    """Return the rows of sequences, longest first, cut where one of them ends.

    >>> spans_of([5, 5, 2])
    [Span(start=0, end=2, count=3), Span(start=2, end=5, count=2)]
    """
    ends = sorted(set(lengths))
    starts = [0, *ends[:-1]]
    return [
        Span(start, end, sum(length > start for length in lengths)) for start, end in zip(starts, ends, strict=True)
    ]


def compared_rows(lengths: Sequence[int]) -> int:
    """Return how many rows two sequences or more reach, longest first; all rows of a single sequence."""
    return lengths[min(1, len(lengths) - 1)]


def _measure(
    query: Tensor,
    key: Tensor,
    scale: float,
    soft_cap: float | None,
    rows: int,
    at: slice,
    take: Take | None,
    spans: Sequence[Span],
) -> LayerStatistics:
    """Measure heads that share strips, `[N, heads, T, D]` each, strip by strip, none across the end of a sequence."""
    _, heads, length, _ = query.shape
    compared = max((span.end for span in spans if span.count > 1), default=length)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = query.to(wide) * scale, key.to(wide)
    zeros = query.new_zeros(heads, dtype=torch.float64)
    variance, forward_kl, entropy = zeros, zeros, zeros
    eta_abs, eta_rel = (query.new_zeros(heads, length, dtype=torch.float64) for _ in range(2))
    for first, last, count in spans:
        deviation, divergence = zeros, zeros
        for start in range(first, last, rows):
            end = min(start + rows, last)
            causal = torch.ones(end - start, end, dtype=torch.bool, device=query.device).tril(start)
            products = query[:count, :, start:end] @ key[:count, :, :end].mT
            logits = capped(products, soft_cap).masked_fill_(~causal, -torch.inf)
            pattern = logits.softmax(-1)
            mean = pattern.mean(0)
            if take is not None:
                take(at, Strip(start, end, length, causal, logits, pattern, mean))
            if count > 1:
                divergence = divergence + _divergence(pattern, mean)
                deviation = deviation + pattern.sub_(mean).square_().sum((0, 2, 3), dtype=torch.float64)
            floored = floor_rows(mean, causal)
            entropy = entropy - torch.xlogy(floored, floored).sum((1, 2), dtype=torch.float64)
            eta_abs[:, :end] += floored.sum(1, dtype=torch.float64)
            eta_rel[:, :end] += diagonal_sums(floored)
        variance = variance + deviation / (max(count - 1, 1) * compared**2)  # Eq. (1)
        forward_kl = forward_kl + divergence / (count * compared)  # Eq. (2)
    return LayerStatistics(
        variance=variance,
        forward_kl=forward_kl,
        eta_abs=eta_abs,
        eta_rel=eta_rel,
        row_entropy=entropy / length,
    )


def floor_rows(mean: Tensor, causal: Tensor) -> Tensor:
    """Return pattern rows `[heads, R, W]` with causal entries floored at 1e-9 and the rows normalised again."""
    floored = mean.clamp(min=FLOOR).mul_(causal)
    return floored.div_(floored.sum(-1, keepdim=True))


def _divergence(pattern: Tensor, mean: Tensor) -> Tensor:
    """Return the sum over sequences and rows of KL(pattern || mean), `[heads]`; exactly 0 for one sequence."""
    tiny = torch.finfo(pattern.dtype).tiny
    log_mean = mean.clamp(min=tiny).log_()
    terms = pattern.clamp(min=tiny).log_().sub_(log_mean).mul_(pattern)
    return terms.sum((0, 2, 3), dtype=torch.float64)


def diagonal_sums(strip: Tensor) -> Tensor:
    """Sum a strip of pattern rows over equal distances: `[heads, R, W]`, last row at query W-1, to `[heads, W]`.

    Reversed rows are laid into a buffer one column wider than a shift per row needs, so that equal distances line
    up in a strided view.
    """
    heads, rows, width = strip.shape
    padded = torch.nn.functional.pad(strip.flip(1, 2), (0, rows))
    aligned = padded.as_strided((heads, rows, width), (rows * (width + rows), width + rows + 1, 1))
    return aligned.sum(1, dtype=torch.float64)
