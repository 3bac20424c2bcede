"""`fit_compact` fits compact patterns, Eq. (3), to a target's key and distance marginals by minimising Eq. (4).

A fitter is one file (`proportional`, `adam`, `dense`) and one line of `FITTERS`; `objective` has their loss and the
measures of a fit. `exponential` fits patterns that run in linear time.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from saf.errors import SafWarning, check_keywords, check_name
from saf.fit.adam import fit_adam
from saf.fit.dense import fit_dense
from saf.fit.exponential import ExponentialFit, fit_exponential, fit_exponential_heads
from saf.fit.objective import TOLERANCE, Certificate, certify, check_targets, fit_kl, fit_loss, marginals
from saf.fit.proportional import fit_proportional
from saf.patterns import CompactPattern

__all__ = [
    "FITTERS",
    "Certificate",
    "ExponentialFit",
    "certify",
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

FITTERS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "proportional": fit_proportional,
    "adam": fit_adam,
    "dense": fit_dense,
}
"""A fitter takes checked targets `[N, T]` and keyword options; it returns alpha, rho `[N, T]` and its steps `[N]`."""


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
) -> tuple[CompactPattern, Certificate]:
    """Return the patterns of `fit_compact`, and the distance of each fitted marginal from its target."""
    split_options(fitter, options, "compact")
    eta_abs, eta_rel = check_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    alpha, rho, steps = FITTERS[fitter](eta_abs.reshape(-1, length), eta_rel.reshape(-1, length), **options)
    pattern = CompactPattern.from_parameters(alpha.reshape(shape), rho.reshape(shape)).canonical()
    tolerance = options.get("tolerance", TOLERANCE) if fitter == "proportional" else TOLERANCE
    certificate = certify(pattern, eta_abs, eta_rel, sweeps=steps.reshape(shape[:-1]), tolerance=tolerance)
    stopped = int((~certificate.converged).sum())
    if stopped and fitter != "adam":  # the paper's has a fixed number of steps
        warnings.warn(
            f"{stopped} of {certificate.converged.numel()} patterns were not yet fitted within {tolerance:g} (relative "
            f"error up to {certificate.max_relative.max():.2g}): see whether their fit KL is low, or raise the fitter "
            "option max_sweeps (--fitter-options max_sweeps 2000)",
            SafWarning,
            stacklevel=3,
        )
    return pattern, certificate


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
