"""Eq. (4), which fitters minimise from two marginals, and the distance of a fit from its target and the optimum."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.log_sums import log_column_sums, log_diagonal_sums
from saf.patterns import CompactPattern
from saf.statistics import FLOOR

# Relative error of the sums of marginals: those measured in float32 or by tiles miss them by far less than this, those
# of two different patterns by more.
_CONSISTENCY = 1e-3
# Newton steps on a moment with at most that error: each squares it, so three end in rounding.
_TILTS = 3
# An entry counts in a relative error if the probabilities in it average at least this: a hundred times the floor of
# targets. A smaller marginal measures the floor and not the model.
_MEANINGFUL = 1e-7
TOLERANCE = 1e-4
"""Largest relative error of a marginal of a converged fit: fits then are within 1e-6 nats of the oracle's, where 0.2
nats are accepted."""


def check_targets(eta_abs: Tensor, eta_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two marginals `[..., T]` in float64 with rounding errors of their sums removed.

    Marginals of one causal T x T pattern with rows that sum to one each sum to T. A query's position is its key's plus
    their distance, so `sum_j j*eta_abs + sum_δ δ*eta_rel = T(T-1)/2`. Eq. (4) is blind to the tilt by this relation;
    an exponential tilt of both marginals restores it exactly. Raises InputError where a value is not finite and
    positive or a relation misses by more than 0.1%.
    """
    if eta_abs.shape != eta_rel.shape or eta_abs.ndim == 0 or eta_abs.shape[-1] == 0:
        shapes = f"{list(eta_abs.shape)} and {list(eta_rel.shape)}"
        raise InputError(f"eta_abs and eta_rel must share one shape [..., T], T >= 1; got {shapes}")
    length = eta_abs.shape[-1]
    eta_abs, eta_rel = eta_abs.detach().double(), eta_rel.detach().double()
    for name, eta in (("eta_abs", eta_abs), ("eta_rel", eta_rel)):
        if not bool((eta.isfinite() & (eta > 0)).all()):
            raise InputError(f"{name} must be finite and positive; floor the pattern at 1e-9 and renormalise it")
        _check_relation(f"{name} sums to T", eta.sum(-1), length)
    eta_abs = eta_abs * (length / eta_abs.sum(-1, keepdim=True))
    eta_rel = eta_rel * (length / eta_rel.sum(-1, keepdim=True))
    position = torch.arange(length, dtype=torch.float64, device=eta_abs.device)
    total = length * (length - 1) / 2
    _check_relation("sum(j*eta_abs) + sum(δ*eta_rel) is T(T-1)/2", ((eta_abs + eta_rel) * position).sum(-1), total)
    return _restore_moment(eta_abs, eta_rel, position, total)


def _check_relation(what: str, got: Tensor, expected: float) -> None:
    """Raise InputError where marginals miss a relation of one causal pattern."""
    error = (got - expected).abs()
    if got.numel() and error.max().item() > _CONSISTENCY * max(expected, 1.0):
        worst = got.flatten()[error.flatten().argmax()].item()
        raise InputError(f"marginals of one causal pattern: {what} = {expected:g}; got {worst:g}")


def _restore_moment(eta_abs: Tensor, eta_rel: Tensor, position: Tensor, total: float) -> tuple[Tensor, Tensor]:
    """Tilt marginals so that their first moments, of keys and of distances, add up to that of the queries."""
    length = len(position)
    if length == 1:
        return eta_abs, eta_rel
    for _ in range(_TILTS):
        means = [(eta * position).sum(-1, keepdim=True) / length for eta in (eta_abs, eta_rel)]
        # Positions of queries vary as T^2/12, so the two variances cannot both be small.
        offsets = [position - mean for mean in means]
        variance = (eta_abs * offsets[0].square() + eta_rel * offsets[1].square()).sum(-1, keepdim=True)
        tilt = (total - length * (means[0] + means[1])) / variance
        tilted = [eta * (tilt * offset).exp() for eta, offset in zip((eta_abs, eta_rel), offsets, strict=True)]
        eta_abs, eta_rel = (eta * (length / eta.sum(-1, keepdim=True)) for eta in tilted)
    return eta_abs, eta_rel


