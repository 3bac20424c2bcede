"""`fit_exponential` fits exponential patterns, Eq. (S.31), whose heads run in time linear in the context.

The first w distances, the band, have free logits. The weights g of distances from w on are a positive sum of damped
cosines, the poles. A fit begins with the compact fit of the same head and takes five steps:

1. Poles: dampings and frequencies are chosen one pole after another for the compact fit's g, then stay fixed.
2. Amplitudes: least squares, moved towards a sum that is surely positive where g would come near zero.
3. Full form: L-BFGS (lbfgs.py) minimises the cross-entropy of Eq. (4) over key logits, band and amplitudes, with a
   penalty on cancellation among poles, which would lose low-precision digits, and a prior that keeps g positive.
4. Short form: the same from the full form on, but with key logits of 16 keys and a sum of decays for all others.
5. Acceptance: a head takes the short form if that is nearly as close as the full one, else the full form. If neither
   is close enough, all steps are repeated with 32 poles in place of 16. If these fail too, it keeps its compact fit.

The file begins with the public functions and step 5, which call the others; steps 1 to 4 follow in order.

Shapes: N heads, T positions, w distances of the band, n = T - w beyond it, P poles, S keys with a logit of their own.
KL is in nats per row. The objective of L-BFGS is in nats over all T rows. All numbers are float64.

Unless comments say otherwise, their numbers are of the twelve heads of tests/fixtures (124M, T = 4,096, w = 128, 16
poles, full form), and their median is the sixth of them. With the values below these have extra KL 0.0036 nats in the
median and 0.061 at most, cancellation 2.0 and 3.1.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from saf.errors import InputError
from saf.fit import consistent_targets, fit_loss, fit_proportional, with_ridge
from saf.lbfgs import minimize
from saf.patterns import CompactPattern, DampedCosines, ExponentialPattern

# Nats per row by which an exponential pattern may be further from its target than the compact fit. A tenth of the 0.2
# nats within which a compact fit is accepted; perplexities after training agree with compact ones to 0.03 points.
MAX_EXTRA_KL = 0.02
# Mean of (sum of the poles' envelopes) / g. Rounding errors grow by this factor: 4 takes two of bfloat16's eight bits.
MAX_CANCELLATION = 4.0
# Nats per row that the short form may cost more than the full one. A quarter of MAX_EXTRA_KL.
MAX_SHORT_KL = 0.005

# Numbers of poles, tried in turn: a head's time grows with them. 8 / 32 poles: extra KL 0.0077 / 0.0018 in the median.
_POLES = (16, 32)
# Elements of the largest array, by device: it fits a CPU's cache, or a tenth of a GPU's memory. This limits the heads
# that are fitted together.
_MAX_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
# A head is finished when the last ten steps of L-BFGS gained less than this, in nats per row. A tenth of it changes the
# extra KL by less than 1e-5 in a third more steps.
_TOLERANCE = 1e-5


# --- public functions, and 5. acceptance


@dataclass(frozen=True, eq=False)
class ExponentialFit:
    """One head's pattern, compared with the head's compact fit."""

    pattern: CompactPattern | ExponentialPattern  # the compact fit where no exponential one was accepted
    extra_kl: float
    """Nats per row further from the target than the compact fit; of the best attempt if none was accepted, and 0 for a
    head that is too sharp for one."""
    cancellation: float  # mean of (sum of the poles' envelopes) / g beyond the band, weighted by attention mass


_Forms = tuple[ExponentialFit, ExponentialFit | None]
"""A head's fit in the full form and, if that is tried, in the short form."""


