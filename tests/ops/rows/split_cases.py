"""Cases of the one launch of live and frozen heads' few rows; `run` compares with float64."""

from dataclasses import dataclass

import torch

from tests.ops.rows import row_cases

LIMITS = {"float32": 1e-6, "float16": 1.5e-3, "bfloat16": 8e-3}
"""Relative L2 errors, of live heads (softmax weights rounded to the dtype) and of frozen ones."""


@dataclass(frozen=True)
class Case(row_cases.Case):
    """The same passes, with live slots that are computed."""

    heads: tuple[int, ...] = (1, 2)
    slots: tuple[int, ...] = (0, 3)
    """The value head of each live slot."""


CASES = {
    "a row": Case(),
    "a row in 16 bits": Case(dtype="float16"),
    "the first row": Case(end=1),
    "a growing cache": Case(end=300, told=False),
    "one part": Case(stretch=512),
    "no frozen head": Case(slots=(0, 1, 2, 3), heads=()),
    "even groups": Case(slots=(0, 0, 1, 1), heads=(2, 3, 2), rows=3, dim=24),
    "padded": Case(starts=(0, 130, 259)),
    "padded, growing": Case(end=300, told=False, starts=(0, 130, 299), rows=2),
    "few channels": Case(slots=(0, 0, 1, 1), heads=(2, 3, 2), dim=8),
    "many channels": Case(dtype="float16", dim=136),
    "uneven groups": Case(slots=(1, 1, 1, 3), heads=(0, 1, 2, 3), rows=5, starts=(0, 258, 7)),
}


def run(case: Case, device: str) -> dict:
    """Return the errors of live and of frozen heads, and how many parts and launches a call has."""
    from saf.bench.models import synthetic_patterns
    from saf.ops import FrozenHeads, mixed_attention
    from saf.ops.heads import cached_order
    from saf.ops.positions import Places
    from saf.ops.rows import frozen as module
    from saf.ops.rows import split

    module.STRETCH = case.stretch
    split.uses_triton = lambda device, dtype: True
    split.DTYPES = (torch.float32, torch.float16)  # of so few channels float32 fits
    taken: list[int] = []
    real = torch.ops.saf.split_rows.default
    split.split_rows = lambda *arguments: taken.append(arguments[-2]) or real(*arguments)
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    every, count = (*case.slots, *case.heads), len(case.heads)
    pattern = synthetic_patterns(max(1, count), 320, generator)
    frozen = None
    if count:
        frozen = FrozenHeads.from_patterns(pattern, dtype=dtype, device=device, kv_head=every)
        made = module.row_tables(every, count, torch.device(device))
        frozen._add_tables(dtype, {**frozen.tables(dtype), **made})  # which elsewhere than on a GPU no pass reads
    keys, starts = sorted(set(case.slots)), case.starts or (0, 0, 0)

    def drawn(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(3, rows, heads, case.dim, generator=generator).to(device, dtype).transpose(1, 2)

    query, key, value = drawn(len(case.slots), case.rows), drawn(len(keys), case.length), drawn(4, case.length)
    key[:, :, case.end :], value[:, :, case.end :] = 1e4, 1e4  # behind the last row there may be anything finite
    first = case.end - case.rows
    # Starts may be a column of something: kernels read them one after another.
    start = None if case.starts is None else torch.tensor(case.starts, device=device).repeat_interleave(2)[::2]
    given, options = value, {"start": start}
    if case.told:
        order = cached_order(every, count)
        given = value[:, list(order)]
        options = {"places": Places.of(torch.tensor(first, device=device), case.rows, case.length, start)}
    if not count:
        given = value[:, : len(keys)]
    with torch.no_grad():
        found = mixed_attention(query, key, given, frozen, kernel="split", **options).double()
    wanted = _by_hand(case, query, key, value, None if frozen is None else pattern.dense().double(), first, starts)
    real_rows = torch.tensor([[first + row >= at for row in range(case.rows)] for at in starts], device=device)
    error = {}
    for name, (lo, hi) in {"live": (0, len(case.slots)), "frozen": (len(case.slots), len(every))}.items():
        if hi > lo:
            mask = real_rows[:, None, :, None]
            apart = ((found - wanted)[:, lo:hi] * mask).norm() / (wanted[:, lo:hi] * mask).norm()
            error[name] = apart.item()
    shape = [case.rows * len(every) * case.dim, case.dim, len(every) * case.dim, 1]
    return {
        "error": error,
        "parts": taken,
        "finite": bool(found.isfinite().all()),
        "strides": list(found.stride()) == shape,
    }


def _by_hand(case: Case, query, key, value, dense, first: int, starts: tuple[int, ...]) -> torch.Tensor:
    """Attention and rows of patterns in float64, each sequence by itself from its first real position on."""
    keys = sorted(set(case.slots))
    heads = len(case.slots) + len(case.heads)
    wanted = query.new_zeros(3, heads, case.rows, case.dim, dtype=torch.float64)
    for batch, start in enumerate(starts):
        for row in range(case.rows):
            at = first + row
            if at < start:
                continue
            for slot, head in enumerate(case.slots):
                own = key[batch, keys.index(head), start : at + 1].double()
                weights = (own @ query[batch, slot, row].double() / case.dim**0.5).softmax(0)
                wanted[batch, slot, row] = weights @ value[batch, head, start : at + 1].double()
            for slot, head in enumerate(case.heads):
                weights = dense[slot, at - start, : at - start + 1]
                wanted[batch, len(case.slots) + slot, row] = weights @ value[batch, head, start : at + 1].double()
    return wanted
