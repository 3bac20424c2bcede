"""Run the tile loop under Triton's interpreter, or compile it for compute capability 9.0, and print results as JSON."""

import json
import mmap
import sys
import tempfile

import torch

FAR = 2**30 + 40
"""Elements between heads and between sequences: itself within 32 bits, its multiples from 2 on not."""
CASES = {
    f"N{count}-T{length}-D{dim}": {"count": count, "length": length, "dim": dim}
    for count, length, dim in ((1, 37, 16), (2, 37, 64), (5, 64, 16), (3, 129, 16))
} | {
    "square-tiles": {"count": 2, "length": 97, "dim": 16, "blocks": (32, 32)},
    "tall-tiles": {"count": 2, "length": 97, "dim": 16, "blocks": (64, 16)},
    "two-channel-steps": {"count": 2, "length": 37, "dim": 40, "blocks": (32, 16)},
    "odd-channels": {"count": 2, "length": 37, "dim": 20},
    "T1": {"count": 3, "length": 1, "dim": 16},
    "half": {"count": 3, "length": 70, "dim": 16, "dtype": "float16"},
    "sharper": {"count": 5, "length": 70, "dim": 16, "spread": 200.0},
    "bands": {"count": 2, "length": 97, "dim": 16, "blocks": (32, 32), "options": {"scratch_bytes": 1}},
    "far-apart": {"count": 4, "length": 37, "dim": 16, "blocks": (32, 16), "far": True},
    "floor-by-blocks": {"count": 2, "length": 129, "dim": 16, "floor": 1e-3},
}
COMPILED = [
    *((torch.bfloat16, dim, shared) for dim, shared in ((64, 227), (96, 227), (256, 99))),
    *((torch.float32, dim, shared) for dim, shared in ((64, 227), (256, 99))),
]
"""Channels, and KiB of shared memory that a program may have."""


def operands(count, length, dim, spread=2.0, dtype="float32"):
    """Queries and keys of two heads, as views inside NaN-filled memory."""
    generator = torch.Generator().manual_seed(0)
    views = []
    for _ in range(2):
        buffer = torch.full((count, length + 3, 3, dim + 4), torch.nan, dtype=getattr(torch, dtype))
        view = buffer[:, :length, :2, :dim].transpose(1, 2)
        views.append(view.copy_(spread**0.5 * torch.randn(count, 2, length, dim, generator=generator)))
    return views


def far_operands(count, length, dim):
    """Queries and keys whose heads and sequences lie 2**30 elements apart, mapped from a file of holes."""
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryFile() as file:
        file.truncate((count + 2) * FAR * 2)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float16)
    views = [memory[at:].as_strided((count, 2, length, dim), (FAR, FAR, 2 * dim + 8, 1)) for at in (0, dim)]
    # Sequence n of head h lies where sequence n + 1 of head h - 1 does.
    for at in range(count + 1):
        values = 2**0.5 * torch.randn(length, 2 * dim, generator=generator)
        memory[at * FAR :].as_strided((length, 2 * dim), (2 * dim + 8, 1)).copy_(values)
    return views


def interpreted(case: dict) -> dict:
    """Return errors relative to the largest entry, and the largest score."""
    from saf.calibration import kernels
    from tests.calibration import oracle

    shape = {name: case[name] for name in ("count", "length", "dim", "spread", "dtype") if name in case}
    query, key = far_operands(**shape) if case.get("far") else operands(**shape)
    block_m, block_k = case.get("blocks", (64, 32))
    config = kernels.TileConfig(block_m=block_m, block_k=block_k)
    kv_head = [1, 1]
    usual = kernels.FLOOR
    kernels.FLOOR = oracle.FLOOR = case.get("floor", usual)
    try:
        run = kernels.measure_by_kernel(query, key, kv_head=kv_head, config=config, **case.get("options", {}))
        exact = oracle.dense_statistics(query, key, kv_head=kv_head)
    finally:
        kernels.FLOOR = oracle.FLOOR = usual
    errors = {"largest_score": torch.stack([run.variance, run.forward_kl]).abs().max().item()}
    for name, actual, expected in zip(exact._fields, run, exact, strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, torch.float64)
        errors[name] = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).nan_to_num(1e30).item()
    return errors


def poisoned() -> dict:
    """Return which statistics notice a query that is not a number."""
    from saf.calibration.kernels import TileConfig, measure_by_kernel

    query, key = operands(2, 37, 16)
    query[1, 0, 20, 3] = torch.nan
    actual = measure_by_kernel(query, key, kv_head=[1, 1], config=TileConfig(block_m=32, block_k=16))
    return {name: [bool(head.isnan().any()) for head in values] for name, values in actual._asdict().items()}


def compiled() -> dict:
    """Return registers, spilled bytes and shared memory of what the rule chooses."""
    from saf.calibration.kernels import choose_tile_config, measure_by_kernel
    from tests.ops.sm90_rows import NAMES, empty, recorded
    from tests.ops.sm90_worker import CUOBJDUMP, resources

    if not CUOBJDUMP.exists():
        return {"skip": "no cuobjdump beside triton"}
    rows = {}
    for dtype, dim, shared in COMPILED:
        config = choose_tile_config(dim=dim, dtype=dtype, shared=shared << 10)
        heads = empty(2, 2, 4096, dim, dtype=dtype)
        launches = recorded(measure_by_kernel, heads, heads, kv_head=[0, 1], config=config)
        for label, launch in zip(("lse", "tile", "edge"), launches, strict=True):
            rows[f"{label} {NAMES[dtype]} D{dim}"] = resources(launch) | {"least": shared << 10}
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Memory that a kernel leaves unwritten holds NaN. By this name the setting leaves PyTorch's compiler unloaded.
    torch.set_deterministic_debug_mode("warn")
    if sys.argv[1] == "compiled":
        print(json.dumps(compiled()))
    else:
        print(json.dumps({name: interpreted(case) for name, case in CASES.items()} | {"poisoned": poisoned()}))
