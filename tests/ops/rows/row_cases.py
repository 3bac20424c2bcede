"""Cases of the kernels of single rows; `run` compares one with dense patterns in float64."""

import gc
from dataclasses import dataclass

import torch

LIVE_HEADS = (3, 0)
"""The value heads that live slots read."""
LIMITS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4.5e-3}
"""Relative L2 errors, those of a layer's operator (`saf.bench.layer.TOLERANCE`)."""


@dataclass(frozen=True)
class Case:
    """A pass of `rows` queries that ends at place `end` of `length`."""

    heads: tuple[int, ...] = (2, 3)
    """The value head of each frozen slot."""
    live: int = 2
    rows: int = 1
    length: int = 300
    end: int = 260
    dim: int = 16
    dtype: str = "float32"
    told: bool = True
    """Whether the device tells the place."""
    starts: tuple[int, ...] | None = None
    stretch: int = 128
    """Keys of a part at least."""


CASES = {
    "a row": Case(),
    "a row in 16 bits": Case(dtype="float16"),
    "the first row": Case(end=1),
    "the last row": Case(end=300, told=False),
    "one part": Case(stretch=512),
    "no live head": Case(live=0),
    "padded": Case(starts=(0, 130, 259)),
    "rows": Case(rows=5, starts=(0, 258, 7)),
    "rows told by the host": Case(rows=3, end=300, told=False),
    "many channels": Case(dim=136),
    "groups": Case(heads=(1, 0, 1, 3, 1), rows=7, dim=24),
    "groups of many rows": Case(heads=(0, 0, 0), rows=23, dim=48, starts=(0, 1, 200)),
}


def run(case: Case, device: str) -> dict:
    """Return the error of frozen heads, whether live ones are as given, and what a call leaves behind."""
    from saf.bench.models import synthetic_patterns
    from saf.ops import FrozenHeads
    from saf.ops.heads import cached_order
    from saf.ops.positions import Rows
    from saf.ops.rows import frozen as module
    from saf.patterns import CompactPattern

    module.STRETCH = case.stretch
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    frozen_heads, kv_head = len(case.heads), (*LIVE_HEADS[: case.live], *case.heads)
    pattern = synthetic_patterns(frozen_heads, 320, generator)
    frozen = FrozenHeads.from_patterns(pattern, dtype=dtype, device=device, kv_head=kv_head)
    # Stored as a cache is: what lies behind the last row may be anything finite.
    value = torch.randn(3, case.length, 4, case.dim, generator=generator).to(device, dtype)
    value[:, case.end :] = 1e4
    value = value.transpose(1, 2)
    live = torch.randn(3, case.rows, case.live, case.dim, generator=generator).to(device, dtype).transpose(1, 2)
    first = case.end - case.rows
    start = None if case.starts is None else torch.tensor(case.starts, device=device)
    rows = Rows(torch.tensor(first, device=device) if case.told else first, case.rows, start)
    # Without a GPU the tables are those of plain PyTorch, which reads no others.
    tables = frozen.tables(dtype) | module.row_tables(kv_head, frozen_heads, torch.device(device))
    given, heads = value, case.heads
    if case.told:  # by a cache of fixed size, which has value heads in an order of its own
        order = cached_order(kv_head, frozen_heads)
        given, heads = value[:, list(order)], tuple(map(order.index, heads))
    gc.freeze()  # what was imported is passed over: a look at everything takes longer than the kernels
    before = _memories()
    found = module.few_rows(given, heads, tables, rows, live if case.live else None)
    kept = len(_memories() - before - {found.untyped_storage().data_ptr()})
    wanted = _by_hand(CompactPattern(*(each.to(device) for each in pattern.vectors().values())), case, value)
    mixed = found[:, case.live :].double()
    return {
        "error": ((mixed - wanted).norm() / wanted.norm()).item(),
        "live": bool(torch.equal(found[:, : case.live], live)),
        "strides": list(found.stride()) == [case.rows * found.shape[1] * case.dim, case.dim, found.stride(2), 1],
        "kept": kept,
        "parts": module.parts_of(3 * len(set(case.heads)), case.length),
    }


def _memories() -> set[int]:
    """Return where the memory of every tensor that is alive begins."""
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return {one.untyped_storage().data_ptr() for one in alive}


def _by_hand(pattern, case: Case, value: torch.Tensor) -> torch.Tensor:
    """Rows of the patterns in float64, each sequence by itself from its first real position on."""
    dense, rows = pattern.dense().double(), range(case.end - case.rows, case.end)
    wanted = value.new_zeros(3, len(case.heads), case.rows, case.dim, dtype=torch.float64)
    for batch, start in enumerate(case.starts or (0, 0, 0)):
        for slot, head in enumerate(case.heads):
            for number, row in enumerate(rows):
                if row >= start:
                    weights = dense[slot, row - start, : row - start + 1]
                    wanted[batch, slot, number] = weights @ value[batch, head, start : row + 1].double()
    return wanted
