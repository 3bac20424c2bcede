"""Cases of the Toeplitz product and the float64 answer they are held against."""

import dataclasses
from functools import partial

import torch

from tests.ops.nan_memory import inside_nan, wrong_product

SMALL = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}
DESCRIPTOR = {**SMALL, "descriptors": True}
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


FORWARD = {
    "T1": Case(length=1, dim=16, extra=0),
    "T37-D16": Case(length=37, dim=16, batch=3),
    "T129-D128": Case(dim=128, batch=1),
    "tall-m": Case(config={**SMALL, "block_m": 128}, batch=3, heads=1),
    "slabs": Case(config={**SMALL, "slabs": 2}, heads=3),
    "descriptor": Case(dtype="float16", dim=64, config=DESCRIPTOR),
    "descriptor-T1": Case(dtype="float16", length=1, extra=0, dim=16, config=DESCRIPTOR),
    "descriptor-slabs": Case(dtype="float16", length=200, dim=64, heads=3, config={**DESCRIPTOR, "slabs": 2}),
    "default": Case(config=None),
    "half-default-narrow": Case(dtype="float16", dim=64, batch=1, config=None),
}
BOTH = {
    "T64-D64": Case(length=64, dim=64, extra=0),
    "T200-D60": Case(length=200, batch=1),
    "descriptor-D60": Case(dtype="float16", length=200, config=DESCRIPTOR),
    "descriptor-T513": Case(dtype="float16", length=513, dim=16, config={**DESCRIPTOR, "block_m": 128}),
    "half-default": Case(dtype="float16", dim=64, config=None),
    "bfloat-default": Case(dtype="bfloat16", dim=64, config=None),
}
CASES = FORWARD | {
    f"{name}-{way}": dataclasses.replace(case, transpose=way == "transposed")
    for name, case in BOTH.items()
    for way in ("forward", "transposed")
}


def run(case: Case, device: str) -> list[str] | None:
    """Return which limits of `wrong_product` break."""
    from saf.ops.toeplitz import make_tiles
    from saf.ops.toeplitz_kernels import ToeplitzConfig, toeplitz_matmul

    if case.dtype == "bfloat16" and device == "cpu":
        return None
    dtype, generator = getattr(torch, case.dtype), torch.Generator().manual_seed(0)
    g = torch.rand(case.heads, case.length + case.extra, generator=generator, dtype=torch.float64).to(dtype)
    scales = torch.rand(2, case.heads, case.length + case.extra, generator=generator) + 0.5
    scales[..., case.length :] = float("nan")
    before, after = scales.to(device)
    x, _ = inside_nan(case.batch, case.heads, case.length, case.dim, dtype, device)
    x.copy_(torch.randn(x.shape, generator=generator))
    config, tiles = ToeplitzConfig(**case.config) if case.config else None, make_tiles(g).to(device)
    lag = torch.arange(case.length)[:, None] - torch.arange(case.length)
    matrix = torch.where(lag >= 0, g.double()[:, lag.clamp(min=0)], 0.0).to(device)
    matrix = matrix.mT if case.transpose else matrix
    left, right = (scale[:, : case.length, None].double() for scale in (after, before))
    product = partial(toeplitz_matmul, x, tiles, before, after, transpose=case.transpose, config=config)
    want = left * (matrix @ (right * x.double()))
    return wrong_product(product, x, want, TOLERANCE[case.dtype], reverse=case.transpose)
