"""`fit_compact` fits compact patterns, Eq. (3), to a target's marginals: it minimises Eq. (4) by one of `FITTERS`.

`fit_kl` measures what a fit loses. exponential_fit.py starts from these fits.

A fitter takes targets `[N, T]` of `consistent_targets` and keyword options; it returns alpha and rho `[N, T]` and the
number of its steps `[N]`. `fit_proportional` is the default, `fit_adam` the paper's, `fit_dense` the oracle of both.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, SafWarning, check_keywords, check_name
from saf.log_sums import log_column_sums, log_diagonal_sums, log_row_sums
from saf.patterns import CompactPattern
from saf.statistics import FLOOR

TOLERANCE = 1e-4  # relative error of a marginal of a converged fit, whose KL is then within 1e-6 nats of the oracle's
# Relative error of the sums of marginals: those measured in float32 or by tiles miss them by far less than this, those
# of two different patterns by more.
_CONSISTENCY = 1e-3
# An entry counts in a relative error if the probabilities in it average at least this: a hundred times the floor of
# targets. A smaller marginal measures the floor and not the model.
_MEANINGFUL = 1e-7


def fit_compact(eta_abs: Tensor, eta_rel: Tensor, *, fitter: str = "proportional", **options: Any) -> CompactPattern:
    """Return the compact patterns closest to targets with these marginals, in canonical gauge, float64.

    `eta_abs` (by key) and `eta_rel` (by distance) have shape `[..., T]`, positive, each summing to T. Options are the
    fitter's: tolerance and max_sweeps of `proportional`, steps of `adam`. Raises InputError for marginals that no
    causal pattern has and for an unknown fitter or option; warns if a fitter other than `adam` stops short.

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
    check_fitter(fitter, options)
    eta_abs, eta_rel = consistent_targets(eta_abs, eta_rel)
    shape, length = eta_abs.shape, eta_abs.shape[-1]
    alpha, rho, steps = FITTERS[fitter](eta_abs.reshape(-1, length), eta_rel.reshape(-1, length), **options)
    pattern = CompactPattern.from_parameters(alpha.reshape(shape), rho.reshape(shape)).canonical()
    # Of the canonical pattern as it is executed, by sums in the log domain, whatever the fitter computed with.
    eta, fitted = torch.stack([eta_abs, eta_rel]), torch.stack(marginals(pattern))
    relative = ((fitted / eta - 1).abs() * meaningful(eta)).amax(-1).amax(0)
    l1 = (fitted - eta).abs().sum(-1).sum(0) / length
    certificate = Certificate(relative, l1, steps.reshape(shape[:-1]), options.get("tolerance", TOLERANCE))
    if fitter != "adam" and not bool(certificate.converged.all()):  # the paper's has a fixed number of steps
        advice = "; else raise max_sweeps in fitter_options (--fitter-options)" if fitter == "proportional" else ""
        warnings.warn(
            f"{int((~certificate.converged).sum())} of {certificate.converged.numel()} patterns were not yet fitted "
            f"within {certificate.tolerance:g} (relative error up to {relative.max():.2g}): it matters little where "
            f"their fit KL is low{advice}",
            SafWarning,
            stacklevel=3,
        )
    return pattern, certificate


