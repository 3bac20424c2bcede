"""Fit exponential patterns: a free band and a sum of damped cosines, by maximum likelihood, many heads at once.

A compact fit comes first. Poles are chosen greedily for it, and then fixed. Band, amplitudes and key logits minimise
the cross-entropy of Eq. (4), with a penalty on cancellation among poles, which would lose low-precision digits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from saf.errors import InputError
from saf.fit.objective import check_targets, fit_loss
from saf.fit.proportional import fit_proportional
from saf.patterns import CompactPattern, DampedCosines, ExponentialPattern

MAX_EXTRA_KL = 0.02
"""Nats per row by which an exponential pattern may be further from its target than the compact fit."""
MAX_CANCELLATION = 4.0
"""Largest accepted mean of (sum of the poles' envelopes) / g: rounding errors of the sum grow by it."""
MAX_SHORT_KL = 0.005
"""Nats per row that the short form of alpha may cost more than an exponential pattern with every key free."""
POLES = (16, 32)
"""Numbers of poles, tried in turn."""
SINKS = 16
"""Keys with logits of their own in the short form of alpha."""
TRENDS = (24.0, 96.0, 384.0)
"""Keys over which the decays of the short form fall by e: sinks of real models fade within a few hundred keys."""

_DECAYS = 2  # poles without frequency: a constant, and one that falls over _NEAR distances
_NEAR = 40.0
_DAMPINGS = (0.0, 1 / 4000, 1 / 1500, 1 / 500, 1 / 150)  # of the poles tried, at T = 4096; they scale with 1 / T
_LONGEST_PERIOD = 2.5  # radians over T; the decays represent lower frequencies
_CANCELLATION = 1e-3  # nats per row and unit of mean cancellation: a group lasso over amplitudes
_PSEUDO = 0.1  # weight a distance of the prior that g equals its smoothed form: g stays positive
_RIDGE, _GREEDY_RIDGE = 1e-4, 1e-5
_SMOOTH = 32  # distances on either side that the smoothed g averages over
_STEPS, _TOLERANCE = 200, 1e-5  # evaluations; nats per row that the last ten steps gain together
_HELD = {"cpu": 1 << 21, "cuda": 1 << 27}  # entries of the largest array: a CPU's cache, a tenth of a GPU's memory


@dataclass(frozen=True, eq=False)
class ExponentialFit:
    """One head's accepted pattern, compared with the head's compact fit.

    Attributes:
        pattern: an ExponentialPattern, or the compact fit where none was accepted.
        extra_kl: nats per row further from the target than the compact fit; of the best attempt if none was accepted.
        cancellation: mean over attention mass beyond the band of (sum of the poles' envelopes) / g.
        worst_row: the largest KL of a row of the compact fit to the same row of the pattern, nats.
        poles: their number; 0 for a compact pattern.
        free_keys: number of keys with a logit of their own.
    """

    pattern: CompactPattern | ExponentialPattern
    extra_kl: float
    cancellation: float
    worst_row: float
    poles: int
    free_keys: int


def fit_exponential(eta_abs: Tensor, eta_rel: Tensor, *, band: int = 128, pairs: int = POLES[0]) -> ExponentialPattern:
    """Return exponential patterns fitted to targets with these marginals `[..., T]`, in float64.

    `band` is the number of distances with a free weight and `pairs` that of poles beyond it, two of them without
    frequency; every key has a logit of its own. `saf.fit_kl(pattern.to_compact(), ...)` measures the fit, for which
    `fit_exponential_heads` has limits. Raises InputError for marginals that no causal pattern has.
    """
    if band < 1 or pairs < 2:
        raise InputError(f"band must be at least 1 and pairs at least 2, got {band} and {pairs}")
    eta_abs, eta_rel = check_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    targets = eta_abs.reshape(-1, length), eta_rel.reshape(-1, length)
    alpha, rho, _ = fit_proportional(*targets)
    compact = CompactPattern.from_parameters(alpha, rho).canonical()
    fits = _in_groups(compact, *targets, band=band, pairs=pairs, short=False)
    stacked = ExponentialPattern.stack([cast(ExponentialPattern, full.pattern) for full, _ in fits])
    return stacked._map(lambda _, x: x.reshape(*shape[:-1], x.shape[-1]))


def fit_exponential_heads(
    compact: CompactPattern,
    eta_abs: Tensor,
    eta_rel: Tensor,
    *,
    band: int = 128,
    max_extra_kl: float = MAX_EXTRA_KL,
    max_cancellation: float = MAX_CANCELLATION,
    max_short_kl: float | None = MAX_SHORT_KL,
) -> list[ExponentialFit]:
    """Return an accepted pattern for each of the compact fits `[N, T]` of these marginals `[N, T]`.

    Tried in turn: 16 poles, 32 poles, the compact fit itself. The short form of alpha is taken if it costs at most
    `max_short_kl` nats more and stays within both limits; with None it is not tried, and every key has its own logit.
    """
    if band < 1:
        raise InputError(f"band must be at least 1, got {band}")
    targets = check_targets(eta_abs, eta_rel)
    compact = compact.to(dtype=torch.float64, device=targets[0].device).canonical()
    best: dict[int, ExponentialFit] = {}
    pending = list(range(len(compact)))
    for pairs in POLES:
        some = torch.tensor(pending, dtype=torch.int64, device=targets[0].device)
        operands = compact[some], *(x[some] for x in targets)
        forms = _in_groups(*operands, band=band, pairs=pairs, short=max_short_kl is not None)
        missed = []
        for head, (full, short) in zip(pending, forms, strict=True):
            most = min(full.extra_kl + (max_short_kl or 0.0), max_extra_kl)
            fit = short if short.extra_kl <= most and short.cancellation <= max_cancellation else full
            passed = fit.extra_kl <= max_extra_kl and fit.cancellation <= max_cancellation
            if passed or head not in best or fit.extra_kl < best[head].extra_kl:
                best[head] = fit
            missed += [] if passed else [head]
        pending = missed
        if not pending:
            break
    for head in pending:
        best[head] = replace(best[head], pattern=compact[head], worst_row=0.0, poles=0, free_keys=compact.length)
    return [best[head] for head in range(len(compact))]


def _in_groups(
    compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, *, band: int, pairs: int, short: bool
) -> list[tuple[ExponentialFit, ExponentialFit]]:
    """Fit heads in groups that fit into memory; return each with every key free, and in the short form if it is tried.

    Where it is not, both are the same.
    """
    size = max(1, _HELD[eta_abs.device.type] // (compact.length * max(2 * pairs, 8 * len(_DAMPINGS))))
    fits = []
    for first in range(0, len(compact), size):
        some = slice(first, first + size)
        fits += _fit(compact[some], eta_abs[some], eta_rel[some], band=band, pairs=pairs, short=short)
    return fits


def _fit(
    compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, *, band: int, pairs: int, short: bool
) -> list[tuple[ExponentialFit, ExponentialFit]]:
    """Fit a group of heads: choose poles, then optimise; measure each result without the fit's own approximations."""
    length = compact.length
    if length <= band:
        none = compact.rho[:, :0]
        same = ExponentialPattern(compact.alpha, compact.rho, none, none, none, none, length)
        fits = [ExponentialFit(same[head], 0.0, 1.0, 0.0, 0, length) for head in range(len(same))]
        return list(zip(fits, fits, strict=True))
    weights = (compact.rho - compact.rho.amax(-1, keepdim=True)).exp()
    mass = _sums(compact.alpha.exp(), compact.rho.exp())[2]
    poles = _choose_poles(weights[:, band:], mass[:, band:], pairs - _DECAYS, length)
    model = _Model(compact, eta_abs, eta_rel, band, poles)
    point = model.optimise(model.start())
    full = model.measure(point, compact)
    if not short or length <= 4 * SINKS:
        return list(zip(full, full, strict=True))
    fewer = _Model(compact, eta_abs, eta_rel, band, poles, short=True)
    return list(zip(full, fewer.measure(fewer.optimise(fewer.start_from(model, point)), compact), strict=True))


def _sums(keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Z, column sums and diagonal sums of the patterns with factors `exp(alpha)` and `g`, `[N, T]` each.

    By FFT in float64, whose errors are relative to the largest row: good for a step of a fit. Reported and executed
    numbers are computed without it.
    """
    length = keys.shape[-1]
    keys_f, weights_f = torch.fft.rfft(keys, 2 * length), torch.fft.rfft(weights, 2 * length)
    rows = torch.fft.irfft(keys_f * weights_f, 2 * length)[:, :length].clamp(min=1e-300)
    inverse = torch.fft.rfft(1 / rows, 2 * length)
    columns = torch.fft.irfft(weights_f.conj() * inverse, 2 * length)[:, :length] * keys
    return rows, columns, torch.fft.irfft(keys_f.conj() * inverse, 2 * length)[:, :length] * weights


def _choose_poles(weights: Tensor, mass: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return damping and frequency `[N, P]`: the decays, then `count` poles for g `[N, n]` with diagonal sums `mass`.

    Each is the pole of the grid that correlates most with the residual of g after the poles before it, relative to g
    and weighted by attention mass.
    """
    heads, size = weights.shape
    at = torch.arange(size, dtype=torch.float64, device=weights.device)
    grid = torch.tensor(_DAMPINGS, dtype=torch.float64, device=weights.device) * (4096 / length)
    envelopes = (-grid[:, None] * at).exp()
    root_mass = mass.sqrt()
    relative = root_mass / weights
    relative = relative / relative.square().mean(-1, keepdim=True).sqrt()
    energy = (relative.square() @ envelopes.square().mT).clamp(min=1e-300)
    points = 8 * length
    usable = torch.arange(points // 2 + 1, device=weights.device) * (2 * math.pi / points)
    usable = usable * length >= _LONGEST_PERIOD
    usable[-4:] = False

    damping = weights.new_zeros(heads, _DECAYS + count)
    frequency = torch.zeros_like(damping)
    damping[:, 1] = 1 / _NEAR
    atoms = weights.new_zeros(heads, size, 2 * (_DECAYS + count))
    atoms[:, :, 0], atoms[:, :, 2] = relative, relative * (-at / _NEAR).exp()
    gram = atoms.mT @ atoms
    for pole in range(_DECAYS, _DECAYS + count):
        used = 2 * pole
        ridge = _GREEDY_RIDGE * gram.diagonal(dim1=1, dim2=2).sum(-1) / used
        known = atoms[:, :, :used]
        system = gram[:, :used, :used] + ridge[:, None, None] * torch.eye(used, dtype=gram.dtype, device=gram.device)
        amplitudes = torch.linalg.solve(system, known.mT @ root_mass[..., None])
        residual = (root_mass - (known @ amplitudes).squeeze(-1)) * relative
        spectrum = torch.view_as_real(torch.fft.rfft(residual[:, None] * envelopes, points))
        correlation = spectrum.square().sum(-1) / energy[..., None]
        best = (correlation * usable).flatten(1).argmax(-1)
        which = best // len(usable)
        damping[:, pole] = grid[which]
        frequency[:, pole] = (best % len(usable)) * (2 * math.pi / points)
        turned = frequency[:, pole, None] * at
        scaled = relative * envelopes[which]
        atoms[:, :, used], atoms[:, :, used + 1] = scaled * turned.cos(), scaled * turned.sin()
        new = atoms[:, :, : used + 2].mT @ atoms[:, :, used : used + 2]
        gram[:, : used + 2, used : used + 2] = new
        gram[:, used : used + 2, : used + 2] = new.mT
    return damping, frequency


class _Model:
    """The objective of one group of heads, in coordinates in which its curvature is near one.

    Coordinates `[N, n]`: key logits, band, amplitudes. Key logits are all free or, in the short form, those of the
    first SINKS keys, the amplitudes of TRENDS and a constant.
    """

    def __init__(
        self, compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, band: int, poles: tuple[Tensor, Tensor],
        *, short: bool = False,
    ):  # fmt: skip
        self.eta_abs, self.eta_rel, self.band, self.length = eta_abs, eta_rel, band, compact.length
        self.alpha, self.rho = compact.alpha, compact.rho
        self.poles = DampedCosines(*poles, compact.length - band)
        self.free_keys = SINKS if short else compact.length
        later = torch.arange(self.length - self.free_keys, dtype=torch.float64, device=eta_abs.device)
        trends = torch.tensor([*TRENDS, math.inf], dtype=torch.float64, device=eta_abs.device)
        self.trends = (-later / trends[:, None]).exp() if short else later.new_zeros(0, 0)
        if short:
            self.alpha = self._projected(compact.alpha)
        self.key_scale = eta_abs[:, : self.free_keys].rsqrt()
        self.trend_scale = (eta_abs[:, self.free_keys :] @ self.trends.square().mT).rsqrt()
        self.band_scale = (eta_rel[:, :band] + 1e-3).rsqrt()
        self.base = self._loss(compact.alpha, compact.rho)
        self._set_amplitudes()

    def _projected(self, alpha: Tensor) -> Tensor:
        """Return alpha with its later keys replaced by the closest trend, weighted by attention mass."""
        weights = self.eta_abs[:, None, self.free_keys :]
        gram = (self.trends * weights) @ self.trends.mT
        right = (self.trends * weights) @ alpha[:, self.free_keys :, None]
        ridge = 1e-6 * gram.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
        gram = gram + ridge * torch.eye(len(self.trends), dtype=gram.dtype, device=gram.device)
        later = torch.linalg.solve(gram, right).mT @ self.trends
        return torch.cat([alpha[:, : self.free_keys], later.squeeze(1)], -1)

    def _set_amplitudes(self) -> None:
        """Set the scale of g, the floors for positive g, and the coordinates of amplitudes."""
        band, poles = self.band, self.poles
        mass = _sums(self.alpha.exp(), self.rho.exp())[2][:, band:]
        weights = self.rho[:, band:].exp()
        self.unit = mass.sum(-1, keepdim=True) / (mass / weights).sum(-1, keepdim=True)
        weights = weights / self.unit
        ones = weights.new_ones(1, 1, 2 * _SMOOTH + 1)
        total, number = (
            torch.nn.functional.conv1d(x[:, None], ones, padding=_SMOOTH).squeeze(1)
            for x in (weights.log(), torch.ones_like(weights))
        )
        self.smooth = (total / number).exp()
        self.floor = 0.15 * self.smooth

        relative = mass.sqrt() / weights
        atoms = poles.atoms() * relative[..., None]
        gram, right = atoms.mT @ atoms, (atoms.mT @ mass.sqrt()[..., None]).squeeze(-1)
        size = gram.shape[-1]
        ridge = (_RIDGE / size) * gram.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
        gram = gram + ridge * torch.eye(size, dtype=gram.dtype, device=gram.device)
        self.decays = _two_decays(gram[:, :_DECAYS, :_DECAYS], right[:, :_DECAYS], size)
        factor = torch.linalg.cholesky(gram)
        self.whiten = torch.linalg.inv(factor).mT
        first = torch.cholesky_solve(right[..., None], factor).squeeze(-1)
        first = self._positive(first, 0.25)
        self.first = (factor.mT @ first[..., None]).squeeze(-1)
        envelopes = DampedCosines(poles.damping, torch.zeros_like(poles.damping), poles.count)
        sizes = envelopes.transposed(mass / weights)[:, : poles.damping.shape[-1]]
        self.cost = sizes / mass.sum(-1, keepdim=True)

    def _loss(self, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return the cross-entropy, in nats over all rows."""
        rows = _sums(alpha.exp(), rho.exp())[0]
        return rows.log().sum(-1) - (self.eta_abs * alpha).sum(-1) - (self.eta_rel * rho).sum(-1)

    def _positive(self, amplitudes: Tensor, share: float) -> Tensor:
        """Return the amplitudes moved towards the two decays until g is at least a share of its smoothed form."""
        weights, decays = self.poles.sum(amplitudes), self.poles.sum(self.decays)
        least = share * torch.minimum(self.smooth, decays)
        step = torch.where(weights < least, (least - weights) / (decays - weights).clamp(min=1e-300), 0.0)
        step = step.amax(-1, keepdim=True).clamp(max=1.0)
        return (1 - step) * amplitudes + step * self.decays

    def start(self) -> Tensor:
        """Return the coordinates of the compact fit with least-squares amplitudes."""
        width = self.key_scale.shape[-1] + self.trend_scale.shape[-1] + self.band
        return torch.cat([self.first.new_zeros(len(self.first), width), self.first], -1)

    def start_from(self, other: "_Model", point: Tensor) -> Tensor:
        """Return the coordinates of another model's band and amplitudes, with key logits in the short form."""
        _, rho, amplitudes, _ = other.unpack(point)
        band = (rho[:, : self.band] - self.rho[:, : self.band]) / self.band_scale
        scaled = amplitudes * (other.unit / self.unit)
        inner = torch.linalg.solve_triangular(self.whiten, scaled[..., None], upper=True).squeeze(-1)
        keys = self.first.new_zeros(len(self.first), self.key_scale.shape[-1] + self.trend_scale.shape[-1])
        return torch.cat([keys, band, inner], -1)

    def unpack(self, point: Tensor, amplitudes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return alpha, rho `[N, T]`, amplitudes `[N, 2P]`, and g beyond the band where it is above its floor.

        Below the floor the logarithm goes on as a straight line, so that a step may pass through negative weights.
        """
        keys, trend, near, inner = point.split(
            [self.key_scale.shape[-1], self.trend_scale.shape[-1], self.band, self.whiten.shape[-1]], -1
        )
        alpha = self.alpha + torch.cat([keys * self.key_scale, (trend * self.trend_scale) @ self.trends], -1)
        used = (self.whiten @ inner[..., None]).squeeze(-1) if amplitudes is None else amplitudes
        weights = self.poles.sum(used)
        above = weights.maximum(self.floor)
        far = above.log() + torch.where(weights < self.floor, weights / self.floor - 1, 0.0) + self.unit.log()
        return alpha, torch.cat([self.rho[:, : self.band] + near * self.band_scale, far], -1), used, above

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective, nats over all rows above the compact fit's loss, and its gradient."""
        alpha, rho, amplitudes, above = self.unpack(point)
        rows, columns, diagonals = _sums(alpha.exp(), rho.exp())
        loss = rows.log().sum(-1) - (self.eta_abs * alpha).sum(-1) - (self.eta_rel * rho).sum(-1) - self.base
        excess = rho[:, self.band :] - self.unit.log() - self.smooth.log()
        ratio = excess.exp()
        cosine, sine = amplitudes.chunk(2, -1)
        size = (cosine.square() + sine.square() + 1e-6).sqrt()
        penalty = self.length * _CANCELLATION * self.cost
        value = loss + _PSEUDO * (ratio - excess - 1).sum(-1) + (penalty * size).sum(-1)

        keys, distances = columns - self.eta_abs, diagonals - self.eta_rel
        by_far = (distances[:, self.band :] + _PSEUDO * (ratio - 1)) / above
        by_amplitude = self.poles.transposed(by_far) + (penalty / size).repeat(1, 2) * amplitudes
        by_key = keys[:, : self.free_keys] * self.key_scale
        trend = (keys[:, self.free_keys :] @ self.trends.mT) * self.trend_scale
        inner = (self.whiten.mT @ by_amplitude[..., None]).squeeze(-1)
        return value, torch.cat([by_key, trend, distances[:, : self.band] * self.band_scale, inner], -1)

    def optimise(self, point: Tensor) -> Tensor:
        """Return the coordinates of the optimum."""
        return minimize(self, point, steps=_STEPS, tolerance=_TOLERANCE * self.length)

    def measure(self, point: Tensor, compact: CompactPattern) -> list[ExponentialFit]:
        """Return the patterns at a point, each compared with its compact fit."""
        amplitudes = self._positive(self.unpack(point)[2], 0.05)
        alpha, rho, _, _ = self.unpack(point, amplitudes)
        cosine, sine = amplitudes.chunk(2, -1)
        cancellation = (self.cost * (cosine.square() + sine.square()).sqrt()).sum(-1)
        cosine, sine = cosine * self.unit, sine * self.unit
        later, damping = self.alpha[:, :0], self.alpha[:, :0]
        if self.free_keys < self.length:
            # The projection and its change lie in the span of the trends; their constant is the gauge that ends at 0.
            tail = alpha[:, self.free_keys :]
            # The default driver, gelsy, reads pivots that torch leaves uninitialised: last bits vary by call.
            decays = self.trends.mT.expand(len(tail), -1, -1)
            coefficients = torch.linalg.lstsq(decays, tail[..., None], driver="gels").solution
            later, constant = coefficients.squeeze(-1).split([len(TRENDS), 1], -1)
            alpha = alpha - constant
            damping = (1 / torch.tensor(TRENDS, dtype=torch.float64, device=alpha.device)).expand_as(later)
        pattern = ExponentialPattern(
            alpha[:, : self.free_keys], rho[:, : self.band], self.poles.damping, self.poles.frequency, cosine, sine,
            self.length, later, damping,
        )  # fmt: skip
        executed = pattern.to_compact()
        goal = self.eta_abs, self.eta_rel
        loss, least = (fit_loss(one.alpha, one.rho, one.log_z, *goal) for one in (executed, compact))
        numbers = torch.stack([loss - least, cancellation, _row_kl(compact, executed)], 1).tolist()
        poles = self.poles.damping.shape[-1]
        return [
            ExponentialFit(pattern[head], extra, cancelled, worst, poles, self.free_keys)
            for head, (extra, cancelled, worst) in enumerate(numbers)
        ]


def _two_decays(gram: Tensor, right: Tensor, size: int) -> Tensor:
    """Return the non-negative least-squares amplitudes of the two decays, `[N, size]`, zeros elsewhere."""
    both = torch.linalg.solve(gram, right)
    alone = right / gram.diagonal(dim1=1, dim2=2)
    # Where one would be negative the other is best alone: every product of two decays is positive.
    both = torch.where(both.flip(-1) < 0, alone, both).clamp(min=0)
    return torch.nn.functional.pad(both, (0, size - both.shape[-1]))


def _row_kl(compact: CompactPattern, other: CompactPattern) -> Tensor:
    """Return the largest KL of a row of `compact` to the same row of `other`, nats, `[N]`."""
    keys, weights = compact.alpha.exp(), compact.rho.exp()
    by_key, by_distance = compact.alpha - other.alpha, compact.rho - other.rho
    rows = _convolve(keys * by_key, weights) + _convolve(keys, weights * by_distance)
    return (rows / compact.log_z.exp() + other.log_z - compact.log_z).amax(-1)


def _convolve(left: Tensor, right: Tensor) -> Tensor:
    """Return the causal convolution of `[N, T]` with `[N, T]`."""
    length = left.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(left, 2 * length) * torch.fft.rfft(right, 2 * length), 2 * length)[:, :length]


# --- L-BFGS

# Wolfe's conditions with the usual constants: enough decrease, and a slope that is flatter by a tenth.
_DECREASE, _SLOPE = 1e-4, 0.9
# Shortest step of a line search, after which a function is finished.
_SHORTEST = 2.0**-30
_MEMORY, _PATIENCE = 12, 10  # steps that approximate the curvature, and that must gain the tolerance together


def minimize(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    steps: int,
    tolerance: float,
) -> Tensor:
    """Minimise N smooth functions at once by L-BFGS; return their lowest points `[N, n]` from `start [N, n]`.

    `evaluate(x)` returns values `[N]` and gradients `[N, n]` of all functions, at most `steps` times. A function is
    finished when the last ten accepted steps lowered it by less than `tolerance` in all. Each evaluation tries
    one step length of every function, so no function waits for the line search of another.
    """
    point = start.clone()
    value, slope = evaluate(point)
    heads, size = start.shape
    every = torch.arange(heads, device=start.device)
    taken = start.new_zeros(2, heads, _MEMORY, size)  # steps and changes of the gradient
    count = torch.zeros(heads, dtype=torch.int64, device=start.device)
    recent = value[:, None].repeat(1, _PATIENCE + 1)
    direction = -slope / slope.norm(dim=1, keepdim=True).clamp(min=1.0)
    low, high, length = value.new_zeros(heads), value.new_full((heads,), torch.inf), value.new_ones(heads)
    active = torch.ones_like(count, dtype=torch.bool)
    for _ in range(steps):
        tried = point + torch.where(active, length, 0.0)[:, None] * direction
        new_value, new_slope = evaluate(tried)
        descent = (slope * direction).sum(1)
        enough = new_value <= value + _DECREASE * length * descent
        flat = (new_slope * direction).sum(1) >= _SLOPE * descent
        accepted = active & enough & (flat | (length >= 8))

        high = torch.where(enough, high, length)
        low = torch.where(enough & ~flat, length, low)
        length = torch.where(high.isinf(), 2 * length, (low + high) / 2)

        here = every[accepted], count[accepted] % _MEMORY
        taken[0][here], taken[1][here] = (tried - point)[accepted], (new_slope - slope)[accepted]
        count += accepted
        point = torch.where(accepted[:, None], tried, point)
        value = torch.where(accepted, new_value, value)
        slope = torch.where(accepted[:, None], new_slope, slope)
        recent = torch.where(accepted[:, None], torch.cat([recent[:, 1:], value[:, None]], 1), recent)
        active &= ~(accepted & (count > _PATIENCE) & (recent[:, 0] - value < tolerance)) & (high - low > _SHORTEST)
        if not bool(active.any()):
            break
        direction = torch.where(accepted[:, None], -_product(taken, count, slope), direction)
        low, high = torch.where(accepted, 0.0, low), torch.where(accepted, torch.inf, high)
        length = torch.where(accepted, 1.0, length)
    return point


def _product(taken: Tensor, count: Tensor, slope: Tensor) -> Tensor:
    """Return the inverse Hessian's approximation times gradients `[N, n]`, in its compact form.

    Byrd, Nocedal and Schnabel 1994, theorem 2.2: products with all steps at once, where the usual recursion would
    launch four kernels for each of them.
    """
    steps, changes = taken
    memory = steps.shape[1]
    order = (count[:, None] + torch.arange(memory, device=count.device)) % memory  # oldest first
    inner, outer = (
        x.take_along_dim(order[..., None], 1).take_along_dim(order[:, None], 2)
        for x in (steps @ changes.mT, changes @ changes.mT)
    )
    curvature = inner.diagonal(dim1=1, dim2=2)
    empty = curvature <= 0  # not filled yet, or cut short in a line search
    scale = (curvature[:, -1] / outer[:, -1, -1].clamp(min=1e-300)).clamp(min=1e-12)
    scale = torch.where(empty[:, -1], 1.0, scale)[:, None]
    keep = (~empty).to(steps)
    triangle = inner.triu() * keep[:, :, None] * keep[:, None] + torch.diag_embed(empty.to(steps))
    by_step, by_change = ((x @ slope[..., None]).squeeze(-1).gather(1, order) * keep for x in (steps, changes))
    solved = torch.linalg.solve_triangular(triangle, by_step[..., None], upper=True).squeeze(-1) * keep
    right = curvature * solved + scale * ((outer @ solved[..., None]).squeeze(-1) - by_change)
    back = torch.linalg.solve_triangular(triangle.mT, (right * keep)[..., None], upper=False).squeeze(-1) * keep
    back, solved = (torch.zeros_like(x).scatter(1, order, x)[:, None] for x in (back, scale * solved))
    return scale * slope + (back @ steps - solved @ changes).squeeze(1)
