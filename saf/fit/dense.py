"""The dense fitter, the oracle of the others: Newton's method on Eq. (4) with every row formed.

For short lengths: a head takes memory T^2 and time T^3 a step. It uses no code of the tiles.
"""

import torch
from torch import Tensor

# A hundred times the rounding of a loss of a few nats, and a bound on steps that do not converge: round numbers.
DECREASE, STEPS = 1e-13, 200
# Eigenvalues below this share of the largest belong to the gauge, which the loss does not see.
GAUGE = 1e-12
# The usual sufficient decrease of a line search, a share of the slope's, and its shortest step.
SUFFICIENT, SHORTEST = 1e-4, 1e-10


def fit_dense(eta_abs: Tensor, eta_rel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, rho `[N, T]` and the steps taken `[N]` for targets `[N, T]` (of `check_targets`).

    Damped Newton steps from alpha = rho = 0 until the predicted decrease of the loss is rounding.
    """
    targets = torch.cat([eta_abs, eta_rel], -1)
    fits = [_newton(target) for target in targets]
    parameters = torch.stack([one for one, _ in fits]) if fits else targets
    steps = torch.tensor([taken for _, taken in fits], dtype=torch.int64, device=eta_abs.device)
    alpha, rho = parameters.chunk(2, -1)
    return alpha, rho, steps


def _newton(target: Tensor) -> tuple[Tensor, int]:
    """Minimise one head's loss by damped Newton steps; return alpha and rho `[2T]`, and the number of steps."""
    parameters = torch.zeros_like(target)
    loss, pattern = _rows(parameters, target)
    for step in range(STEPS):
        gradient, hessian = _derivatives(pattern, target)
        # Scaled by the targets' magnitudes; the pseudo-inverse leaves the gauge directions alone.
        scale = target.rsqrt()
        inverse = torch.linalg.pinv(scale[:, None] * hessian * scale, rtol=GAUGE, hermitian=True)
        direction = -scale * (inverse @ (scale * gradient))
        slope = gradient @ direction / len(pattern)
        if -slope.item() < DECREASE:
            return parameters + direction, step + 1
        size = 1.0
        while size > SHORTEST:
            candidate = parameters + size * direction
            next_loss, next_pattern = _rows(candidate, target)
            if (next_loss <= loss + SUFFICIENT * size * slope).item():
                break
            size /= 2
        else:
            return parameters, step
        parameters, loss, pattern = candidate, next_loss, next_pattern
    return parameters, STEPS


def _rows(parameters: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
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
    by_distance = pattern.gather(1, back.clamp(min=0)) * (back >= 0)
    by_key_and_distance = pattern.T.gather(1, ahead.clamp(max=length - 1)) * (ahead < length)
    means = torch.cat([pattern, by_distance], -1)  # of each row's features
    fitted = means.sum(0)
    second = torch.diag(fitted)
    second[:length, length:] = by_key_and_distance
    second[length:, :length] = by_key_and_distance.T
    return fitted - target, second - means.T @ means
