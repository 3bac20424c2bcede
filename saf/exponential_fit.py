"""`fit_exponential` fits exponential patterns, Eq. (S.31): a free band of distances, then a sum of damped cosines.

A compact fit comes first. Poles are chosen greedily for it, and then fixed. Band, amplitudes and key logits minimise
the cross-entropy of Eq. (4), with a penalty on cancellation among poles, which would lose low-precision digits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from saf.errors import InputError, check_keywords
from saf.fit import check_fitter, check_targets, fit_loss, fit_proportional
from saf.patterns import CompactPattern, DampedCosines, ExponentialPattern

MAX_EXTRA_KL = 0.02  # nats per row by which an exponential pattern may be further from its target than the compact fit
MAX_CANCELLATION = 4.0  # limit of the mean of (sum of the poles' envelopes) / g: rounding errors grow by this factor
MAX_SHORT_KL = 0.005  # nats per row that the short form of alpha may cost more than one with every key free

_POLES = (16, 32)  # numbers of poles, tried in turn
# The short form of alpha: the first keys have logits of their own, a sum of a few decays and a constant has the others.
_SINKS = 16  # number of the first keys
_TREND_LENGTHS = (24.0, 96.0, 384.0)  # keys over which the decays fall by e: real sinks fade within a few hundred keys
_DECAYS = 2  # poles without frequency: a constant, and one that falls by e over _DECAY_LENGTH distances
_DECAY_LENGTH = 40.0
_DAMPINGS = (0.0, 1 / 4000, 1 / 1500, 1 / 500, 1 / 150)  # of the poles tried, at T = 4096; they scale with 1 / T
_LOWEST_FREQUENCY = 2.5  # radians over T; the decays represent lower frequencies
_CANCELLATION_PENALTY = 1e-3  # nats per row and unit of mean cancellation: a group lasso over amplitudes
_PRIOR_WEIGHT = 0.1  # per distance, of the prior that g equals its smoothed form, which keeps g positive
_RIDGE, _GREEDY_RIDGE, _TREND_RIDGE = 1e-4, 1e-5, 1e-6  # shares of a Gram matrix's trace, added to its diagonal
_SMOOTH = 32  # distances on either side that the smoothed g averages over
_EVALUATIONS, _TOLERANCE = 200, 1e-5  # at most; nats per row that the last ten steps must gain together
_MAX_ENTRIES = {"cpu": 1 << 21, "cuda": 1 << 27}  # of the largest array: a CPU's cache, a tenth of a GPU's memory


@dataclass(frozen=True, eq=False)
class ExponentialFit:
    """One head's accepted pattern, compared with the head's compact fit."""

    pattern: CompactPattern | ExponentialPattern  # the compact fit where no exponential one was accepted
    extra_kl: float
    """Nats per row further from the target than the compact fit; of the best attempt if none was accepted."""
    cancellation: float  # mean of (sum of the poles' envelopes) / g beyond the band, weighted by attention mass
    poles: int  # 0 for a compact pattern
    free_keys: int  # number of keys with a logit of their own


def fit_exponential(eta_abs: Tensor, eta_rel: Tensor, *, band: int = 128, pairs: int = _POLES[0]) -> ExponentialPattern:
    """Return exponential patterns fitted to targets with these marginals `[..., T]`, in float64.

    The first `band` distances have free weights; `pairs` is the number of poles, two of them without frequency, that
    give the others. Every key has a logit of its own. `saf.fit_kl(pattern.to_compact(), ...)` measures the fit, and
    this function sets no limit to it, unlike `fit_exponential_heads`. Raises InputError for marginals that no causal
    pattern has.
    """
    if band < 1 or pairs < _DECAYS:
        raise InputError(f"band must be at least 1 and pairs at least {_DECAYS}, got {band} and {pairs}")
    eta_abs, eta_rel = check_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    targets = eta_abs.reshape(-1, length), eta_rel.reshape(-1, length)
    alpha, rho, _ = fit_proportional(*targets)
    compact = CompactPattern.from_parameters(alpha, rho).canonical()
    fits = _fit(compact, *targets, band=band, num_poles=pairs, short=False)
    patterns: list[Any] = [full.pattern for full, _ in fits]
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

    A head gets 16 poles if they stay within `max_extra_kl` and `max_cancellation`, else 32, else keeps its compact fit.
    The short form of alpha is taken if it costs at most `max_short_kl` nats more and stays within both limits; with
    None it is not tried, and every key has its own logit.
    """
    if band < 1:
        raise InputError(f"band must be at least 1, got {band}")
    targets = check_targets(eta_abs, eta_rel)
    compact = compact.to(dtype=torch.float64, device=targets[0].device).canonical()
    best: dict[int, ExponentialFit] = {}
    pending = list(range(len(compact)))
    for num_poles in _POLES:
        operands = compact[pending], *(x[pending] for x in targets)
        forms = _fit(*operands, band=band, num_poles=num_poles, short=max_short_kl is not None)
        tried, pending = pending, []
        for head, (full, short) in zip(tried, forms, strict=True):
            limit = min(full.extra_kl + (max_short_kl or 0.0), max_extra_kl)
            fit = short if short.extra_kl <= limit and short.cancellation <= max_cancellation else full
            passed = fit.extra_kl <= max_extra_kl and fit.cancellation <= max_cancellation
            if passed or head not in best or fit.extra_kl < best[head].extra_kl:
                best[head] = fit
            if not passed:
                pending.append(head)
    for head in pending:
        best[head] = replace(best[head], pattern=compact[head], poles=0, free_keys=compact.length)
    return [best[head] for head in range(len(compact))]


