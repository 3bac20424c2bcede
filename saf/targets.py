"""`target` and `dense_pattern` compute the patterns that replace attention (paper, section 3.2), before any fit.

A new pattern is one function `(statistics, heads) -> [F, T, T]` and a line of `TARGETS`. Tensors that calibration
collects are keyword-only arguments without a default, by their names in `saf.calibration.COLLECTIONS`, `[F, ...]`;
those with a default are options.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saf.errors import InputError, check_keywords, check_name
from saf.heads import Head, HeadSet
from saf.patterns import CompactPattern, DensePattern
from saf.statistics import FLOOR, AttentionStatistics, required_keywords

Storage = Literal["compact", "exponential", "dense"]
FITTED = ("compact", "exponential")  # storages whose patterns are fitted to marginals; "dense" stores every entry


class Target(NamedTuple):
    """The statistics that a compact fit needs: marginals `[F, T]` and row-averaged entropy `[F]` (nats), float64."""

    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor


class TargetKind(NamedTuple):
    """The functions that compute one pattern from `(statistics, heads)`."""

    dense: Callable[..., Tensor]  # returns the pattern, `[F, T, T]`
    compact: Callable[..., Target] | None = None  # returns the target of a fit; None computes it by the dense pattern
    exact: Callable[..., CompactPattern] | None = None  # returns the pattern, `[F]`, if it needs no fit


def collect_for(name: str, storage: Storage = "compact") -> tuple[str, ...]:
    """Return the names that `calibrate(collect=...)` needs for a pattern in a storage."""
    check_name("pattern", name, TARGETS)
    kind = TARGETS[name]
    computed = kind.compact if storage in FITTED and kind.compact is not None else kind.dense
    return required_keywords(computed)


def target(statistics: AttentionStatistics, heads: Iterable[Head], name: str = "mean", **options: Any) -> Target:
    """Return the target of the compact fit of a pattern, for `heads` in order.

    Options are the pattern's: `seed` of the sampled ones, `scale` of dirichlet. Draws depend on the seed, the layer and
    the head alone. Raises InputError for unknown names and options, and statistics without what `collect_for` names.
    """
    options, kind, heads = check_options(name, options), TARGETS[name], HeadSet(heads)
    if kind.compact is not None:
        return _compute(kind.compact, statistics, heads, options)
    # Head by head: of a dense pattern only its marginals stay, so one [T, T] is in memory at a time.
    rows = [target_of(_compute(kind.dense, statistics, HeadSet([head]), options)) for head in heads]
    return Target(*map(torch.cat, zip(*rows, strict=True)))


def exact_pattern(
    statistics: AttentionStatistics, heads: Iterable[Head], name: str, **options: Any
) -> CompactPattern | None:
    """Return the patterns of `heads` if this kind needs no fit, else None; takes options as `target`."""
    options, exact = check_options(name, options), TARGETS[name].exact
    return None if exact is None else _compute(exact, statistics, HeadSet(heads), options)


def dense_pattern(
    statistics: AttentionStatistics,
    heads: Iterable[Head],
    name: str = "mean",
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DensePattern:
    """Return the patterns of `heads`, in order, entry by entry, rounded to `dtype`; takes options as `target`."""
    options, dense = check_options(name, options), TARGETS[name].dense
    # Head by head: the computation takes several times a pattern's own memory.
    rows = [_compute(dense, statistics, HeadSet([head]), options).to(dtype) for head in HeadSet(heads)]
    return DensePattern(torch.cat(rows))


def _compute(
    function: Callable[..., Any], statistics: AttentionStatistics, heads: HeadSet, options: dict[str, Any]
) -> Any:
    """Call one function of a `TargetKind` with the collected tensors that it reads."""
    collected = {name: statistics.take(name, heads) for name in required_keywords(function)}
    return function(statistics, heads, **collected, **options)


def target_of(weights: Tensor) -> Target:
    """Return the target of dense patterns `[F, T, T]`, floored at 1e-9 and normalised again."""
    length = weights.shape[-1]
    causal = causal_mask(length).to(weights.device)
    position = torch.arange(length, device=weights.device)
    distance = (position[:, None] - position)[causal]
    rows = []
    for matrix in weights:
        floored = matrix.double().clamp(min=FLOOR) * causal  # the floor is of causal entries, not of later keys
        floored /= floored.sum(-1, keepdim=True)  # Eq. (S.3)
        by_distance = floored.new_zeros(length).index_add_(0, distance, floored[causal])
        rows.append((floored.sum(0), by_distance, -torch.xlogy(floored, floored).sum() / length))  # Eq. (S.4)
    return Target(*map(torch.stack, zip(*rows, strict=True)))


def check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a pattern takes; all patterns accept `seed`. Raises InputError for unknown names."""
    check_name("pattern", name, TARGETS)
    known = check_keywords(f"pattern {name!r}", options.keys() - {"seed"}, TARGETS[name].dense)
    return {key: value for key, value in options.items() if key in known}


# --- the five patterns


def mean_target(statistics: AttentionStatistics, heads: HeadSet) -> Target:
    """Return the marginals and row entropy of the floored mean pattern, Eq. (S.4)."""
    layers, ids = [layer for layer, _ in heads], [head for _, head in heads]
    return Target(*(getattr(statistics, name)[layers, ids] for name in Target._fields))


def sharp_mean(statistics: AttentionStatistics, heads: HeadSet, *, logit_mean: Tensor) -> Tensor:
    """Return the softmax of the mean logits, the reverse-KL barycentre."""
    return causal_softmax(logit_mean)  # Eq. (16)