def check_fitter(fitter: str, options: dict[str, Any]) -> None:
    """Raise InputError for an unknown fitter, and for options that it does not take."""
    check_name("fitter", fitter, FITTERS)
    check_keywords(f"fitter {fitter!r}", options, FITTERS[fitter])


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

    The target enters through its marginals `[..., T]` and its row-averaged entropy `[...]` in nats, without any T x T
    array. Raises InputError for shapes that do not match.
    """
    if pattern.alpha.shape != eta_abs.shape or row_entropy.shape != pattern.shape:
        got = f"{list(pattern.alpha.shape)}, {list(eta_abs.shape)} and {list(row_entropy.shape)}"
        raise InputError(f"expected a pattern [..., T], marginals [..., T] and row entropy [...]; got {got}")
    eta_abs, eta_rel = consistent_targets(eta_abs, eta_rel)
    loss = fit_loss(pattern.alpha.double(), pattern.rho.double(), pattern.log_z.double(), eta_abs, eta_rel)
    return loss - row_entropy.double()  # Eq. (S.7)


def fit_loss(alpha: Tensor, rho: Tensor, log_z: Tensor, eta_abs: Tensor, eta_rel: Tensor) -> Tensor:
    """Return the row-averaged cross-entropy in nats, `[...]`, for inputs `[..., T]`."""
    return (log_z - eta_abs * alpha - eta_rel * rho).mean(-1)  # Eq. (4)


# --- targets


def consistent_targets(eta_abs: Tensor, eta_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two marginals `[..., T]` in float64 with rounding errors of their sums removed.

    Marginals of one causal T x T pattern with rows that sum to one each sum to T. A query's position is its key's plus
    their distance, so `sum_j j*eta_abs + sum_δ δ*eta_rel = T(T-1)/2`. Eq. (4) is blind to the tilt by this relation;
    an exponential tilt of both marginals restores it exactly. Raises InputError where a value is not finite and
    positive or a relation misses by more than 0.1%.
    """
    if eta_abs.shape != eta_rel.shape or eta_abs.ndim == 0 or eta_abs.shape[-1] == 0:
        shapes = f"{list(eta_abs.shape)} and {list(eta_rel.shape)}"
        raise InputError(f"eta_abs and eta_rel must share one shape [..., T], T >= 1; got {shapes}")
    length, etas = eta_abs.shape[-1], []
    for name, eta in (("eta_abs", eta_abs.detach().double()), ("eta_rel", eta_rel.detach().double())):
        if not bool((eta.isfinite() & (eta > 0)).all()):
            raise InputError(f"{name} must be finite and positive; floor the pattern at 1e-9 and renormalise it")
        _check_relation(f"{name} sums to T", eta.sum(-1), length)
        etas.append(eta * (length / eta.sum(-1, keepdim=True)))
    position = torch.arange(length, dtype=torch.float64, device=etas[0].device)
    total = length * (length - 1) / 2
    _check_relation("sum(j*eta_abs) + sum(δ*eta_rel) is T(T-1)/2", ((etas[0] + etas[1]) * position).sum(-1), total)
    eta = torch.stack(etas)
    for _ in range(3 if length > 1 else 0):  # Newton steps from an error of 0.1%, which each of them squares
        means = (eta * position).sum(-1, keepdim=True) / length
        offset = position - means
        # Positions of queries vary as T^2/12, so the two variances cannot both be small.
        variance = (eta * offset.square()).sum(0).sum(-1, keepdim=True)
        tilt = (total - length * means.sum(0)) / variance
        eta = eta * (tilt * offset).exp()
        eta = eta * (length / eta.sum(-1, keepdim=True))
    return eta[0], eta[1]


def _check_relation(relation: str, actual: Tensor, expected: float) -> None:
    error = (actual - expected).abs()
    if actual.numel() and error.max().item() > _CONSISTENCY * max(expected, 1.0):
        worst = actual.flatten()[error.flatten().argmax()].item()
        raise InputError(f"marginals of one causal pattern: {relation} = {expected:g}; got {worst:g}")


def meaningful(eta: Tensor) -> Tensor:
    """Return a mask of the entries of a marginal `[..., T]` whose probabilities average at least 1e-7."""
    return eta >= _MEANINGFUL * _entries(eta)


def _entries(eta: Tensor) -> Tensor:
    """Return the number of causal entries that each value of a marginal sums, `[T]`."""
    return torch.arange(eta.shape[-1], 0, -1, dtype=eta.dtype, device=eta.device)