def split_options(fitter: str, options: dict[str, Any], storage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the compact fit and, for exponential storage, those of `fit_exponential_heads`.

    Raises InputError for an unknown fitter, and for options that neither takes.
    """
    names = check_keywords("", (), fit_exponential_heads) if storage == "exponential" else []
    compact = {name: value for name, value in options.items() if name not in names}
    exponential = {name: value for name, value in options.items() if name in names}
    check_fitter(fitter, compact)
    return compact, exponential


def _fit(
    compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, *, band: int, num_poles: int, short: bool
) -> list[tuple[ExponentialFit, ExponentialFit]]:
    """Return each head's fit with every key free, and in the short form; the same fit twice where that is not tried.

    Choose poles, optimise, and measure each result without the fit's own approximations.
    """
    length = compact.length
    # The largest arrays have 2P amplitudes by T, and a spectrum of 8T / 2 complex points for each damping of the grid.
    size = max(1, _MAX_ENTRIES[eta_abs.device.type] // (length * max(2 * num_poles, 8 * len(_DAMPINGS))))
    if not 0 < len(compact) <= size:  # no heads, or more than fit into memory: group by group
        groups = [slice(first, first + size) for first in range(0, len(compact), size)]
        options = {"band": band, "num_poles": num_poles, "short": short}
        return [fits for group in groups for fits in _fit(compact[group], eta_abs[group], eta_rel[group], **options)]
    if length <= band:  # no distance is left for poles
        none = compact.rho[:, :0]
        same = ExponentialPattern(compact.alpha, compact.rho, none, none, none, none, length)
        fits = [ExponentialFit(same[head], 0.0, 1.0, 0, length) for head in range(len(same))]
        return list(zip(fits, fits, strict=True))
    weights = (compact.rho - compact.rho.amax(-1, keepdim=True)).exp()
    _, (_, mass) = _sums(torch.stack([compact.alpha, compact.rho]))
    poles = _choose_poles(weights[:, band:], mass[:, band:], num_poles - _DECAYS, length)
    tolerance = _TOLERANCE * length
    objective = _Objective(compact, eta_abs, eta_rel, band, poles)
    point = minimize(objective, objective.start(), tolerance=tolerance)
    full = objective.measure(point, compact)
    if not short or length <= 4 * _SINKS:
        return list(zip(full, full, strict=True))
    short_objective = _Objective(compact, eta_abs, eta_rel, band, poles, short=True)
    point = minimize(short_objective, short_objective.start_from(objective, point), tolerance=tolerance)
    return list(zip(full, short_objective.measure(point, compact), strict=True))


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return row sums Z `[N, T]`, and column and diagonal sums `[2, N, T]`, of patterns with logits `[2, N, T]`.

    By FFT in float64, whose errors are relative to the largest row: good for a step of a fit. Reported and executed
    numbers are computed without it.
    """
    length, factors = logits.shape[-1], logits.exp()
    spectra = torch.fft.rfft(factors, 2 * length)
    rows = torch.fft.irfft(spectra[0] * spectra[1], 2 * length)[..., :length].clamp(min=1e-300)
    correlations = torch.fft.irfft(spectra.conj() * torch.fft.rfft(1 / rows, 2 * length), 2 * length)[..., :length]
    # The sum of a column correlates 1 / Z with exp(rho), that of a diagonal with exp(alpha).
    return rows, correlations.flip(0) * factors


def _with_ridge(gram: Tensor, share: float) -> Tensor:
    """Add a share of the trace to the diagonal of matrices `[N, n, n]`."""
    ridge = share * gram.diagonal(dim1=1, dim2=2).sum(-1)
    return gram + ridge[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


# --- poles


def _choose_poles(weights: Tensor, mass: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return damping and frequency `[N, P]`: the decays, then `count` poles for g `[N, n]` with diagonal sums `mass`.

    Orthogonal matching pursuit: each is the pole of the grid that correlates most with the residual of g after the
    poles before it, relative to g and weighted by attention mass.
    """
    heads, size = weights.shape
    at = torch.arange(size, dtype=torch.float64, device=weights.device)
    grid = torch.tensor(_DAMPINGS, dtype=torch.float64, device=weights.device) * (4096 / length)
    envelopes = (-grid[:, None] * at).exp()
    root_mass = mass.sqrt()
    relative = root_mass / weights
    relative = relative / relative.square().mean(-1, keepdim=True).sqrt()
    energy = (relative.square() @ envelopes.square().mT).clamp(min=1e-300)
    points = 8 * length  # of the FFT: the frequencies of the grid are 2π / points apart
    frequencies = torch.arange(points // 2 + 1, device=weights.device) * (2 * math.pi / points)
    usable = frequencies * length >= _LOWEST_FREQUENCY
    usable[-4:] = False  # at π the sine is zero; the three next to it are left out too

    damping = weights.new_zeros(heads, _DECAYS + count)
    frequency = torch.zeros_like(damping)
    damping[:, 1] = 1 / _DECAY_LENGTH
    atoms = weights.new_zeros(heads, size, 2 * (_DECAYS + count))
    atoms[:, :, 0], atoms[:, :, 2] = relative, relative * (-at / _DECAY_LENGTH).exp()
    gram = atoms.mT @ atoms
    for pole in range(_DECAYS, _DECAYS + count):
        used = 2 * pole
        # Least squares on the poles so far; by FFT, the correlation of its residual with every pole of the grid.
        known = atoms[:, :, :used]
        system = _with_ridge(gram[:, :used, :used], _GREEDY_RIDGE / used)
        amplitudes = torch.linalg.solve(system, known.mT @ root_mass[..., None])
        residual = (root_mass - (known @ amplitudes).squeeze(-1)) * relative
        spectrum = torch.view_as_real(torch.fft.rfft(residual[:, None] * envelopes, points))
        correlation = spectrum.square().sum(-1) / energy[..., None]
        best = (correlation * usable).flatten(1).argmax(-1)
        i_damping, i_frequency = best // len(usable), best % len(usable)
        damping[:, pole] = grid[i_damping]
        frequency[:, pole] = i_frequency * (2 * math.pi / points)
        # The best of them adds a damped cosine and a damped sine.
        phase = frequency[:, pole, None] * at
        scaled = relative * envelopes[i_damping]
        atoms[:, :, used], atoms[:, :, used + 1] = scaled * phase.cos(), scaled * phase.sin()
        new = atoms[:, :, : used + 2].mT @ atoms[:, :, used : used + 2]
        gram[:, : used + 2, used : used + 2] = new
        gram[:, used : used + 2, : used + 2] = new.mT
    return damping, frequency


# --- the objective


class _FarWeights:
    """The weights g of distances beyond the band: amplitudes `[N, 2P]` of fixed poles, and bounds that keep g positive.

    Amplitudes are in units of `unit`, which makes the weights g about one where attention mass lies. `smooth` is g
    averaged in the log domain over neighbouring distances.
    """

    def __init__(self, mass: Tensor, weights: Tensor, poles: DampedCosines):
        """Take the diagonal sums and the weights g of the compact fit, `[N, n]`."""
        self.poles = poles
        self.unit = mass.sum(-1, keepdim=True) / (mass / weights).sum(-1, keepdim=True)
        weights = weights / self.unit
        ones = weights.new_ones(1, 1, 2 * _SMOOTH + 1)
        total, number = (
            conv1d(x[:, None], ones, padding=_SMOOTH).squeeze(1) for x in (weights.log(), torch.ones_like(weights))
        )
        self.smooth = (total / number).exp()
        self.floor = 0.15 * self.smooth
        self.log_smooth, self.log_floor = ((x * self.unit).log() for x in (self.smooth, self.floor))

        # Least squares relative to g, weighted by attention mass; `whiten` makes its Hessian the identity.
        relative = mass.sqrt() / weights
        atoms = poles.atoms() * relative[..., None]
        gram, right = atoms.mT @ atoms, (atoms.mT @ mass.sqrt()[..., None]).squeeze(-1)
        gram = _with_ridge(gram, _RIDGE / gram.shape[-1])
        self.decays = _two_decays(gram[:, :_DECAYS, :_DECAYS], right[:, :_DECAYS], gram.shape[-1])
        factor = torch.linalg.cholesky(gram)
        self.whiten = torch.linalg.inv(factor).mT
        closest = self.positive(torch.cholesky_solve(right[..., None], factor).squeeze(-1), 0.25)
        self.closest = (factor.mT @ closest[..., None]).squeeze(-1)  # in whitened coordinates
        envelopes = DampedCosines(poles.damping, torch.zeros_like(poles.damping), poles.count)
        sizes = envelopes.transposed(mass / weights)[:, : poles.damping.shape[-1]]
        self.cancellation = sizes / mass.sum(-1, keepdim=True)  # mean cancellation by a pole of amplitude one

    def amplitudes(self, whitened: Tensor) -> Tensor:
        """Return the amplitudes at whitened coordinates."""
        return (self.whiten @ whitened[..., None]).squeeze(-1)

    def positive(self, amplitudes: Tensor, share: float) -> Tensor:
        """Return the amplitudes moved towards the two decays until g is at least a share of its smoothed form."""
        weights, decays = self.poles.sum(amplitudes), self.poles.sum(self.decays)
        bound = share * torch.minimum(self.smooth, decays)
        step = torch.where(weights < bound, (bound - weights) / (decays - weights).clamp(min=1e-300), 0.0)
        step = step.amax(-1, keepdim=True).clamp(max=1.0)
        return (1 - step) * amplitudes + step * self.decays


def _two_decays(gram: Tensor, right: Tensor, size: int) -> Tensor:
    """Return the non-negative least-squares amplitudes of the two decays, `[N, size]`, zeros elsewhere."""
    both = torch.linalg.solve(gram, right)
    alone = right / gram.diagonal(dim1=1, dim2=2)
    # Where one amplitude would be negative the other decay is best alone: the product of the two decays is positive.
    both = torch.where(both.flip(-1) < 0, alone, both).clamp(min=0)
    return pad(both, (0, size - both.shape[-1]))


class _Objective:
    """The penalised loss of one group of heads, in coordinates `[N, n]` in which its curvature is near one.

    Coordinates are key logits, band logits and whitened amplitudes. The key logits are those of all keys or, in the
    short form, those of the first few keys, then the amplitudes of its decays and the constant, called the trends.
    """

    def __init__(
        self, compact: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, band: int, poles: tuple[Tensor, Tensor],
        *, short: bool = False,
    ):  # fmt: skip
        self.eta, self.band, self.length = torch.stack([eta_abs, eta_rel]), band, compact.length
        self.free_keys = keys = _SINKS if short else compact.length
        at = torch.arange(self.length - keys, dtype=torch.float64, device=eta_abs.device)
        lengths = torch.tensor([*_TREND_LENGTHS, math.inf] if short else [], dtype=torch.float64, device=eta_abs.device)
        self.trends = (-at / lengths[:, None]).exp()
        trend = compact.alpha[:, keys:]  # empty where all keys are free
        if short:  # least squares, weighted by attention mass
            weighted = self.trends * eta_abs[:, None, keys:]
            gram = _with_ridge(weighted @ self.trends.mT, _TREND_RIDGE)
            trend = torch.linalg.solve(gram, weighted @ trend[..., None]).squeeze(-1)
        alpha = torch.cat([compact.alpha[:, :keys], trend @ self.trends], -1)
        _, (_, mass) = _sums(torch.stack([alpha, compact.rho]))
        self.far = _FarWeights(
            mass[:, band:], compact.rho[:, band:].exp(), DampedCosines(*poles, compact.length - band)
        )
        self.penalty = self.length * _CANCELLATION_PENALTY * self.far.cancellation

        whitened = self.far.closest
        self.sizes = [keys, len(lengths), band, whitened.shape[-1]]
        trend_scale = (eta_abs[:, keys:] @ self.trends.square().mT).rsqrt()
        band_scale = (eta_rel[:, :band] + 1e-3).rsqrt()
        self.scale = torch.cat([eta_abs[:, :keys].rsqrt(), trend_scale, band_scale, torch.ones_like(whitened)], -1)
        self.origin = torch.cat([compact.alpha[:, :keys], trend, compact.rho[:, :band], torch.zeros_like(whitened)], -1)
        logits = torch.stack([compact.alpha, compact.rho])
        self.compact_loss = self._loss(logits, _sums(logits)[0])

    def _loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the cross-entropy, Eq. (4), in nats over all rows."""
        return rows.log().sum(-1) - (self.eta * logits).sum((0, -1))

    def start(self) -> Tensor:
        """Return the coordinates of the compact fit with least-squares amplitudes."""
        return torch.cat([torch.zeros_like(self.scale[:, : sum(self.sizes[:3])]), self.far.closest], -1)

    def start_from(self, other: "_Objective", point: Tensor) -> Tensor:
        """Return the coordinates of another objective's band and amplitudes, with key logits in the short form."""
        band = point.split(other.sizes, -1)[2]
        scaled = other.unpack(point)[2] * (other.far.unit / self.far.unit)
        whitened = torch.linalg.solve_triangular(self.far.whiten, scaled[..., None], upper=True).squeeze(-1)
        return torch.cat([torch.zeros_like(self.scale[:, : sum(self.sizes[:2])]), band, whitened], -1)

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of free keys with amplitudes of the trends, logits of the band, and amplitudes `[N, 2P]`."""
        sizes = [sum(self.sizes[:2]), *self.sizes[2:]]
        keys, band, whitened = torch.addcmul(self.origin, point, self.scale).split(sizes, -1)
        return keys, band, self.far.amplitudes(whitened)

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective, nats over all rows above the compact fit's loss, and its gradient."""
        far, (keys, band, amplitudes) = self.far, self.unpack(point)
        alpha = torch.cat([keys[:, : self.free_keys], keys[:, self.free_keys :] @ self.trends], -1)
        share = far.poles.sum(amplitudes) / far.floor
        # Below the floor the logarithm goes on as a straight line: a step may pass through negative weights.
        above = share.clamp(min=1.0)
        rho = above.log() + (share - 1).clamp(max=0.0) + far.log_floor
        logits = torch.stack([alpha, torch.cat([band, rho], -1)])
        rows, sums = _sums(logits)
        log_ratio = rho - far.log_smooth  # of g to its smoothed form
        excess = log_ratio.expm1()
        cosine_and_sine = amplitudes.unflatten(-1, (2, -1))
        size = (cosine_and_sine.square().sum(1) + 1e-6).sqrt()
        value = self._loss(logits, rows) - self.compact_loss
        value = value + _PRIOR_WEIGHT * (excess - log_ratio).sum(-1) + (self.penalty * size).sum(-1)

        by_key, by_distance = sums - self.eta  # Eq. (20)
        by_far = (by_distance[:, self.band :] + _PRIOR_WEIGHT * excess) / (above * far.floor)
        by_size = ((self.penalty / size)[:, None] * cosine_and_sine).flatten(1)
        by_whitened = (far.whiten.mT @ (far.poles.transposed(by_far) + by_size)[..., None]).squeeze(-1)
        by_trend = by_key[:, self.free_keys :] @ self.trends.mT
        parts = [by_key[:, : self.free_keys], by_trend, by_distance[:, : self.band], by_whitened]
        return value, torch.cat(parts, -1) * self.scale

    def measure(self, point: Tensor, compact: CompactPattern) -> list[ExponentialFit]:
        """Return the patterns at a point, each compared with its compact fit."""
        keys, band, amplitudes = self.unpack(point)
        cosine, sine = self.far.positive(amplitudes, 0.05).chunk(2, -1)
        cancellation = (self.far.cancellation * (cosine.square() + sine.square()).sqrt()).sum(-1)
        trend, damping = keys[:, :0], keys[:, :0]
        if self.free_keys < self.length:
            keys, trend, constant = keys.split([_SINKS, len(_TREND_LENGTHS), 1], -1)
            keys = keys - constant  # the gauge in which alpha ends at 0
            damping = (1 / torch.tensor(_TREND_LENGTHS, dtype=torch.float64, device=keys.device)).expand_as(trend)
        poles, unit = self.far.poles, self.far.unit
        amplitudes = cosine * unit, sine * unit
        pattern = ExponentialPattern(
            keys, band, poles.damping, poles.frequency, *amplitudes, self.length, trend, damping
        )
        executed = pattern.to_compact()
        loss, compact_loss = (fit_loss(one.alpha, one.rho, one.log_z, *self.eta) for one in (executed, compact))
        numbers = torch.stack([loss - compact_loss, cancellation], 1).tolist()
        # One by one on the CPU: every pattern checks its values, which would wait for a GPU each time.
        return [
            ExponentialFit(single, extra, cancelled, poles.damping.shape[-1], self.free_keys)
            for single, (extra, cancelled) in zip(pattern.to(device="cpu").singles(), numbers, strict=True)
        ]


# --- L-BFGS

# Wolfe's conditions with the usual constants: enough decrease, and a slope that is flatter by a tenth.
_DECREASE, _SLOPE = 1e-4, 0.9
_LONG = 8.0  # steps of this length or more are accepted however steep the slope still is
_SHORTEST = 2.0**-30  # width of a line search's bracket below which a function is finished
_MEMORY, _PATIENCE = 12, 10  # steps that approximate the curvature, and that must gain the tolerance together


def minimize(evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, *, tolerance: float) -> Tensor:
    """Minimise N smooth functions at once by L-BFGS; return their lowest points `[N, n]` from `start [N, n]`.

    `evaluate(x)` returns values `[N]` and gradients `[N, n]` of all functions, at most 200 times. A function is
    finished when the last ten accepted steps lowered it by less than `tolerance` in all. Each evaluation tries
    one step length of every function, so no function waits for the line search of another.
    """
    value, gradient = evaluate(start)
    heads, size = start.shape
    # Steps, oldest first, and the changes of the gradient over them; then the point and its gradient.
    state = torch.cat([start.new_zeros(heads, 2 * _MEMORY, size), start[:, None], gradient[:, None]], 1)
    grams = start.new_zeros(heads, 2, _MEMORY, _MEMORY)  # products of steps, and of changes, with the changes
    direction = -gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1.0)
    search = _LineSearch(value.cpu(), tolerance)
    for _ in range(_EVALUATIONS):
        step = torch.where(search.active, search.length, 0.0).to(start.device)[:, None] * direction
        tried = state[:, -2] + step
        value, gradient = evaluate(tried)
        gradients = torch.stack([state[:, -1], gradient])
        accepted = search.update(*torch.cat([(gradients * direction).sum(-1), value[None]]).cpu())
        moved, change = accepted.to(start.device)[:, None, None], gradient - state[:, -1]
        past = state[:, 1:_MEMORY], step[:, None], state[:, _MEMORY + 1 : 2 * _MEMORY], change[:, None]
        state = torch.where(moved, torch.cat([*past, tried[:, None], gradient[:, None]], 1), state)
        if not bool(search.active.any()):
            break
        by_change, by_gradient = ((state[:, :-2] @ x[..., None]).unflatten(1, (2, -1)) for x in (change, state[:, -1]))
        grown = torch.cat([pad(grams[:, :, 1:, 1:], (0, 0, 0, 1)), by_change], -1)
        grams = torch.where(moved[..., None], grown, grams)
        direction = torch.where(moved[:, 0], -_inverse_hessian_times(grams, by_gradient, state), direction)
    return state[:, -2]


class _LineSearch:
    """The step lengths of N line searches, by bisection; on the CPU, so that each step waits for a GPU once."""

    def __init__(self, value: Tensor, tolerance: float):
        self.value, self.tolerance = value, tolerance
        self.length, self.active = torch.ones_like(value), torch.ones(len(value), dtype=torch.bool)
        self._low, self._high = torch.zeros_like(value), torch.full_like(value, torch.inf)
        self._recent = value[:, None].repeat(1, _PATIENCE + 1)
        self._steps = torch.zeros(len(value), dtype=torch.int64)

    def update(self, slope_before: Tensor, slope_after: Tensor, value_after: Tensor) -> Tensor:
        """Return which steps are accepted, by slopes before and after them and values after; set the next lengths."""
        enough = value_after <= self.value + _DECREASE * self.length * slope_before
        flat = slope_after >= _SLOPE * slope_before
        accepted = self.active & enough & (flat | (self.length >= _LONG))
        high = torch.where(enough, self._high, self.length)
        low = torch.where(enough & ~flat, self.length, self._low)
        length = torch.where(high.isinf(), 2 * self.length, (low + high) / 2)
        self._steps += accepted
        self.value = torch.where(accepted, value_after, self.value)
        grown = torch.cat([self._recent[:, 1:], self.value[:, None]], 1)
        self._recent = torch.where(accepted[:, None], grown, self._recent)
        settled = accepted & (self._steps > _PATIENCE) & (self._recent[:, 0] - self.value < self.tolerance)
        self.active &= ~settled & (high - low > _SHORTEST)
        self._low, self._high = torch.where(accepted, 0.0, low), torch.where(accepted, torch.inf, high)
        self.length = torch.where(accepted, 1.0, length)
        return accepted


def _inverse_hessian_times(grams: Tensor, by_gradient: Tensor, state: Tensor) -> Tensor:
    """Return the inverse Hessian's approximation times gradients `[N, n]`, in its compact form.

    Byrd, Nocedal and Schnabel 1994, theorem 2.2: products with all steps at once, where the usual recursion would
    launch four kernels for each of them. Only the upper triangles of `grams` are read.
    """
    inner, outer = grams.unbind(1)
    curvature = inner.diagonal(dim1=1, dim2=2)
    keep = (curvature > 0).to(inner)  # the others are not filled yet, or a line search was cut short there
    scale = (curvature[:, -1:] / outer[:, -1, -1:].clamp(min=1e-300)).clamp(min=1e-12)
    scale = torch.where(curvature[:, -1:] > 0, scale, 1.0)
    triangle = inner.triu() * keep[:, :, None] * keep[:, None] + torch.diag_embed(1 - keep)
    by_step, by_change = (by_gradient * keep[:, None, :, None]).unbind(1)
    solved = torch.linalg.solve_triangular(triangle, by_step, upper=True)
    symmetric = outer.triu() + outer.triu(1).mT
    right = curvature[..., None] * solved + scale[..., None] * (symmetric @ solved - by_change)
    back = torch.linalg.solve_triangular(triangle.mT, right * keep[..., None], upper=False)
    coefficients = torch.cat([back, -scale[..., None] * solved], 1)
    return scale * state[:, -1] + (coefficients.mT @ state[:, :-2]).squeeze(1)
