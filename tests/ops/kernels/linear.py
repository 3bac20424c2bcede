"""Cases of the linear product's kernels and the float64 answer they are held against."""

import dataclasses
from functools import partial

import torch

from saf.ops.linear import exact_tables, linear_tables
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.nan_memory import inside_nan, wrong_product

TOLERANCE = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4.5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shape, pattern, how to run it and which way."""

    batch: int = 2
    heads: int = 2
    length: int = 300
    dim: int = 16
    band: int = 64
    poles: int = 6
    stretch: int = 1
    columns: int = 32
    extra: int = 70
    dtype: str = "float32"
    transpose: bool = False
    padded: bool = False
    by_rule: bool = False


FORWARD = {
    "two-tiles": Case(length=200),
    "one-tile": Case(band=1, length=150),
    "poles-32": Case(poles=20, length=260, batch=1, heads=1),
    "T1": Case(length=1, extra=0, columns=16),
    "T64": Case(length=64, stretch=2),
    "D256": Case(dim=256, columns=128, length=129, batch=1, heads=1),
    "half": Case(dtype="float16", length=200, heads=1),
    "rule": Case(by_rule=True, length=200),
}
BOTH = {
    "three-tiles": Case(band=128, stretch=2, heads=1),
    "many-stretches": Case(heads=1, band=10, length=700, batch=1),
    "T63": Case(length=63, stretch=2, extra=0),
    "D60": Case(dim=60, length=129, batch=1, columns=64),
    "padded": Case(padded=True, band=128, stretch=2, length=200, heads=1),
    "padded-D60": Case(padded=True, dim=60, length=129, heads=2),
    "bfloat": Case(dtype="bfloat16", length=400, dim=64, by_rule=True),
}
CASES = FORWARD | {
    f"{name}-{way}": dataclasses.replace(case, transpose=way == "transposed")
    for name, case in BOTH.items()
    for way in ("forward", "transposed")
}


def run(case: Case, device: str) -> list[str] | None:
    """Return which limits of `wrong_product` break."""
    from saf.ops.linear_kernels import LinearConfig, linear_matmul

    if case.dtype == "bfloat16" and device == "cpu":
        return None
    dtype, slots = getattr(torch, case.dtype), case.heads
    pattern = exponential_patterns(slots, case.length + case.extra, band=case.band, poles=case.poles)
    tables, *scales = linear_tables(exact_tables(pattern.singles(), torch.device(device)), dtype)
    before, after = (scale.clone() for scale in (reversed(scales) if case.transpose else scales))
    before[:, case.length :], after[:, case.length :] = float("nan"), float("nan")
    x, _ = inside_nan(case.batch, slots, case.length, case.dim, dtype, device)
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    starts = [0, 90] if case.padded else [0] * case.batch
    want = torch.zeros(case.batch, slots, case.length, case.dim, dtype=torch.float64, device=device)
    for row, first in enumerate(starts):
        matrix = pattern.dense()[:, : case.length - first, : case.length - first].to(device)
        want[row, :, first:] = (matrix.mT if case.transpose else matrix) @ x[row, :, first:].double()
    options = {
        "transpose": case.transpose,
        "left_pad": torch.tensor(starts, device=device) if case.padded else None,
        "config": None if case.by_rule else LinearConfig(case.stretch, case.columns),
    }
    product = partial(linear_matmul, x, tables, before, after, **options)
    return wrong_product(product, x, want, TOLERANCE[case.dtype], reverse=case.transpose)
