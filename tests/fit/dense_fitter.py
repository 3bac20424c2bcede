"""The oracle of fits: Newton's method on Eq. (4) with every row formed, for short lengths; no code of the tiles."""

import torch
from torch import Tensor

from saf.fit import check_targets
from saf.patterns import CompactPattern

DECREASE = 1e-13
"""Nats per row predicted of a last step: a hundred times the rounding of a loss of a few nats."""
GAUGE = 1e-12
"""Eigenvalues below this share of the largest belong to the gauge, which the loss does not see."""


def fit_dense(eta_abs: Tensor, eta_rel: Tensor) -> CompactPattern:
    """Return the compact patterns closest to targets with these marginals `[N, T]`."""
    targets = torch.cat(check_targets(eta_abs, eta_rel), -1)
    parameters = torch.stack([_newton(target) for target in targets])
    return CompactPattern.from_parameters(*parameters.chunk(2, -1)).canonical()


def _newton(target: Tensor) -> Tensor:
    """Minimise one head's loss by damped Newton steps; return alpha and rho `[2T]`."""
    parameters = torch.zeros_like(target)
    loss, pattern = _rows(parameters, target)
    for _ in range(200):
        gradient, hessian = _derivatives(pattern, target)
        # Scaled by the targets' magnitudes; the pseudo-inverse leaves the gauge directions alone.
        scale = target.rsqrt()
        inverse = torch.linalg.pinv(scale[:, None] * hessian * scale, rtol=GAUGE, hermitian=True)
        direction = -scale * (inverse @ (scale * gradient))
        slope = gradient @ direction / len(pattern)
        if -slope.item() < DECREASE:
            return parameters + direction
        size = 1.0
        while size > 1e-10:
            candidate = parameters + size * direction
            next_loss, next_pattern = _rows(candidate, target)
            if (next_loss <= loss + 1e-4 * size * slope).item():
                break
            size /= 2
        parameters, loss, pattern = candidate, next_loss, next_pattern
    raise AssertionError("Newton's method did not converge")


def _rows(parameters: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, nats per row, Eq. (4), and the pattern `[T, T]`, Eq. (3)."""
    alpha, rho = parameters.chunk(2)
    position = torch.arange(len(alpha))
    distance = position[:, None] - position
    logits = (alpha + rho[distance.clamp(min=0)]).masked_fill(distance < 0, -torch.inf)
    return (logits.logsumexp(-1).sum() - target @ parameters) / len(alpha), logits.softmax(-1)


def _derivatives(pattern: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return T times the gradient, Eq. (20), and T times the Hessian of the loss."""
    length = len(pattern)
    position = torch.arange(length)
    back, ahead = position[:, None] - position, position[:, None] + position
    by_distance = pattern.gather(1, back.clamp(min=0)) * (back >= 0)
    by_key_and_distance = pattern.T.gather(1, ahead.clamp(max=length - 1)) * (ahead < length)
    means = torch.cat([pattern, by_distance], -1)  # of each row's features
    fitted = means.sum(0)
    second = torch.diag(fitted)
    second[:length, length:] = by_key_and_distance
    second[length:, :length] = by_key_and_distance.T
    return fitted - target, second - means.T @ means
