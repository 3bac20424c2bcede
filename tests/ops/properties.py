"""What holds of frozen heads whatever the numbers are, checked on any device and backend."""

from collections.abc import Iterator

import torch
from torch import Tensor

from saf.ops import FrozenHeads, frozen_attention
from saf.patterns import CompactPattern, ExponentialPattern
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.hard_patterns import hard_patterns
from tests.ops.layers import UNIT, rebuilding, underflow

PATTERNS = ("decay", "ripple", "sink", "local")


class Frozen:
    """Frozen heads with hard patterns on one device, and their dense form `[F, T, T]` in float64."""

    def __init__(self, length: int, dim: int, dtype: torch.dtype, backend: str, device: str, *, extra: int = 63):
        self.pattern: CompactPattern | ExponentialPattern = hard_patterns(PATTERNS, length + extra, device)
        if backend == "linear":
            self.pattern = exponential_patterns(len(PATTERNS), length + extra, band=64).to(device=device)
        self.length, self.dim, self.dtype, self.backend, self.device = length, dim, dtype, backend, device
        self.heads = self.prepare(self.pattern)
        self.compact = self.pattern.compact()
        self.dense = self.pattern.dense()[:, :length, :length]
        self.unit = UNIT[dtype]
        self.generator = torch.Generator(device).manual_seed(3)

    def prepare(self, pattern: CompactPattern | ExponentialPattern) -> FrozenHeads:
        return FrozenHeads.from_patterns(pattern, backend=self.backend, dtype=self.dtype, device=self.device)

    def random(self, batch: int = 2) -> Tensor:
        shape = (batch, len(PATTERNS), self.length, self.dim)
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def mix(self, value: Tensor) -> Tensor:
        return frozen_attention(value, self.heads)

    def gradient(self, upstream: Tensor) -> Tensor:
        value = torch.zeros_like(upstream, requires_grad=True)
        return torch.autograd.grad(self.mix(value), value, upstream)[0]

    def bound(self, value: Tensor) -> Tensor:
        """The componentwise bound of `P V`."""
        unit = 2.5 * self.unit + self.length**0.5 * min(self.unit, UNIT[torch.float32])
        wide = value.double()
        rough = self.dense * (unit + rebuilding(self.compact, self.backend, self.length))
        bound = rough @ wide.abs() + self.unit * (self.dense @ wide).abs()
        return bound + underflow(self.dtype) * (1 + wide.abs().sum(2, keepdim=True))


def problems(frozen: Frozen) -> list[str]:
    """Return what does not hold; nothing when all is well."""
    checks = (rows_sum_to_one, later_positions_never_matter, prefixes_agree, is_adjoint, gauges_agree, repeats)
    return [line for check in checks for line in check(frozen)]


def rows_sum_to_one(frozen: Frozen) -> Iterator[str]:
    """Two roundings: of the scaled input and of the output."""
    ones = torch.ones_like(frozen.random())
    error = (frozen.mix(ones).double() - 1).abs().max().item()
    limit = 2 * frozen.unit + frozen.length**0.5 * UNIT[torch.float32]
    if not error <= limit:
        yield f"a row sums to 1 within {error:.2e}, not {limit:.2e}"


def later_positions_never_matter(frozen: Frozen) -> Iterator[str]:
    """To the bit, forward; earlier output gradients never matter to later value gradients."""
    first = frozen.random()
    for cut in {1, frozen.length // 2, frozen.length - 1} - {0, frozen.length}:
        later, earlier = first.clone(), first.clone()
        later[:, :, cut:] = 7 * frozen.random()[:, :, cut:]
        earlier[:, :, :cut] = 7 * frozen.random()[:, :, :cut]
        if not torch.equal(frozen.mix(first)[:, :, :cut], frozen.mix(later)[:, :, :cut]):
            yield f"values from {cut} on change earlier outputs"
        if not torch.equal(frozen.gradient(first)[:, :, cut:], frozen.gradient(earlier)[:, :, cut:]):
            yield f"output gradients before {cut} change later value gradients"


def prefixes_agree(frozen: Frozen) -> Iterator[str]:
    """The first rows are those of a shorter run; block sizes may differ, so up to rounding."""
    value = frozen.random()
    whole, bound = frozen.mix(value), 2 * frozen.bound(value)
    for length in {1, max(1, frozen.length // 3), max(1, frozen.length - 1)}:
        short = frozen.mix(value[:, :, :length])
        if not ((short.double() - whole[:, :, :length]).abs() <= bound[:, :, :length]).all():
            yield f"the first {length} rows differ from those of a run of {length}"


def is_adjoint(frozen: Frozen) -> Iterator[str]:
    """`<P V, P V> = <P^T P V, V>`, to 1e-5 in float32 and to a rounding of each operand in 16 bits."""
    value = frozen.random()
    mixed = frozen.mix(value)
    one, two = mixed.double().square().sum(), (frozen.gradient(mixed).double() * value.double()).sum()
    error, limit = ((one - two).abs() / one).item(), max(1e-5, 4 * frozen.unit)
    if not error <= limit:
        yield f"not the adjoint: {error:.2e} > {limit:.1e}"


def gauges_agree(frozen: Frozen) -> Iterator[str]:
    """`alpha += a + c j, rho += b + c d` is the same pattern, for an exponential one beside its compact form."""
    position = torch.arange(frozen.pattern.length, dtype=torch.float64, device=frozen.device)
    alpha, rho = frozen.compact.alpha + 5 + 0.3 * position, frozen.compact.rho - 2 + 0.3 * position
    value = frozen.random()
    other = frozen_attention(value, frozen.prepare(CompactPattern.from_parameters(alpha, rho)))
    if not ((other.double() - frozen.mix(value).double()).abs() <= 2 * frozen.bound(value)).all():
        yield "another gauge of the same pattern gives another output"


def repeats(frozen: Frozen) -> Iterator[str]:
    """Run to run, to the bit."""
    value = frozen.random()
    if not torch.equal(frozen.mix(value), frozen.mix(value)):
        yield "a second run differs"
    if not torch.equal(frozen.gradient(value), frozen.gradient(value)):
        yield "a second gradient differs"