def fit_exponential(eta_abs: Tensor, eta_rel: Tensor, *, band: int = 128, pairs: int = _POLES[0]) -> ExponentialPattern:
    """Return exponential patterns fitted to targets with these marginals `[..., T]`, in float64.

    The first `band` distances have free weights, and `pairs` poles, two of them without frequency, give the others.
    Every key has a logit of its own. Unlike `fit_exponential_heads`, this accepts every fit;
    `saf.fit_kl(pattern.to_compact(), ...)` measures it. Raises InputError for marginals that no causal pattern has, and
    for a head too sharp for an FFT.
    """
    eta_abs, eta_rel = consistent_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    targets = eta_abs.reshape(-1, length), eta_rel.reshape(-1, length)
    alpha, rho, _ = fit_proportional(*targets)
    compact = CompactPattern.from_parameters(alpha, rho).canonical()
    fits = _fit(compact, *targets, band=band, num_poles=pairs, short=False)
    patterns: list[Any] = [full.pattern for full, _ in fits]
    if any(pattern.kind == CompactPattern.kind for pattern in patterns):
        raise InputError("targets must be wide enough for an exponential fit, got a sharp one; keep its compact fit")
    stacked = ExponentialPattern.stack(patterns).to(device=eta_abs.device)
    return stacked.map(lambda _, x: x.reshape(*shape[:-1], x.shape[-1]))


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

    A head gets 16 poles if they stay within `max_extra_kl` and `max_cancellation`, else 32, else keeps its compact fit,
    as does a head too sharp for an FFT. The short form of alpha is taken if it costs at most `max_short_kl` nats more
    and stays within both limits; with None it is not tried, and every key has its own logit.
    """

    def accepted(fit: ExponentialFit, max_kl: float) -> bool:
        return fit.extra_kl <= max_kl and fit.cancellation <= max_cancellation

    targets = consistent_targets(eta_abs, eta_rel)
    compact = compact.to(dtype=torch.float64, device=targets[0].device).canonical()
    best: dict[int, ExponentialFit] = {}
    pending = list(range(len(compact)))
    for num_poles in _POLES:
        operands = compact[pending], *(x[pending] for x in targets)
        forms = _fit(*operands, band=band, num_poles=num_poles, short=max_short_kl is not None)
        tried, pending = pending, []
        for head, (full, short) in zip(tried, forms, strict=True):
            max_kl = min(full.extra_kl + (max_short_kl or 0.0), max_extra_kl)
            fit = short if short is not None and accepted(short, max_kl) else full
            if accepted(fit, max_extra_kl) or head not in best or fit.extra_kl < best[head].extra_kl:
                best[head] = fit
            if not accepted(fit, max_extra_kl):
                pending.append(head)
    for head in pending:
        best[head] = replace(best[head], pattern=compact[head])
    return [best[head] for head in range(len(compact))]


def _fit(
    compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, *, band: int, num_poles: int, short: bool
) -> list[_Forms]:
    """Fit heads in the full form and, with `short`, in the short form too."""
    if band < 1 or num_poles < len(_DECAYS):
        raise InputError(f"band must be at least 1 and pairs at least {len(_DECAYS)}, got {band} and {num_poles}")
    # The largest arrays have 2P amplitudes by T, and a spectrum of 8T / 2 complex points for each damping of the grid.
    largest = compact.length * max(2 * num_poles, 8 * len(_DAMPINGS))
    count = max(1, _MAX_ELEMENTS[eta_abs.device.type] // largest)
    fits: list[_Forms] = []
    for first in range(0, len(compact), count):
        heads = slice(first, first + count)
        fits += _fit_group(compact[heads], eta_abs[heads], eta_rel[heads], band, num_poles, short)
    return fits


def _fit_group(
    compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, band: int, num_poles: int, short: bool
) -> list[_Forms]:
    """Fit some heads at once: steps 1 to 4. A head whose row sums an FFT loses by rounding keeps its compact fit."""
    length = compact.length
    if length <= band:  # no distance is left for poles
        none = compact.rho[:, :0]
        same = ExponentialPattern(compact.alpha, compact.rho, none, none, none, none, length)
        return [(ExponentialFit(one, 0.0, 1.0), None) for one in same.singles()]
    rows, (_, mass) = _row_and_marginal_sums(torch.stack([compact.alpha, compact.rho]))
    # A sharp head, such as one of previous tokens, may have logits 60 nats apart, more than an FFT's 16 digits.
    if (lost := ((rows.log() - compact.log_z).abs() > _LOST).any(-1)).any():
        operands = compact[~lost], eta_abs[~lost], eta_rel[~lost]
        others = iter(_fit_group(*operands, band, num_poles, short) if not lost.all() else ())
        stay = (ExponentialFit(one, 0.0, 1.0) for one in compact.singles())
        return [(fit, None) if out else next(others) for fit, out in zip(stay, lost.tolist(), strict=True)]
    weights = (compact.rho - compact.rho.amax(-1, keepdim=True)).exp()
    poles = _choose_poles(weights[:, band:], mass[:, band:], num_poles, length)
    tolerance = _TOLERANCE * length
    full = _Objective(compact, eta_abs, eta_rel, band, poles)
    optimum = minimize(full, full.start(), tolerance=tolerance)
    fits = full.measure(optimum)
    if not short or length <= 4 * _SINKS:  # of so few keys a short form saves little
        return [(fit, None) for fit in fits]
    objective = _Objective(compact, eta_abs, eta_rel, band, poles, short=True)
    optimum = minimize(objective, objective.start_from(full, optimum), tolerance=tolerance)
    return list(zip(fits, objective.measure(optimum), strict=True))


# --- sums of several steps

# Nats by which an FFT may miss the logarithm of a row sum of the compact fit.
_LOST = 1e-3
# Errors of an FFT in float64, as a share of the largest sum.
_ROUNDING = 1e-14


def _row_and_marginal_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return row sums Z `[N, T]`, and column and diagonal sums `[2, N, T]`, of patterns with logits `[2, N, T]`.

    By FFT in float64, whose errors are relative to the largest row: good for a step of a fit. Reported and executed
    numbers are computed without it.
    """
    length, factors = logits.shape[-1], logits.exp()
    spectra = torch.fft.rfft(factors, 2 * length)
    # By rounding, a tiny row may come out as zero or below. It is at least its last term, exp(alpha_i + rho_0): without
    # this bound, a fit could lower its loss without limit by such a row's logarithm.
    last = (factors[0] * factors[1, :, :1]).clamp(min=1e-300)
    rows = torch.maximum(torch.fft.irfft(spectra[0] * spectra[1], 2 * length)[..., :length], last)
    correlations = torch.fft.irfft(spectra.conj() * torch.fft.rfft(1 / rows, 2 * length), 2 * length)[..., :length]
    # Sums that are nothing but rounding may be negative, and would count beside a weight as small as they are.
    correlations = correlations.where(correlations > _ROUNDING * correlations.amax(-1, keepdim=True), 0.0)
    # Column sums are correlations of 1 / Z with exp(rho), diagonal sums with exp(alpha): hence the flip.
    return rows, correlations.flip(0) * factors