def initial_parameters(eta_rel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the paper's start, `[..., T]`: alpha = 0 and rho = log(max(eta_rel / (T - δ), 1e-9))."""
    return torch.zeros_like(eta_rel), (eta_rel / _entries(eta_rel)).clamp(min=FLOOR).log()


# --- proportional fitting

# Extrapolating over three sweeps, 144 heads of a trained model took 16 sweeps at most, and 54 without (docs/log.md);
# 500 leave room for harder heads.
_MEMORY, _MOST_SWEEPS = 3, 500
# Ridge of the extrapolation's equations, as a share of the trace: sweeps that hardly differ would make them singular. A
# round number, not measured.
_RIDGE = 1e-10
# Nats by which a step may move a parameter. A longer extrapolation is rejected. A longer Newton step is shortened: it
# would take entries so near to zero that the Hessian no longer sees them.
_LONGEST_STEP = 5.0
# Rounding of the loss, in nats: a rise below this does not count.
_LOSS_NOISE = 1e-12


def fit_proportional(
    eta_abs: Tensor, eta_rel: Tensor, *, tolerance: float = TOLERANCE, max_sweeps: int = _MOST_SWEEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit rows, keys and distances in turn to their sums, each exactly; return alpha, rho and the sweeps taken.

    Rows, keys and distances each divide the causal entries among them, so scaling one of them to its sums minimises
    the loss over log Z, alpha or rho exactly. One such sweep is a fixed-point map. Anderson extrapolation over the
    last sweeps shortens its linear tail; a point that raises the loss is replaced by the plain sweep, which cannot.

    A head is finished, and leaves the batch, when the next sweep would change no meaningful marginal by more
    than half of `tolerance`, relatively, and both marginals together by no more than half of it in L1 per row.
    """
    eta, point = torch.cat([eta_abs, eta_rel], -1), torch.cat(initial_parameters(eta_rel), -1)
    result = point.clone()
    sweeps = torch.full(eta.shape[:1], max_sweeps, dtype=torch.int64, device=eta.device)
    active = torch.arange(len(eta), device=eta.device)
    history = point.new_zeros(len(point), _MEMORY, point.shape[-1])
    heads = _UnfinishedHeads(
        eta, point, loss=point.new_full(point.shape[:1], torch.inf), plain=point, residual=torch.zeros_like(point),
        images=history, residuals=history.clone(),
    )  # fmt: skip
    for sweep in range(1, max_sweeps + 1):
        image = heads.sweep()
        result[active] = image
        running = heads.change(image) > tolerance / 2
        sweeps[active[~running]] = sweep
        if not bool(running.any()):
            break
        heads.advance(image, sweep)
        if not bool(running.all()):
            active, heads = active[running], heads.select(running)
    alpha, rho = result.chunk(2, -1)
    return alpha, rho, sweeps


@dataclass
class _UnfinishedHeads:
    """Targets, points and earlier sweeps of the heads that are not finished, `[N, 2T]` each: by key, then by distance.

    The image of a point is what one plain sweep makes of it.
    """

    eta: Tensor
    point: Tensor  # alpha, rho
    loss: Tensor  # [N], of the last accepted point
    plain: Tensor  # the image of that point
    residual: Tensor  # that image less that point
    images: Tensor  # differences of the images of consecutive points, [N, memory, 2T], as a ring
    residuals: Tensor  # differences of their residuals

    def select(self, heads: Tensor) -> "_UnfinishedHeads":
        return _UnfinishedHeads(*(getattr(self, field.name)[heads] for field in fields(self)))

    def sweep(self) -> Tensor:
        """Return the image of each point, after falling back to `plain` where the point raised the loss."""
        log_z, loss = self._rows(slice(None))  # Eq. (S.9)
        worse = ~(loss <= self.loss + _LOSS_NOISE)  # a loss that is NaN too
        if bool(worse.any()):
            # Forget the earlier sweeps, which led here.
            self.point = torch.where(worse[:, None], self.plain, self.point)
            self.images[worse], self.residuals[worse] = 0.0, 0.0
            log_z[worse], loss[worse] = self._rows(worse)
        self.loss = loss
        (_, rho), (log_eta_abs, log_eta_rel) = self.point.chunk(2, -1), self.eta.log().chunk(2, -1)
        alpha = log_eta_abs - log_column_sums(-log_z, rho)  # Eq. (S.10)
        rho = log_eta_rel - log_diagonal_sums(-log_z, alpha)  # Eq. (S.11)
        return torch.cat([alpha, rho], -1)

    def _rows(self, heads: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalisers and the loss of some heads at the current point."""
        alpha, rho = self.point[heads].chunk(2, -1)
        log_z = log_row_sums(alpha, rho)
        return log_z, fit_loss(alpha, rho, log_z, *self.eta[heads].chunk(2, -1))

    def change(self, image: Tensor) -> Tensor:
        """Return the largest relative change of a meaningful marginal or, if larger, the L1 change per row."""
        change = (image - self.point).abs()
        counted = torch.cat([meaningful(eta) for eta in self.eta.chunk(2, -1)], -1)
        l1 = (change * (self.eta / (self.eta.shape[-1] // 2))).sum(-1)
        return torch.maximum((change * counted).amax(-1), l1)

    def advance(self, image: Tensor, sweep: int) -> None:
        """Move to the point extrapolated from the last sweeps, `image` itself in the first."""
        residual = image - self.point
        if sweep > 1:
            slot = sweep % _MEMORY  # which of them a slot has does not matter: the mixture has no order
            self.images[:, slot], self.residuals[:, slot] = image - self.plain, residual - self.residual
        self.plain, self.residual, self.point = image, residual, image
        if sweep <= 2:
            return
        # Anderson mixing: point = g - dG^T (dF W dF^T + ridge I)^-1 dF W f of image g, residual f, W = diag(eta).
        weighted = self.residuals * self.eta[:, None]
        gram = with_ridge(weighted @ self.residuals.mT, _RIDGE)
        coefficients = torch.linalg.solve(gram, weighted @ residual[..., None])
        step = (coefficients * self.images).sum(1)
        short = step.abs().amax(-1) <= _LONGEST_STEP
        self.point = image - torch.where(short[:, None], step, 0.0)


def with_ridge(gram: Tensor, share: float) -> Tensor:
    """Add a share of the trace to the diagonal of matrices `[N, n, n]`, so that they can be inverted."""
    # Not torch.linalg.lstsq, whose default driver reads pivots that PyTorch leaves uninitialised: equal systems got
    # unequal bits (docs/log.md). The smallest ridge is for matrices of zeros.
    ridge = share * gram.diagonal(dim1=1, dim2=2).sum(-1) + 1e-300
    return gram + ridge[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


# --- Adam


def fit_adam(eta_abs: Tensor, eta_rel: Tensor, *, steps: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Take the paper's Adam steps: 400 at learning rate 0.05, defaults otherwise, no early stop.

    The gradient is Eq. (20) from tiles in the log domain; an FFT would lose rows with a small normaliser.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    alpha, rho = initial_parameters(eta_rel)
    length = alpha.shape[-1]
    optimizer = torch.optim.Adam([alpha, rho], lr=0.05, foreach=False)
    for _ in range(steps):
        log_row = -log_row_sums(alpha, rho)
        alpha.grad = ((log_column_sums(log_row, rho) + alpha).exp() - eta_abs) / length  # Eq. (20)
        rho.grad = ((log_diagonal_sums(log_row, alpha) + rho).exp() - eta_rel) / length
        optimizer.step()
    taken = torch.full(alpha.shape[:1], steps, dtype=torch.int64, device=alpha.device)
    return alpha.detach(), rho.detach(), taken


# --- Newton's method with every row formed

# A hundred times the rounding of a loss of a few nats, and a bound on steps that do not converge: round numbers.
_DECREASE, _MOST_STEPS = 1e-13, 200
# Eigenvalues below this share of the largest belong to the gauge, which the loss does not see.
_GAUGE = 1e-12
# The usual sufficient decrease of a line search, a share of the slope's, and its shortest step.
_SUFFICIENT, _SHORTEST = 1e-4, 1e-10


def fit_dense(eta_abs: Tensor, eta_rel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take damped Newton steps from alpha = rho = 0 until the predicted decrease of the loss is rounding.

    For short lengths: a head takes memory T^2 and time T^3 a step. It uses no code of the other fitters.
    """
    targets = torch.cat([eta_abs, eta_rel], -1)
    fits = [_newton(target) for target in targets]
    parameters = torch.stack([fitted for fitted, _ in fits]) if fits else targets
    steps = torch.tensor([taken for _, taken in fits], dtype=torch.int64, device=eta_abs.device)
    alpha, rho = parameters.chunk(2, -1)
    return alpha, rho, steps


def _newton(target: Tensor) -> tuple[Tensor, int]:
    """Minimise one head's loss; return alpha and rho `[2T]`, and the number of steps."""
    parameters = torch.zeros_like(target)
    loss, pattern = _dense_rows(parameters, target)
    for step in range(_MOST_STEPS):
        gradient, hessian = _derivatives(pattern, target)
        # Scaled by the targets' magnitudes, which range over many powers of ten: a logit's curvature is near its
        # marginal. The pseudo-inverse leaves the directions of the gauge, Eq. (S.6), alone.
        scale = target.rsqrt()
        inverse = torch.linalg.pinv(scale[:, None] * hessian * scale, rtol=_GAUGE, hermitian=True)
        direction = -scale * (inverse @ (scale * gradient))
        direction = direction * (_LONGEST_STEP / direction.abs().max()).clamp(max=1.0)
        slope = gradient @ direction / len(pattern)
        if -slope.item() < _DECREASE:
            return parameters + direction, step + 1
        size = 1.0
        while size > _SHORTEST:
            candidate = parameters + size * direction
            next_loss, next_pattern = _dense_rows(candidate, target)
            if (next_loss <= loss + _SUFFICIENT * size * slope).item():
                break
            size /= 2
        else:
            return parameters, step
        parameters, loss, pattern = candidate, next_loss, next_pattern
    return parameters, _MOST_STEPS


def _dense_rows(parameters: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, nats per row, Eq. (4), and the pattern `[T, T]`, Eq. (3)."""
    alpha, rho = parameters.chunk(2)
    position = torch.arange(len(alpha), device=alpha.device)
    distance = position[:, None] - position
    logits = (alpha + rho[distance.clamp(min=0)]).masked_fill(distance < 0, -torch.inf)
    loss = (logits.logsumexp(-1).sum() - target @ parameters) / len(alpha)
    return loss, logits.softmax(-1)


def _derivatives(pattern: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return T times the gradient, Eq. (20), and T times the Hessian of the loss."""
    length = len(pattern)
    position = torch.arange(length, device=pattern.device)
    back, ahead = position[:, None] - position, position[:, None] + position
    # The parameters of an entry are alpha of its key and rho of its distance, so T times the Hessian sums each row's
    # covariance of these two indicators. Key j and distance δ meet in one entry, P(j + δ, j).
    by_distance = pattern.gather(1, back.clamp(min=0)) * (back >= 0)
    by_key_and_distance = pattern.T.gather(1, ahead.clamp(max=length - 1)) * (ahead < length)
    means = torch.cat([pattern, by_distance], -1)  # of each row's indicators
    fitted = means.sum(0)
    second = torch.diag(fitted)
    second[:length, length:] = by_key_and_distance
    second[length:, :length] = by_key_and_distance.T
    return fitted - target, second - means.T @ means


FITTERS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "proportional": fit_proportional,
    "adam": fit_adam,
    "dense": fit_dense,
}
"""A new fitter is a function as described above and a line here."""