def initial_parameters(eta_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the paper's start, `[..., T]`: alpha = 0 and rho = log(max(eta_rel / (T - δ), 1e-9))."""
    length = eta_rel.shape[-1]
    count = torch.arange(length, 0, -1, dtype=eta_rel.dtype, device=eta_rel.device)
    return torch.zeros_like(eta_rel), (eta_rel / count).clamp(min=FLOOR).log()


def fit_loss(alpha: Tensor, rho: Tensor, log_z: Tensor, eta_abs: Tensor, eta_rel: Tensor) -> Tensor:
    """Return the row-averaged cross-entropy in nats, `[...]`, for inputs `[..., T]`."""
    return (log_z - eta_abs * alpha - eta_rel * rho).mean(-1)  # Eq. (4)


def marginals(pattern: CompactPattern) -> tuple[Tensor, Tensor]:
    """Return the pattern's column sums (by key) and diagonal sums (by distance), each `[..., T]` float64."""
    alpha, rho, log_row = pattern.alpha.double(), pattern.rho.double(), -pattern.log_z.double()
    columns = (log_column_sums(log_row, rho) + alpha).exp()
    return columns, (log_diagonal_sums(log_row, alpha) + rho).exp()


def fit_kl(pattern: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, row_entropy: Tensor) -> Tensor:
    """Return the row-averaged KL(target || pattern) in nats, `[...]`.

    The target enters through its marginals `[..., T]` and its row-averaged entropy `[...]` in nats: the KL is
    Eq. (4) less that entropy, without any T x T array. Raises InputError for shapes that do not match.
    """
    if pattern.alpha.shape != eta_abs.shape or row_entropy.shape != pattern.shape:
        got = f"{list(pattern.alpha.shape)}, {list(eta_abs.shape)} and {list(row_entropy.shape)}"
        raise InputError(f"expected a pattern [..., T], marginals [..., T] and row entropy [...]; got {got}")
    eta_abs, eta_rel = check_targets(eta_abs, eta_rel)
    loss = fit_loss(pattern.alpha.double(), pattern.rho.double(), pattern.log_z.double(), eta_abs, eta_rel)
    return loss - row_entropy.double()  # Eq. (S.7)


@dataclass(frozen=True, eq=False)
class Certificate:
    """Marginal residuals of fitted patterns; at the optimum of the convex Eq. (4) all of them are zero.

    All tensors have the patterns' leading shape `[...]`.
    """

    max_relative_abs: Tensor
    """Largest |fitted / target - 1| over the meaningful key marginals."""
    max_relative_rel: Tensor
    """The same over the distance marginals."""
    l1: Tensor
    """Sum of |fitted - target| over both marginals and all entries, divided by T. If alpha and rho lie within r nats of
    an optimum in some gauge, the loss is at most r times this above its minimum, Eq. (S.12)."""
    sweeps: Tensor
    """Sweeps or steps taken."""
    tolerance: float
    """Largest error of a converged fit."""

    @property
    def max_relative(self) -> Tensor:
        """The larger of the two relative errors."""
        return torch.maximum(self.max_relative_abs, self.max_relative_rel)

    @property
    def converged(self) -> Tensor:
        """Whether both relative errors and the L1 residual are within the tolerance, `[...]` bool."""
        return torch.maximum(self.max_relative, self.l1) <= self.tolerance

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain values for JSON, one record for each of N patterns."""
        names = ("max_relative_abs", "max_relative_rel", "l1", "sweeps", "converged")
        columns = zip(*(getattr(self, name).tolist() for name in names), strict=True)
        return [dict(zip(names, values, strict=True), tolerance=self.tolerance) for values in columns]


def meaningful(eta: Tensor) -> Tensor:
    """Return a mask of the entries of a marginal `[..., T]` whose probabilities average at least 1e-7."""
    count = torch.arange(eta.shape[-1], 0, -1, dtype=eta.dtype, device=eta.device)
    return eta >= _MEANINGFUL * count


def certify(
    pattern: CompactPattern, eta_abs: Tensor, eta_rel: Tensor, *, sweeps: Tensor, tolerance: float = TOLERANCE
) -> Certificate:
    """Compare the fitted marginals with the targets `[..., T]` (of `check_targets`)."""
    pairs = list(zip(marginals(pattern), (eta_abs, eta_rel), strict=True))
    relative = [((fitted / eta - 1).abs() * meaningful(eta)).amax(-1) for fitted, eta in pairs]
    l1 = torch.stack([(fitted - eta).abs().sum(-1) for fitted, eta in pairs]).sum(0) / pattern.length
    return Certificate(*relative, l1=l1, sweeps=sweeps, tolerance=tolerance)
