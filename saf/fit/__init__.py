"""`fit_compact` fits compact patterns, Eq. (3), to a target's marginals; `fit_kl` measures what a fit loses.

The fitters that minimise Eq. (4) are in fitters.py. exponential.py fits patterns that run in linear time.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, SafWarning, check_keywords, check_name
from saf.fit.exponential import ExponentialFit, fit_exponential, fit_exponential_heads
from saf.fit.fitters import FITTERS, TOLERANCE, check_targets, fit_loss, meaningful
from saf.log_sums import log_column_sums, log_diagonal_sums
from saf.patterns import CompactPattern

__all__ = [
    "FITTERS",
    "Certificate",
    "ExponentialFit",
    "check_targets",
    "fit_compact",
    "fit_exponential",
    "fit_exponential_heads",
    "fit_kl",
    "fit_loss",
    "fit_with_certificate",
    "marginals",
    "split_options",
]


def fit_compact(eta_abs: Tensor, eta_rel: Tensor, *, fitter: str = "proportional", **options: Any) -> CompactPattern:
    """Return the compact patterns closest to targets with these marginals, in canonical gauge, float64.

    `eta_abs` (by key) and `eta_rel` (by distance) have shape `[..., T]`, positive, each summing to T. Options go
    to the fitter: `proportional` takes tolerance, max_sweeps; `adam` steps. Raises InputError
    for marginals that no causal pattern has and for an unknown fitter or option; warns if a fitter other than `adam`
    stops short.

    >>> import torch
    >>> fit_compact(torch.tensor([1.5, 0.5]), torch.tensor([1.5, 0.5])).dense()
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    return fit_with_certificate(eta_abs, eta_rel, fitter=fitter, **options)[0]


def fit_with_certificate(
    eta_abs: Tensor, eta_rel: Tensor, *, fitter: str = "proportional", **options: Any
) -> tuple[CompactPattern, "Certificate"]:
    """Return the patterns of `fit_compact`, and the distance of each fitted marginal from its target."""
    split_options(fitter, options, "compact")
    eta_abs, eta_rel = check_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    alpha, rho, steps = FITTERS[fitter](eta_abs.reshape(-1, length), eta_rel.reshape(-1, length), **options)
    pattern = CompactPattern.from_parameters(alpha.reshape(shape), rho.reshape(shape)).canonical()
    pairs = list(zip(marginals(pattern), (eta_abs, eta_rel), strict=True))
    relative = [((fitted / eta - 1).abs() * meaningful(eta)).amax(-1) for fitted, eta in pairs]
    l1 = torch.stack([(fitted - eta).abs().sum(-1) for fitted, eta in pairs]).sum(0) / length
    tolerance = options.get("tolerance", TOLERANCE)
    certificate = Certificate(torch.maximum(*relative), l1, steps.reshape(shape[:-1]), tolerance)
    stopped = int((~certificate.converged).sum())
    if stopped and fitter != "adam":  # the paper's has a fixed number of steps
        more = "; else raise the fitter option max_sweeps (--fitter-options max_sweeps 2000)"
        warnings.warn(
            f"{stopped} of {certificate.converged.numel()} patterns were not yet fitted within {tolerance:g} (relative "
            f"error up to {certificate.max_relative.max():.2g}): it matters little where their fit KL is low"
            + (more if fitter == "proportional" else ""),
            SafWarning,
            stacklevel=3,
        )
    return pattern, certificate


@dataclass(frozen=True, eq=False)
class Certificate:
    """Marginal residuals of fitted patterns, `[...]` each; at the optimum of the convex Eq. (4) all are zero."""

    max_relative: Tensor
    """Largest |fitted / target - 1| over the meaningful entries of both marginals."""
    l1: Tensor
    """Sum of |fitted - target| over both marginals and all entries, divided by T. If alpha and rho lie within r nats of
    an optimum in some gauge, the loss is at most r times this above its minimum, Eq. (S.12)."""
    sweeps: Tensor
    """Sweeps or steps taken."""
    tolerance: float
    """Largest error of a converged fit."""

    @property
    def converged(self) -> Tensor:
        """Whether the relative error and the L1 residual are within the tolerance, `[...]` bool."""
        return torch.maximum(self.max_relative, self.l1) <= self.tolerance

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain values for JSON, one record for each of N patterns."""
        names = ("max_relative", "l1", "sweeps", "converged")
        columns = zip(*(getattr(self, name).tolist() for name in names), strict=True)
        return [dict(zip(names, values, strict=True), tolerance=self.tolerance) for values in columns]


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


def split_options(fitter: str, options: dict[str, Any], storage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the compact fit and, for exponential storage, those of `fit_exponential_heads`.

    Raises InputError for an unknown fitter, and for options that neither takes.
    """
    names = check_keywords("", (), fit_exponential_heads) if storage == "exponential" else []
    exponential = {name: value for name, value in options.items() if name in names}
    compact = {name: value for name, value in options.items() if name not in names}
    check_name("fitter", fitter, FITTERS)
    check_keywords(f"fitter {fitter!r}", compact, FITTERS[fitter])
    return compact, exponential
