"""One layer's mixed attention, forward and backward, on any device, against float64, head by head and materialised."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saf.heads import HeadLayout
from saf.ops import FrozenHeads, mixed_attention
from saf.patterns import CompactPattern, DensePattern, ExponentialPattern
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.hard_patterns import hard_patterns

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
"""Largest relative error of one rounding."""
BUDGET = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads' outputs and value gradients, inputs being in the dtype."""
SDPA_BUDGET = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
"""The same of live heads, where PyTorch computes them: generous, as it is not on trial, but a wrong head map shows."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer: `heads` query heads in groups that share a value head, of which `frozen` (original ids) are frozen.

    `patterns` are names of hard patterns, taken in turn; they cover `extra` more positions than the input, and the
    first `dense` of them are given entry by entry. With a `band` they are exponential patterns instead. `memory` is how
    operands lie in it: "packed" views of a larger buffer, "contiguous", or "channels", whose channels have no unit
    stride. Where no kernel of PyTorch reads it, the memory around packed views is NaN.
    """

    length: int
    dim: int = 64
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    backend: str = "toeplitz"
    heads: int = 4
    group: int = 1
    frozen: tuple[int, ...] = (1, 3)
    patterns: tuple[str, ...] = ("decay", "ripple")
    extra: int = 63
    dense: int = 0
    band: int = 0
    memory: str = "packed"

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + f"-dense{self.dense}" * (self.dense > 0)
        which = "".join(map(str, self.frozen)) or "none"
        heads = f"{which}-of-{self.heads}" + f"-by-{self.group}" * (self.group > 1)
        return f"{self.backend}-{kind}-T{self.length}-B{self.batch}-D{self.dim}-{heads}-{self.memory}"

    @property
    def live(self) -> int:
        return self.heads - len(self.frozen)

    @property
    def kv_head(self) -> tuple[int, ...]:
        slots = HeadLayout(self.heads, self.heads // self.group, self.frozen).slots
        return tuple(head // self.group for head in slots) if self.group > 1 else tuple(range(self.heads))

    def pattern(self, device: str) -> CompactPattern | ExponentialPattern:
        if self.band:
            return exponential_patterns(len(self.frozen), self.length + self.extra, band=self.band).to(device=device)
        names = [self.patterns[at % len(self.patterns)] for at in range(len(self.frozen))]
        return hard_patterns(names, self.length + self.extra, device)


def operand(case: Case, heads: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Return a leaf that requires a gradient and its view `[B, heads, T, D]`, as the case's operands lie in memory."""
    values = torch.randn(case.batch, heads, case.length, case.dim, generator=generator, device=device)
    leaf = values.to(case.dtype)
    if case.memory == "packed":
        fill = torch.nan if case.backend == "fused" or not case.live else 0.0
        shape = (case.batch, case.length + 3, heads + 2, case.dim + 8)
        leaf = torch.full(shape, fill, dtype=case.dtype, device=device)
        inside(leaf, case).copy_(values)
    elif case.memory == "channels":
        leaf = leaf.mT.contiguous()
    leaf.requires_grad_()
    return leaf, inside(leaf, case)


def inside(leaf: Tensor, case: Case) -> Tensor:
    """Return the view `[B, heads, T, D]` of a leaf, or of its gradient."""
    if case.memory == "packed":
        return leaf[:, : case.length, 1:-1, : case.dim].transpose(1, 2)
    return leaf.mT if case.memory == "channels" else leaf


def mix(
    case: Case, device: str, pattern: CompactPattern | ExponentialPattern | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Run a layer forward and backward; return operands as leaves and views, the output's gradient, and the output."""
    generator = torch.Generator(device).manual_seed(5)
    used = len(set(case.kv_head[: case.live]))
    counts = {"query": case.live, "key": used, "value": case.heads // case.group}
    leaves = {name: operand(case, count, generator, device) for name, count in counts.items()}
    upstream = operand(case, case.heads, generator, device)[1].detach()
    frozen = None
    if pattern is not None:
        wide = torch.promote_types(case.dtype, torch.float32)
        dense = [DensePattern(pattern[slot].dense().to(wide)) for slot in range(case.dense)]
        options = {"backend": case.backend, "dtype": case.dtype, "device": device, "kv_head": case.kv_head}
        frozen = FrozenHeads.from_patterns([*dense, *pattern.singles()[case.dense :]], **options)
    output = mixed_attention(*(view for _, view in leaves.values()), frozen)
    assert output.dtype == case.dtype
    output.backward(upstream)
    return leaves, upstream, output.detach()


def answers(
    case: Case, views: list[Tensor], upstream: Tensor, pattern: CompactPattern | ExponentialPattern | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return output and gradients in float64, and componentwise bounds of frozen heads' ones.

    `|O - O64| <= c u (P64 |V|) + u |O64|` with u one rounding and c = 2.5 for the rounded table and input, plus
    sqrt(T) float32 roundings of a running sum of T terms, and what underflows of every weight.
    """
    query, key, value = (x.double() for x in views)
    upstream, used = upstream.double(), sorted(set(case.kv_head[: case.live]))
    expected = {"output": torch.zeros_like(upstream)} | {
        name: torch.zeros_like(x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    bounds = {name: torch.zeros_like(expected[name]) for name in ("output", "value")}
    unit, lost = UNIT[case.dtype], underflow(case.dtype)
    spread = 2.5 * unit + case.length**0.5 * min(unit, UNIT[torch.float32])
    future = torch.ones(case.length, case.length, dtype=torch.bool, device=query.device).triu(1)
    for slot, kv in enumerate(case.kv_head):
        slope, x = upstream[:, slot], value[:, kv]
        if slot < case.live:
            q, k = query[:, slot], key[:, used.index(kv)]
            weights = (q @ k.mT * case.dim**-0.5).masked_fill(future, -torch.inf).softmax(-1)
            change = slope @ x.mT
            change = weights * (change - (change * weights).sum(-1, keepdim=True)) * case.dim**-0.5
            expected["output"][:, slot], expected["query"][:, slot] = weights @ x, change @ k
            expected["key"][:, used.index(kv)] += change.mT @ q
            expected["value"][:, kv] += weights.mT @ slope
            continue
        assert pattern is not None
        weights = pattern[slot - case.live].dense()[: case.length, : case.length]
        rough = spread * weights + weights * rebuilding(pattern[slot - case.live], case.backend, case.length)
        mixed, share = weights @ x, weights.mT @ slope
        expected["output"][:, slot] = mixed
        expected["value"][:, kv] += share
        rest = lost * (1 + x.abs().sum(1, keepdim=True)), lost * (1 + slope.abs().sum(1, keepdim=True))
        bounds["output"][:, slot] = rough @ x.abs() + unit * mixed.abs() + rest[0]
        bounds["value"][:, kv] += rough.mT @ slope.abs() + 2 * unit * share.abs() + rest[1]
    return expected, bounds


def underflow(dtype: torch.dtype) -> float:
    """Return the largest absolute error of a number too small for a dtype; hardware may drop all subnormal ones."""
    smallest = torch.finfo(dtype).smallest_normal
    return smallest * UNIT[dtype] if dtype == torch.float16 else smallest


def rebuilding(pattern: CompactPattern, backend: str, length: int) -> Tensor | float:
    """Return the largest relative error of weights `[F, T, T]` rebuilt from float32 logarithms; nothing otherwise.

    Each of the three logarithms, of size |x|, is rounded once and takes part in one rounded sum; the exponential
    adds four roundings.
    """
    if backend != "fused":
        return 0.0
    level, position = pattern.level(), torch.arange(length, device=pattern.alpha.device)
    alpha, rho, log_z = (x[..., :length].abs() for x in (level.alpha, level.rho, level.log_z))
    lag = (position[:, None] - position).clamp(min=0)
    return UNIT[torch.float32] * (2 * (alpha[..., None, :] + rho[..., lag] + log_z[..., :, None]) + 4)


@dataclass
class Result:
    """Output and gradients `[B, heads, T, D]` by name, the float64 answers, and frozen heads' componentwise bounds."""

    case: Case
    actual: dict[str, Tensor]
    expected: dict[str, Tensor]
    bounds: dict[str, Tensor]
    sdpa: "Result | None" = None
    """Where our own kernels compute the live heads: the same layer with PyTorch's attention and dense patterns."""

    def relative(self, name: str, heads: slice | list[int] = slice(None)) -> float:
        """Largest relative L2 error among some heads."""
        return largest(self.actual[name][:, heads], self.expected[name][:, heads])

    def worst(self, name: str, heads: slice | list[int]) -> float:
        """Largest error as a share of its componentwise bound, of some heads: at most 1 when all is well."""
        error = (self.actual[name][:, heads].double() - self.expected[name][:, heads]).abs()
        return (error / (self.bounds[name][:, heads] + 1e-300)).nan_to_num(nan=float("inf")).max().item()

    def live_limit(self, name: str, heads: slice) -> float:
        """Largest relative error allowed where live heads take part: twice PyTorch's own, and one rounding."""
        widest = SDPA_BUDGET[self.case.dtype]
        if self.sdpa is None:
            return widest
        exact = self.expected[name][:, heads]
        rounding = largest(exact.to(self.case.dtype), exact)
        if self.case.length == 1 and name in ("query", "key"):  # zero: the difference of two equal sums over channels
            rounding = self.case.dim * UNIT[torch.float32]
        return min(widest, 2 * self.sdpa.relative(name, heads) + rounding)

    def problems(self) -> list[str]:
        """Return what breaks a budget or a bound; nothing when all is well."""
        case, live, budget = self.case, self.case.live, BUDGET[self.case.dtype]
        readers = [[slot for slot, of in enumerate(case.kv_head) if of == kv] for kv in range(case.heads)]
        own = [kv for kv, slots in enumerate(readers) if slots and min(slots) >= live]
        alone = [kv for kv in own if len(readers[kv]) == 1]
        shared = [kv for kv in own if kv not in alone]
        # A value head that several heads read has its gradient summed up in the dtype.
        limits = [("output", slice(live, None), budget), ("value", alone, budget), ("value", shared, 1.5 * budget)]
        limits = [(name, heads, most) for name, heads, most in limits if heads and case.frozen]
        # Float64 tables carry the rounding of large exponents; the budget holds for them alone.
        shares = [] if case.dtype == torch.float64 else [(n, h, self.worst(n, h)) for n, h, _ in limits]
        if live:
            every = [("output", slice(live)), *((name, slice(None)) for name in ("query", "key", "value"))]
            limits += [(name, heads, self.live_limit(name, heads)) for name, heads in every]
        errors = [(name, heads, self.relative(name, heads), most) for name, heads, most in limits]
        lines = [f"{name} of {heads}: {error:.2e} > {most:.1e}" for name, heads, error, most in errors if error > most]
        return lines + [f"{name} of {heads}: {share:.2f} times its bound" for name, heads, share in shares if share > 1]


def run(case: Case, device: str, pattern: CompactPattern | ExponentialPattern | None = None) -> Result:
    """Mix a layer and its gradients, and compute both in float64; where our kernels have live heads, by PyTorch too."""
    pattern = pattern if pattern is not None or not case.frozen else case.pattern(device)
    leaves, upstream, output = mix(case, device, pattern)
    expected = answers(case, [view.detach() for _, view in leaves.values()], upstream, pattern)
    result = Result(case, _by_name(case, leaves, output), *expected)
    if case.backend == "fused" and case.live:
        twin = replace(case, backend="reference")
        leaves, _, output = mix(twin, device, pattern)
        result.sdpa = Result(twin, _by_name(twin, leaves, output), *expected)
    return result


def _by_name(case: Case, leaves: dict[str, tuple[Tensor, Tensor]], output: Tensor) -> dict[str, Tensor]:
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, (x, _) in leaves.items()}
    return {"output": output} | {name: inside(whole, case).clone() for name, whole in gradients.items()}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error of a tensor."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def largest(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative L2 error among heads `[B, heads, T, D]`; infinity for NaN."""
    actual, expected = actual.double(), expected.double()
    error, size = ((x.transpose(0, 1).flatten(1)).norm(dim=1) for x in (actual - expected, expected))
    # At T = 1 gradients of queries and keys are zero; everything else here has a norm far above one.
    return (error / size.clamp(min=1.0)).nan_to_num(nan=float("inf")).max().item()
