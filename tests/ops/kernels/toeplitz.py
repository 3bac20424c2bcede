"""Cases of the Toeplitz product and the float64 answer they are held against."""

import dataclasses

import torch

from tests.ops.surrounded import surrounded

SMALL = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}
DESCRIPTOR = {**SMALL, "descriptors": True}
FOLDED = {**DESCRIPTOR, "block_m": 128, "fold": 2}
TOLERANCE = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4.5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shape, how to run it and which way."""

    batch: int = 2
    heads: int = 2
    length: int = 129
    dim: int = 60
    extra: int = 70
    dtype: str = "float32"
    transpose: bool = False
    config: dict[str, int] | None = dataclasses.field(default_factory=SMALL.copy)


def _cases() -> dict[str, Case]:
    cases = {}
    for name, case in {
        "T1": Case(length=1, dim=16, extra=0),
        "T37-D16": Case(length=37, dim=16, batch=3),
        "T64-D64": Case(length=64, dim=64, extra=0),
        "T129-D128": Case(dim=128, batch=1),
        "T200-D60": Case(length=200, batch=1),
        "wide-k": Case(config={**SMALL, "block_k": 128}),
        "tall-m": Case(config={**SMALL, "block_m": 128}, batch=3, heads=1),
        "slabs": Case(config={**SMALL, "slabs": 2}, heads=3),
        "descriptor": Case(dtype="float16", dim=64, config=DESCRIPTOR),
        "descriptor-D60": Case(dtype="float16", length=200, config=DESCRIPTOR),
        "descriptor-T1": Case(dtype="float16", length=1, extra=0, dim=16, config=DESCRIPTOR),
        **{
            f"folded-T{length}": Case(dtype="float16", length=length, dim=dim, batch=batch, config=FOLDED)
            for length, dim, batch in ((1, 16, 1), (128, 64, 1), (513, 16, 2))
        },
        "folded-slabs": Case(dtype="float16", length=200, dim=64, heads=3, config={**FOLDED, "slabs": 2}),
        "default": Case(config=None),
        "half-default": Case(dtype="float16", dim=64, config=None),
        "half-default-narrow": Case(dtype="float16", dim=64, batch=1, config=None),
        "bfloat-default": Case(dtype="bfloat16", dim=64, config=None),
    }.items():
        cases[f"{name}-forward"] = case
        cases[f"{name}-transposed"] = dataclasses.replace(case, transpose=True)
    return cases


CASES = _cases()


def run(case: Case, device: str) -> list[str] | None:
    """Return which limits break: the error, memory around the output, causality, order and repetition."""
    from saf.ops.toeplitz.kernels import Config, toeplitz_matmul
    from saf.ops.toeplitz.tables import make_tiles

    if case.dtype == "bfloat16" and device == "cpu":
        return None
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(case.heads, case.length + case.extra, generator=generator, dtype=torch.float64)
    pre, post = torch.rand(2, case.heads, case.length + case.extra, generator=generator) + 0.5
    pre[:, case.length :] = float("nan")
    post[:, case.length :] = float("nan")
    x, _ = surrounded(case.batch, case.heads, case.length, case.dim, dtype, device)
    values = torch.randn(case.batch, case.heads, case.length, case.dim, generator=generator)
    x.copy_(values)
    out, around = surrounded(case.batch, case.heads, case.length, case.dim, dtype, device)
    config = Config(**case.config) if case.config else None
    tables = make_tiles(g.to(dtype)).to(device)

    def call(**more):
        return toeplitz_matmul(
            x, tables, pre.to(device), post.to(device), transpose=case.transpose, config=config, **more
        )

    first = call()
    # On a device, later calls of the same layout take another way to the same kernel.
    repeated = call() if device == "cuda" else first
    middle = case.length // 2
    earlier, later = slice(0, middle + 1), slice(middle + 1, None)
    kept, other = (later, earlier) if case.transpose else (earlier, later)
    want = _answer(case, tables, g, pre, post, x.cpu())
    error = ((first.cpu().double() - want).norm() / want.norm()).item()
    if device == "cuda":
        call(out=out)
    x[:, :, other] = 7.0
    call(out=out)
    checks = {
        f"error {error:.2e}": error <= TOLERANCE[case.dtype],
        "memory around the output": bool(around().isnan().all()),
        "a repetition differs": torch.equal(repeated, first),
        "not causal": torch.equal(out[:, :, kept], first[:, :, kept]),
        "inputs do not matter": case.length == 1 or not torch.equal(out, first),
        "not laid out as [B, T, F, D]": first.transpose(1, 2).is_contiguous(),
    }
    return [name for name, holds in checks.items() if not holds]


def _answer(case, tables, g, pre, post, x):
    """The float64 product with g as the operands' dtype holds it."""
    i = torch.arange(case.length)
    distance = i[:, None] - i[None, :]
    matrix = torch.where(distance >= 0, g.to(tables.dtype).double()[:, distance.clamp(min=0)], 0.0)
    if case.transpose:
        matrix = matrix.transpose(1, 2)
    scaled = pre[:, : case.length, None].double() * x.double()
    return post[:, : case.length, None].double() * (matrix @ scaled)