# --- 1. poles

# Dampings per distance of the first two poles, which have no frequency: a constant, and a fall by e in 40 distances.
# Both are positive, so step 2 can fall back on a non-negative sum of them. 10 or 160 distances: 0.0002 nats more in the
# median.
_DECAYS = (0.0, 1 / 40)
# Dampings of the other poles at T = 4,096; those of other lengths scale with 1 / T. So a cosine does not fall, or falls
# by e over the whole pattern, a third, an eighth or a 27th of it. These heads are fitted as well without damping.
_DAMPINGS = (0.0, 1 / 4000, 1 / 1500, 1 / 500, 1 / 150)
# Lowest frequency of the other poles, in radians over the whole pattern. The decays fit slower trends; 0.5 and 6 are as
# good.
_LOWEST_FREQUENCY = 2.5
# Ridge of the greedy choice, as a share of the mean of the diagonal; from 1e-8 to 1e-3 the fits are as good.
_GREEDY_RIDGE = 1e-5


def _choose_poles(weights: Tensor, mass: Tensor, num_poles: int, length: int) -> tuple[Tensor, Tensor]:
    """Return damping and frequency `[N, P]` for weights g `[N, n]` with diagonal sums `mass`: decays, then others.

    Orthogonal matching pursuit: each is the pole of a grid that correlates most with the residual of g after the
    poles before it, relative to g and weighted by attention mass.
    """
    heads, size = weights.shape
    distance = torch.arange(size, dtype=torch.float64, device=weights.device)
    # The choice minimises the sum over distances of mass * (sum of poles / g - 1)^2: least squares that fit poles times
    # `relative` to `root_mass`. Amplitudes absorb any factor of `relative`, so its mean square is set to one.
    root_mass = mass.sqrt()
    relative = root_mass / weights
    relative = relative / relative.square().mean(-1, keepdim=True).sqrt()

    # The grid: every damping with every frequency of an FFT of `points` points, 2π / points apart.
    grid = torch.tensor(_DAMPINGS, dtype=torch.float64, device=weights.device) * (4096 / length)
    envelopes = (-grid[:, None] * distance).exp()
    energy = (relative.square() @ envelopes.square().mT).clamp(min=1e-300)  # of a cosine and its sine together
    points = 8 * length
    frequencies = torch.arange(points // 2 + 1, device=weights.device) * (2 * math.pi / points)
    usable = frequencies * length >= _LOWEST_FREQUENCY
    usable[-4:] = False  # at π the sine is zero; the three next to it are left out too

    damping = weights.new_zeros(heads, num_poles)
    frequency = torch.zeros_like(damping)
    # Two columns a pole, its cosine and its sine. The sine of a decay is zero: the ridge keeps the system solvable.
    atoms = weights.new_zeros(heads, size, 2 * num_poles)
    for pole, rate in enumerate(_DECAYS):
        damping[:, pole] = rate
        atoms[:, :, 2 * pole] = relative * (-rate * distance).exp()
    gram = atoms.mT @ atoms
    for pole in range(len(_DECAYS), num_poles):
        used = 2 * pole
        # Least squares on the poles so far, then, by FFT, the correlation of its residual with every pole of the grid.
        known = atoms[:, :, :used]
        system = with_ridge(gram[:, :used, :used], _GREEDY_RIDGE / used)
        amplitudes = torch.linalg.solve(system, known.mT @ root_mass[..., None])
        residual = (root_mass - (known @ amplitudes).squeeze(-1)) * relative
        spectrum = torch.view_as_real(torch.fft.rfft(residual[:, None] * envelopes, points))
        correlation = spectrum.square().sum(-1) / energy[..., None]
        best = (correlation * usable).flatten(1).argmax(-1)
        i_damping, i_frequency = best // len(usable), best % len(usable)
        damping[:, pole] = grid[i_damping]
        frequency[:, pole] = i_frequency * (2 * math.pi / points)
        # Append the best pole's cosine and sine, and their products with all poles so far.
        phase = frequency[:, pole, None] * distance
        scaled = relative * envelopes[i_damping]
        atoms[:, :, used], atoms[:, :, used + 1] = scaled * phase.cos(), scaled * phase.sin()
        new = atoms[:, :, : used + 2].mT @ atoms[:, :, used : used + 2]
        gram[:, : used + 2, used : used + 2] = new
        gram[:, used : used + 2, : used + 2] = new.mT
    return damping, frequency


# --- 2. amplitudes

# Distances on either side over which g is averaged in the log domain, for the prior and the bounds; 8 and 128 are as
# good. It must only be positive and of the size of g.
_SMOOTH = 32
# Ridge of the least squares for the amplitudes, as a share of the mean of the diagonal; 1e-8 and 1e-2 are as good.
_RIDGE = 1e-4
# Shares of the smoothed g. The start is moved until g is at least the first. Below the second, the floor, the objective
# continues log g as a straight line. The fitted g is moved until it is at least the third.
_START_SHARE, _FLOOR_SHARE, _FINAL_SHARE = 0.25, 0.15, 0.05


class _FarWeights:
    """The weights g of distances beyond the band: amplitudes `[N, 2P]` of fixed poles, and bounds that keep g positive.

    Amplitudes are in units of `unit`: in these g is about one where attention mass lies. `smooth` is the compact fit's
    g, averaged in the log domain over neighbouring distances.
    """

    def __init__(self, mass: Tensor, weights: Tensor, poles: DampedCosines):
        """Take the diagonal sums and the weights g of the compact fit, `[N, n]`."""
        self.poles = poles
        self.unit = mass.sum(-1, keepdim=True) / (mass / weights).sum(-1, keepdim=True)
        weights = weights / self.unit
        window = weights.new_ones(1, 1, 2 * _SMOOTH + 1)
        log_sum = conv1d(weights.log()[:, None], window, padding=_SMOOTH).squeeze(1)
        number = conv1d(torch.ones_like(weights)[:, None], window, padding=_SMOOTH).squeeze(1)  # fewer at the ends
        self.smooth = (log_sum / number).exp()
        self.floor = _FLOOR_SHARE * self.smooth
        self.log_smooth, self.log_floor = ((x * self.unit).log() for x in (self.smooth, self.floor))

        # Least squares relative to g, weighted by attention mass. Its Hessian is near that of the cross-entropy, so
        # L-BFGS works on coordinates in which it is the identity: amplitudes = whiten @ coordinates.
        relative = mass.sqrt() / weights
        atoms = poles.atoms() * relative[..., None]
        gram, right = atoms.mT @ atoms, (atoms.mT @ mass.sqrt()[..., None]).squeeze(-1)
        gram = with_ridge(gram, _RIDGE / gram.shape[-1])
        decays = len(_DECAYS)  # the first columns: the sines of all poles follow after their cosines
        self.fallback = _two_decays(gram[:, :decays, :decays], right[:, :decays], gram.shape[-1])
        factor = torch.linalg.cholesky(gram)
        self.whiten = torch.linalg.inv(factor).mT
        closest = self.positive(torch.cholesky_solve(right[..., None], factor).squeeze(-1), _START_SHARE)
        self.start = (factor.mT @ closest[..., None]).squeeze(-1)  # in whitened coordinates

        # With the compact fit's g in the denominator the mean cancellation is linear in the amplitudes.
        envelopes = DampedCosines(poles.damping, torch.zeros_like(poles.damping), poles.count)
        sizes = envelopes.transposed(mass / weights)[:, : poles.damping.shape[-1]]
        self.cancellation = sizes / mass.sum(-1, keepdim=True)  # of poles with amplitude one

    def positive(self, amplitudes: Tensor, share: float) -> Tensor:
        """Return the amplitudes moved towards the two decays until g is at least a share of its smoothed form."""
        weights, decays = self.poles.sum(amplitudes), self.poles.sum(self.fallback)
        # Where the decays are below the smoothed form, only a share of them can be reached.
        bound = share * torch.minimum(self.smooth, decays)
        step = torch.where(weights < bound, (bound - weights) / (decays - weights).clamp(min=1e-300), 0.0)
        step = step.amax(-1, keepdim=True).clamp(max=1.0)
        return (1 - step) * amplitudes + step * self.fallback


def _two_decays(gram: Tensor, right: Tensor, size: int) -> Tensor:
    """Return the non-negative least-squares amplitudes of the two decays, `[N, size]`, zeros elsewhere."""
    both = torch.linalg.solve(gram, right)
    alone = right / gram.diagonal(dim1=1, dim2=2)
    # Where one amplitude would be negative, the other decay alone is best: their inner product is positive.
    both = torch.where(both.flip(-1) < 0, alone, both).clamp(min=0)
    return pad(both, (0, size - both.shape[-1]))


# --- 3. and 4. the objective of L-BFGS, in the full and in the short form

# Keys at the beginning that have a logit of their own in the short form: sinks. 4 or 64 are as good to 0.0002 nats.
_SINKS = 16
# Keys over which the decays of the short form fall by e: in SmolLM2-135M alpha falls slowly over 100 keys and more. The
# heads of tests/fixtures have little trend: without any decay the short form costs 0.0003 nats more.
_TREND_LENGTHS = (24.0, 96.0, 384.0)
# Ridge of the least squares for the trends, as a share of the trace.
_TREND_RIDGE = 1e-6
# Nats per row and unit of mean cancellation: a group lasso over amplitudes. Ten times as much lowers the cancellation
# from 2.0 to 1.4 for 0.0013 nats. These heads need none; others came to a cancellation of 50 to 6,000 without it.
_CANCELLATION_PENALTY = 1e-3
# Amplitude, in units of `unit`, below which the penalty's absolute value is smoothed, so that it has a slope at zero.
_SMALL_AMPLITUDE = 1e-3
# Weight, in nats over all rows, of the prior that g equals its smoothed form at each distance. It keeps g positive:
# without it extra KL rises to 0.052 nats, with ten times as much to 0.0088.
_PRIOR_WEIGHT = 0.1


class _KeyLogits:
    """Key logits alpha by their parameters: all of them, or the first S and amplitudes of trends that give the others.

    The trends of the short form are decays from key S on, and a constant; the full form has none. Parameters are
    `origin + scale * x`, with `scale` such that the curvature of the cross-entropy in each x is about one nat.
    """

    def __init__(self, alpha: Tensor, eta_abs: Tensor, *, short: bool):
        """Take the compact fit's alpha and the target's column sums, `[N, T]`."""
        self.count = _SINKS if short else alpha.shape[-1]  # S
        lengths = torch.tensor([*_TREND_LENGTHS, math.inf] if short else [], dtype=torch.float64, device=alpha.device)
        position = torch.arange(alpha.shape[-1] - self.count, dtype=torch.float64, device=alpha.device)
        self.trends = (-position / lengths[:, None]).exp()  # from key S on
        first, rest = alpha[:, : self.count], alpha[:, self.count :]
        mass = eta_abs[:, self.count :]
        if short:  # least squares, weighted by attention mass
            weighted = self.trends * mass[:, None]
            gram = with_ridge(weighted @ self.trends.mT, _TREND_RIDGE)
            rest = torch.linalg.solve(gram, weighted @ rest[..., None]).squeeze(-1)
        self.origin = torch.cat([first, rest], -1)
        # The Hessian of the cross-entropy in a key's logit is at most its column sum.
        self.scale = torch.cat([eta_abs[:, : self.count].rsqrt(), (mass @ self.trends.square().mT).rsqrt()], -1)

    def logits(self, parameters: Tensor) -> Tensor:
        """Return alpha, `[N, T]`."""
        return torch.cat([parameters[:, : self.count], parameters[:, self.count :] @ self.trends], -1)

    def gradient(self, by_key: Tensor) -> Tensor:
        """Return derivatives by the parameters from derivatives by alpha."""
        return torch.cat([by_key[:, : self.count], by_key[:, self.count :] @ self.trends.mT], -1)

    def parts(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return alpha, trend and trend_damping of an ExponentialPattern."""
        if not len(self.trends):
            return {"alpha": parameters}
        first, trend, constant = parameters.split([self.count, len(_TREND_LENGTHS), 1], -1)
        damping = 1 / torch.tensor(_TREND_LENGTHS, dtype=torch.float64, device=parameters.device)
        # A constant added to all of alpha changes no pattern. An ExponentialPattern has none: its trends fall to 0.
        return {"alpha": first - constant, "trend": trend, "trend_damping": damping.expand_as(trend)}


class _Objective:
    """The penalised loss of one group of heads, in coordinates `[N, n]` in which its curvature is near one.

    Coordinates are of the key logits' parameters, of the band's logits, and of amplitudes (whitened).
    """

    def __init__(
        self, compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, band: int, poles: tuple[Tensor, Tensor],
        *, short: bool = False,
    ):  # fmt: skip
        self.compact, self.eta, self.band = compact, torch.stack([eta_abs, eta_rel]), band
        self.keys = _KeyLogits(compact.alpha, eta_abs, short=short)
        _, (_, mass) = _row_and_marginal_sums(torch.stack([self.keys.logits(self.keys.origin), compact.rho]))
        cosines = DampedCosines(*poles, compact.length - band)
        self.far = _FarWeights(mass[:, band:], compact.rho[:, band:].exp(), cosines)
        self.penalty = compact.length * _CANCELLATION_PENALTY * self.far.cancellation

        self.sizes = [self.keys.origin.shape[-1], band, self.far.start.shape[-1]]
        # As with keys; the constant bounds the steps of distances that get almost no attention.
        band_scale = (eta_rel[:, :band] + 1e-3).rsqrt()
        self.scale = torch.cat([self.keys.scale, band_scale, torch.ones_like(self.far.start)], -1)
        self.origin = torch.cat([self.keys.origin, compact.rho[:, :band], torch.zeros_like(self.far.start)], -1)
        logits = torch.stack([compact.alpha, compact.rho])
        self.compact_loss = self._loss(logits, _row_and_marginal_sums(logits)[0])

    def _loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the cross-entropy, Eq. (4), in nats over all rows."""
        return rows.log().sum(-1) - (self.eta * logits).sum((0, -1))

    def start(self) -> Tensor:
        """Return the coordinates of the compact fit with least-squares amplitudes."""
        return torch.cat([torch.zeros_like(self.scale[:, : sum(self.sizes[:2])]), self.far.start], -1)

    def start_from(self, other: "_Objective", point: Tensor) -> Tensor:
        """Return the coordinates of another objective's band and amplitudes, with this one's initial key logits."""
        _, band, _ = point.split(other.sizes, -1)
        _, _, amplitudes = other.unpack(point)
        amplitudes = amplitudes * (other.far.unit / self.far.unit)
        whitened = torch.linalg.solve_triangular(self.far.whiten, amplitudes[..., None], upper=True).squeeze(-1)
        return torch.cat([torch.zeros_like(self.keys.origin), band, whitened], -1)

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the key logits' parameters, logits of the band, and amplitudes `[N, 2P]`."""
        keys, band, whitened = torch.addcmul(self.origin, point, self.scale).split(self.sizes, -1)
        return keys, band, (self.far.whiten @ whitened[..., None]).squeeze(-1)

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective, nats over all rows above the compact fit's loss, and its gradient."""
        far, (keys, band, amplitudes) = self.far, self.unpack(point)
        # Below the floor the logarithm goes on as a straight line: a step may pass through negative weights.
        share = far.poles.sum(amplitudes) / far.floor
        above = share.clamp(min=1.0)
        rho = above.log() + (share - 1).clamp(max=0.0) + far.log_floor
        logits = torch.stack([self.keys.logits(keys), torch.cat([band, rho], -1)])
        rows, sums = _row_and_marginal_sums(logits)
        value = self._loss(logits, rows) - self.compact_loss
        # The prior, r - 1 - log r for the ratio r of g to its smoothed form: zero at r = 1, infinite at r = 0.
        log_ratio = rho - far.log_smooth
        excess = log_ratio.expm1()
        value = value + _PRIOR_WEIGHT * (excess - log_ratio).sum(-1)
        # The penalty: a pole's amplitude, of cosine and sine together, times its share of the mean cancellation.
        cosine_and_sine = amplitudes.unflatten(-1, (2, -1))
        size = (cosine_and_sine.square().sum(1) + _SMALL_AMPLITUDE**2).sqrt()
        value = value + (self.penalty * size).sum(-1)

        by_key, by_distance = sums - self.eta  # Eq. (20)
        by_far = (by_distance[:, self.band :] + _PRIOR_WEIGHT * excess) / (above * far.floor)
        by_size = ((self.penalty / size)[:, None] * cosine_and_sine).flatten(1)
        by_whitened = (far.whiten.mT @ (far.poles.transposed(by_far) + by_size)[..., None]).squeeze(-1)
        gradient = torch.cat([self.keys.gradient(by_key), by_distance[:, : self.band], by_whitened], -1)
        return value, gradient * self.scale

    def measure(self, point: Tensor) -> list[ExponentialFit]:
        """Return the patterns at a point, each compared with its compact fit by their exact losses."""
        keys, band, amplitudes = self.unpack(point)
        poles, unit = self.far.poles, self.far.unit
        cosine, sine = self.far.positive(amplitudes, _FINAL_SHARE).chunk(2, -1)
        cancellation = (self.far.cancellation * (cosine.square() + sine.square()).sqrt()).sum(-1)
        pattern = ExponentialPattern(
            **self.keys.parts(keys), band=band, damping=poles.damping, frequency=poles.frequency,
            cosine=cosine * unit, sine=sine * unit, length=self.compact.length,
        )  # fmt: skip
        # Exact losses, by the sums in the log domain that execution has, not by FFT.
        loss, compact_loss = (
            fit_loss(one.alpha, one.rho, one.log_z, *self.eta) for one in (pattern.to_compact(), self.compact)
        )
        numbers = torch.stack([loss - compact_loss, cancellation], 1).tolist()
        # On the CPU: each of the single patterns checks its values, and would wait for a GPU.
        return [
            ExponentialFit(single, *each)
            for single, each in zip(pattern.to(device="cpu").singles(), numbers, strict=True)
        ]
