"""Cases of the Toeplitz product and the float64 answer they are held against."""

import dataclasses
import itertools

import torch

from tests.ops.surrounded import surrounded

SMALL = {
    "tables": "shifted",
    "prescale": "tile",
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "num_warps": 4,
    "num_stages": 2,
}
DESCRIPTOR = {"tables": "tiles", "prescale": "pass", "loads": "descriptor"}
FOLDED = tuple({**SMALL, **DESCRIPTOR, "block_m": 128, "fold": 2}.items())


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
    config: tuple[tuple[str, object], ...] | None = tuple(SMALL.items())


def _cases() -> dict[str, Case]:
    cases = {}
    for tables, prescale, transpose in itertools.product(
        ("shifted", "tiles"), ("pass", "tile", "packed"), (False, True)
    ):
        config = tuple({**SMALL, "tables": tables, "prescale": prescale}.items())
        cases[f"{tables}-{prescale}-{'transposed' if transpose else 'forward'}"] = Case(
            transpose=transpose, config=config
        )
    for name, case in {
        "T1": Case(length=1, dim=16, extra=0),
        "T37-D16": Case(length=37, dim=16, batch=3),
        "T64-D64": Case(length=64, dim=64, extra=0),
        "T129-D128": Case(dim=128, batch=1),
        "T129-D96": Case(dim=96, heads=1),
        "wide-k": Case(config=tuple({**SMALL, "block_k": 128}.items())),
        "tall-m": Case(config=tuple({**SMALL, "block_m": 128}.items())),
        "taller-m": Case(config=tuple({**SMALL, "block_m": 256}.items())),
        "descriptor": Case(dtype="float16", dim=64, config=tuple({**SMALL, **DESCRIPTOR}.items())),
        "descriptor-D60": Case(dtype="float16", length=300, config=tuple({**SMALL, **DESCRIPTOR}.items())),
        "descriptor-T1": Case(
            dtype="float16", length=1, extra=0, dim=16, config=tuple({**SMALL, **DESCRIPTOR}.items())
        ),
        **{
            f"folded-T{length}": Case(dtype="float16", length=length, dim=dim, batch=batch, config=FOLDED)
            for length, dim, batch in ((1, 16, 1), (128, 64, 1), (300, 64, 1), (513, 16, 2))
        },
        **{
            f"{slabs}-slabs": Case(config=tuple({**SMALL, "slabs": slabs}.items()), batch=3, heads=3)
            for slabs in (1, 2, 100)
        },
        "folded-slabs": Case(dtype="float16", length=300, dim=64, batch=2, heads=3, config=(*FOLDED, ("slabs", 2))),
        "default": Case(config=None),
        "half": Case(dtype="float16", dim=64),
        "half-default": Case(dtype="float16", dim=64, config=None),
        "half-default-narrow": Case(dtype="float16", dim=64, batch=1, config=None),
        "bfloat-default": Case(dtype="bfloat16", dim=64, config=None),
    }.items():
        cases[f"{name}-forward"] = case
        cases[f"{name}-transposed"] = dataclasses.replace(case, transpose=True)
    return cases


CASES = _cases()


def run(case: Case, device: str) -> dict:
    """Run a case; return errors and the checks on memory around it."""
    from saf.ops.toeplitz.config import Config, make_tables
    from saf.ops.toeplitz.launch import toeplitz_matmul

    if case.dtype == "bfloat16" and device == "cpu":
        return {"skip": "the interpreter's products of bfloat16 are wrong; needs a GPU"}
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
    config = Config(**dict(case.config)) if case.config else None
    kind = config.tables if config else "shifted" if case.dtype == "float32" else "tiles"
    tables = make_tables(g, kind=kind, dtype=dtype).to(device)

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
    return {
        "error": error if error == error else 1e30,
        "around_untouched": bool(around().isnan().all()),
        "repeats": bool(torch.equal(repeated, first)),
        "causal": bool(torch.equal(out[:, :, kept], first[:, :, kept])),
        "noticed": case.length == 1 or not bool(torch.equal(out, first)),
        "layout": list(first.stride()) == list(first.transpose(1, 2).contiguous().transpose(1, 2).stride()),
    }


def _answer(case, tables, g, pre, post, x):
    """The float64 product with g as the operands' dtype holds it."""
    i = torch.arange(case.length)
    distance = i[:, None] - i[None, :]
    matrix = torch.where(distance >= 0, g.to(tables.dtype).double()[:, distance.clamp(min=0)], 0.0)
    if case.transpose:
        matrix = matrix.transpose(1, 2)
    scaled = pre[:, : case.length, None].double() * x.double()
    return post[:, : case.length, None].double() * (matrix @ scaled)