def gaussian(
    statistics: AttentionStatistics, heads: HeadSet, *, logit_mean: Tensor, logit_variance: Tensor, seed: int = 0
) -> Tensor:
    """Draw logits with their own means and variances over sequences, and return their softmax."""
    causal = causal_mask(logit_mean.shape[-1])
    drawn = []
    for head, center, square in zip(heads, logit_mean.double(), logit_variance.double(), strict=True):
        noise = torch.from_numpy(stream_of(seed, head).standard_normal(int(causal.sum())))
        center[causal] += square[causal].sqrt() * noise  # in place: `take` returned a copy of what was collected
        drawn.append(causal_softmax(center).to(logit_mean.dtype))
    return torch.stack(drawn)


SCALE = 16.0  # the paper's factor of estimated Dirichlet concentrations
# Bounds of the scaled concentration: at the lower one draws are nearly one-hot, at the upper one within about a
# thousandth of the mean.
BOUNDS = (1e-2, 1e6)
PARAMETER_FLOOR = 1e-6  # smallest parameter of a draw
# Rows are not drawn but have their mean where it is this close to one-hot, or where their summed variance over
# sequences is this small: in float32 the concentration would be a quotient of rounding errors (squares of 3e-8 each;
# round numbers, not measured).
NEAR_DETERMINISTIC, NEAR_CONSTANT = 1e-6, 1e-15


def dirichlet(
    statistics: AttentionStatistics,
    heads: HeadSet,
    *,
    mean: Tensor,
    row_variance: Tensor,
    seed: int = 0,
    scale: float = SCALE,
) -> Tensor:
    """Draw rows from Dirichlet(c m), with m the row of the mean pattern and c the concentration times `scale`.

    Rows whose mean is nearly one-hot, or that hardly vary over the sequences, are their mean.
    """
    if not scale > 0:
        raise InputError(f"scale must be above 0, got {scale}")
    causal = causal_mask(mean.shape[-1])
    drawn = []
    for head, center, variance in zip(heads, mean.double(), row_variance.double(), strict=True):
        scaled = (scale * concentration(center, variance)).clamp(*BOUNDS)  # Eq. (18)
        parameters = (scaled[:, None] * center)[causal].clamp(min=PARAMETER_FLOOR)
        logits = torch.zeros_like(center)
        logits[causal] = log_gamma_draws(parameters, seed, head)  # gamma draws over their sum are a Dirichlet draw
        fixed = (1 - center.square().sum(-1) <= NEAR_DETERMINISTIC) | (variance <= NEAR_CONSTANT)
        drawn.append(torch.where(fixed[:, None], center, causal_softmax(logits)).to(mean.dtype))
    return torch.stack(drawn)


def structured_random(statistics: AttentionStatistics, heads: HeadSet, *, seed: int = 0) -> CompactPattern:
    """Draw key and distance logits from the standard normal distribution; a shorter T is a prefix of the same draw."""
    alpha, rho = (
        np.stack([stream_of(seed, head, stream).standard_normal(statistics.length) for head in heads])
        for stream in (0, 1)
    )
    return CompactPattern.from_parameters(torch.from_numpy(alpha), torch.from_numpy(rho))


TARGETS: dict[str, TargetKind] = {
    "mean": TargetKind(lambda statistics, heads, *, mean: mean, mean_target),
    "sharp_mean": TargetKind(
        sharp_mean,
        lambda statistics, heads, *, sharp_eta_abs, sharp_eta_rel, sharp_row_entropy: Target(
            sharp_eta_abs, sharp_eta_rel, sharp_row_entropy
        ),
    ),
    "gaussian": TargetKind(gaussian),
    "dirichlet": TargetKind(dirichlet),
    "structured_random": TargetKind(
        lambda statistics, heads, *, seed=0: structured_random(statistics, heads, seed=seed).dense(),
        exact=structured_random,
    ),
}


# --- draws


def stream_of(seed: int, head: tuple[int, ...], number: int = 0) -> np.random.Generator:
    """Return the random stream of a seed, a head (a query position may follow) and a stream number.

    A head's draws do not depend on other heads, the rate or the time of freezing.
    """
    # numpy takes a list as a seed; a torch.Generator takes one number.
    return np.random.default_rng([seed, *head, number])


def concentration(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the moment estimate of the concentration, `[T]`, of rows with mean `[T, T]`, summed variance `[T]`."""
    largest = 1 - mean.square().sum(-1)  # the summed variance if every row were one-hot
    return largest / variance.clamp(min=torch.finfo(variance.dtype).tiny) - 1  # Eq. (18)


def log_gamma_draws(shape: Tensor, seed: int, head: tuple[int, ...]) -> Tensor:
    """Return the logarithm of one gamma variate of each shape.

    Gamma(a) is Gamma(a + 1) · U^(1/a); as logarithms, draws of tiny shapes do not underflow to rows of zeros.
    """
    raised = stream_of(seed, head).standard_gamma(shape.numpy() + 1)
    uniform = stream_of(seed, head, 1).random(len(shape))
    # 1 - U lies in (0, 1]: its logarithm is finite.
    return torch.from_numpy(raised).log() + torch.from_numpy(1 - uniform).log() / shape


def causal_softmax(logits: Tensor) -> Tensor:
    """Return the softmax of each row's causal entries, `[..., T, T]`; entries above the diagonal are ignored."""
    return logits.masked_fill(~causal_mask(logits.shape[-1]).to(logits.device), -torch.inf).softmax(-1)


def causal_mask(length: int) -> Tensor:
    """Return the mask `[T, T]`, true on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool).tril()
