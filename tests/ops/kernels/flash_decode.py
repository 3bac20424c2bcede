"""Cases of the flash-decoding launch of live and frozen heads; `run` compares with float64."""

from dataclasses import dataclass

import torch

from saf.ops.flash_decode_kernels import merge as MERGE

LIMITS = {"float32": 1e-6, "float16": 1.5e-3, "bfloat16": 8e-3}
"""Relative L2 errors, of live heads (softmax weights rounded to the dtype) and of frozen ones."""
BATCH, LENGTH = 3, 300


@dataclass(frozen=True)
class Case:
    """A pass of `rows` queries that ends at position `end`."""

    slots: tuple[int, ...] = (0, 3)
    """The value head of each live slot."""
    heads: tuple[int, ...] = (1, 2)
    """The value head of each frozen slot."""
    rows: int = 1
    end: int = 260
    dim: int = 16
    dtype: str = "float32"
    fixed: bool = True
    """Whether the cache has a fixed size, so that only the device knows where queries stand."""
    pads: tuple[int, ...] | None = None
    part_keys: int = 128
    """Keys of a part at least."""


CASES: dict[str, Case | int] = {
    "many parts": 70,
    "a row in 16 bits": Case(dtype="float16"),
    "the first row": Case(end=1),
    "a growing cache": Case(end=300, fixed=False),
    "one part": Case(part_keys=512),
    "no frozen head": Case(slots=(0, 1, 2, 3), heads=()),
    "no live head, groups": Case(slots=(), heads=(1, 0, 1, 2, 1), rows=7, dim=24, pads=(0, 1, 200)),
    "no live head, growing": Case(slots=(), heads=(0, 1), rows=2, end=300, fixed=False),
    "even groups": Case(slots=(0, 0, 1, 1), heads=(2, 3, 2), rows=3, dim=8),
    "padded, growing": Case(end=300, fixed=False, pads=(0, 130, 299), rows=2),
    "many channels": Case(dtype="float16", dim=136),
    "uneven groups": Case(slots=(1, 1, 1, 3), heads=(0, 1, 2, 3), rows=5, pads=(0, 258, 7)),
}


def run(case: Case | int, device: str) -> list[str]:
    """Return which limits break: errors, one launch of several parts, finite outputs laid out for the projection."""
    if isinstance(case, int):
        return _merged(case, device)
    from saf.ops import FrozenHeads, frozen_attention, mixed_attention
    from saf.ops import flash_decode as op
    from saf.ops import flash_decode_kernels as kernels
    from saf.ops.tensors import CachePosition, cached_order
    from saf.synthetic import synthetic_patterns

    kernels.PART_KEYS, op.uses_triton = case.part_keys, lambda device, dtype: True
    op.DTYPES = (torch.float32, torch.float16)  # of so few channels float32 fits
    parts: list[int] = []
    kernels.merge = lambda sums, *rest: parts.append(len(sums)) or MERGE(sums, *rest)
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    every, count = (*case.slots, *case.heads), len(case.heads)
    pattern, frozen = synthetic_patterns(max(1, count), 320, generator), None
    if count:
        frozen = FrozenHeads.from_patterns(pattern, dtype=dtype, device=device, kv_head=every)
        maps = op.decode_maps(every, count, torch.device(device))  # elsewhere than on a GPU no pass reads them
        frozen._add_tables(dtype, "toeplitz", {**frozen.tables(dtype), **maps})
    keys, pads = sorted(set(case.slots)), case.pads or (0, 0, 0)

    def drawn(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(BATCH, rows, heads, case.dim, generator=generator).to(device, dtype).transpose(1, 2)

    query, key, value = drawn(len(case.slots), case.rows), drawn(len(keys), LENGTH), drawn(4, LENGTH)
    key[:, :, case.end :], value[:, :, case.end :] = 1e4, 1e4  # behind the last row there may be anything finite
    first = case.end - case.rows
    # Padding may be a column of something: kernels read one after another.
    left_pad = None if case.pads is None else torch.tensor(case.pads, device=device).repeat_interleave(2)[::2]
    own, options = value, {"left_pad": left_pad}
    if case.fixed:
        own = value[:, list(cached_order(every, count))]
        options = {"cache_position": CachePosition.of(torch.tensor(first, device=device), case.rows, LENGTH, left_pad)}
    if not count:
        own = value[:, : len(keys)]
    with torch.no_grad():
        if case.slots:
            actual = mixed_attention(query, key, own, frozen, kernel="flash_decode", **options)
        else:
            actual = frozen_attention(own, frozen, rows=case.rows, **options)
    expected = _by_hand(case, query, key, value, None if frozen is None else pattern.dense().double(), first, pads)
    real = torch.tensor([[first + row >= pad for row in range(case.rows)] for pad in pads], device=device)
    mask = real[:, None, :, None]
    checks = {
        f"launches of {parts} parts": len(parts) == 1 and (parts[0] == 1) == (case.part_keys > LENGTH),
        "not finite": bool(actual.isfinite().all()),
        "not stored as [B, T, H, D]": actual.transpose(1, 2).is_contiguous(),
    }
    for name, part in {"live": slice(len(case.slots)), "frozen": slice(len(case.slots), None)}.items():
        exact = expected[:, part] * mask
        if exact.numel():
            error = ((actual.double()[:, part] * mask - exact).norm() / exact.norm()).item()
            checks[f"{name} heads {error:.2e}"] = error <= LIMITS[case.dtype]
    return [name for name, holds in checks.items() if not holds]


def _merged(parts: int, device: str) -> list[str]:
    """More parts than are weighed at once: two live heads by the exponentials of their sums, a frozen one added up."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(parts, 2, 3, 2, 16, generator=generator).to(device)
    logs = 8 * torch.randn(parts, 2, 2, 2, generator=generator).to(device)
    actual = sums.new_empty(2, 2, 3, 16).transpose(1, 2)
    MERGE(sums, logs, actual)
    weights = (2 ** logs.double()) / (2 ** logs.double()).sum(0)
    live = (weights[..., None] * sums[:, :, :2].double()).sum(0)
    exact = torch.cat([live, sums[:, :, 2:].double().sum(0)], 1)
    error = ((actual.double() - exact).norm() / exact.norm()).item()
    return [] if error <= LIMITS["float32"] else [f"merged {error:.2e}"]


def _by_hand(case: Case, query, key, value, dense, first: int, pads: tuple[int, ...]) -> torch.Tensor:
    """Attention and rows of patterns in float64, each sequence by itself from its first real position on."""
    keys, live = sorted(set(case.slots)), len(case.slots)
    expected = query.new_zeros(BATCH, live + len(case.heads), case.rows, case.dim, dtype=torch.float64)
    for batch, pad in enumerate(pads):
        for row in range(case.rows):
            at = first + row
            if at < pad:
                continue
            for slot, head in enumerate(case.slots):
                own = key[batch, keys.index(head), pad : at + 1].double()
                weights = (own @ query[batch, slot, row].double() / case.dim**0.5).softmax(0)
                expected[batch, slot, row] = weights @ value[batch, head, pad : at + 1].double()
            for slot, head in enumerate(case.heads):
                weights = dense[slot, at - pad, : at - pad + 1]
                expected[batch, live + slot, row] = weights @ value[batch, head, pad : at + 1].double()
    return expected
