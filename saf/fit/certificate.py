"""Evidence of how close a fit is to the optimum of Eq. (4), computed from its marginals alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.fit.objective import marginals
from saf.patterns import CompactPattern

# An entry counts in a relative error if the probabilities it sums average at least this: a hundred times the
# floor under the target, below which a marginal records the floor and not the model.
MEANINGFUL_PROBABILITY = 1e-7
TOLERANCE = 1e-4
"""The largest error of a marginal of a converged fit, relatively: fits then are within 1e-6 nats of the oracle's, where
0.2 nats are accepted (docs/log.md, "How are the heads of a real model fitted?")."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Hold marginal residuals of fitted patterns; at the optimum of the convex Eq. (4) all of them are zero.

    All tensors have the patterns' leading shape `[...]`.
    """

    max_relative_abs: Tensor
    """Largest |fitted / target - 1| over the meaningful key marginals."""
    max_relative_rel: Tensor
    """The same over the distance marginals."""
    l1: Tensor
    """Sum of |fitted - target| over both marginals and all entries, divided by T."""
    gap: Tensor
    """Upper bound, nats per row, on the loss above its minimum if alpha and rho lie within `radius` of an optimum."""
    radius: float
    """Largest entrywise distance, nats, from (alpha, rho) to a minimiser in some gauge, assumed by `gap`."""
    sweeps: Tensor
    """Sweeps or steps taken."""
    tolerance: float
    """The error below which a fit counts as converged."""

    @property
    def max_relative(self) -> Tensor:
        """Return the larger of the two relative errors."""
        return torch.maximum(self.max_relative_abs, self.max_relative_rel)

    @property
    def converged(self) -> Tensor:
        """Return whether both relative errors and the L1 residual are within the tolerance, `[...]` bool."""
        return torch.maximum(self.max_relative, self.l1) <= self.tolerance

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain values for JSON, one record for each of N patterns."""
        names = ("max_relative_abs", "max_relative_rel", "l1", "gap", "sweeps", "converged")
        columns = zip(*(getattr(self, name).tolist() for name in names), strict=True)
        common = {"radius": self.radius, "tolerance": self.tolerance}
        return [dict(zip(names, values, strict=True)) | common for values in columns]


def meaningful(eta: Tensor) -> Tensor:
    """Return which entries of a marginal `[..., T]` average at least 1e-7 over the probabilities they sum."""
    count = torch.arange(eta.shape[-1], 0, -1, dtype=eta.dtype, device=eta.device)
    return eta >= MEANINGFUL_PROBABILITY * count


def pool_tail(values: Tensor, first: int | None) -> Tensor:
    """Add up all keys from `first` on, `[..., T]` to `[..., first + 1]`; None leaves `values` as they are."""
    if first is None:
        return values
    return torch.cat([values[..., :first], values[..., first:].sum(-1, keepdim=True)], -1)


def certify(
    pattern: CompactPattern,
    eta_abs: Tensor,
    eta_rel: Tensor,
    *,
    sweeps: Tensor,
    tolerance: float = TOLERANCE,
    radius: float = 1.0,
    alpha_constant_after: int | None = None,
) -> Certificate:
    """Compare the fitted marginals with the targets `[..., T]` (of `check_targets`).

    The loss is convex and its gradient is the residual over T, so a minimiser at entrywise distance r from
    (alpha, rho) lies at most r times the L1 residual below. With alpha constant from a key on, that tail's
    marginals count as one, since the fit has one parameter for them.
    """
    fitted_abs, fitted_rel = marginals(pattern)
    counted = meaningful(eta_abs)
    if alpha_constant_after is not None:
        counted = pool_tail(counted.double(), alpha_constant_after) > 0
    pairs = [
        (pool_tail(fitted_abs, alpha_constant_after), pool_tail(eta_abs, alpha_constant_after), counted),
        (fitted_rel, eta_rel, meaningful(eta_rel)),
    ]
    relative = [((fitted / eta - 1).abs() * mask).amax(-1) for fitted, eta, mask in pairs]
    l1 = torch.stack([(fitted - eta).abs().sum(-1) for fitted, eta, _ in pairs]).sum(0) / pattern.length
    return Certificate(
        max_relative_abs=relative[0],
        max_relative_rel=relative[1],
        l1=l1,
        gap=radius * l1,
        radius=radius,
        sweeps=sweeps,
        tolerance=tolerance,
    )
