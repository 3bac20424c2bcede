"""The oracle of fits: Newton's method on Eq. (4) with every row formed, for short lengths; no code of the tiles."""

from dataclasses import dataclass

import torch
from torch import Tensor

# A hundred times the rounding of a loss of a few nats, and a bound on steps that do not converge: round numbers.
_DECREASE, _MOST_STEPS = 1e-13, 200
# Eigenvalues below this share of the largest belong to the gauge, which the loss does not see.
_GAUGE = 1e-12
# The usual sufficient decrease of a line search, a share of the slope's, and its shortest step.
_SUFFICIENT, _SHORTEST = 1e-4, 1e-10


def fit_dense(
    eta_abs: Tensor,
    eta_rel: Tensor,
    *,
    tolerance: float = _DECREASE,
    max_steps: int = _MOST_STEPS,
    alpha_constant_after: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, rho `[N, T]` and the steps taken `[N]` for targets `[N, T]` (of `check_targets`).

    Damped Newton steps from alpha = rho = 0 until the predicted decrease of the loss falls below `tolerance`
    nats per row. A head takes memory T^2 and time T^3 a step.
    """
    alpha, rho = torch.zeros_like(eta_abs), torch.zeros_like(eta_rel)
    steps = torch.zeros(len(eta_abs), dtype=torch.int64, device=eta_abs.device)
    for head in range(len(eta_abs)):
        model = _DenseModel.build(eta_abs[head], eta_rel[head], alpha_constant_after)
        parameters, steps[head] = _newton(model, tolerance, max_steps)
        alpha[head], rho[head] = model.expand(parameters)
    return alpha, rho, steps


@dataclass(frozen=True)
class _DenseModel:
    """One head: parameters are alpha of the free keys (the last one may be that of a whole tail), then rho."""

    basis: Tensor  # [T, free], one-hot: the parameter of each key
    target: Tensor  # [free + T], its marginals

    @classmethod
    def build(cls, eta_abs: Tensor, eta_rel: Tensor, constant_after: int | None) -> "_DenseModel":
        free = len(eta_abs) if constant_after is None else constant_after + 1
        key = torch.arange(len(eta_abs), device=eta_abs.device).clamp(max=free - 1)
        basis = torch.nn.functional.one_hot(key, free).to(eta_abs)
        return cls(basis, torch.cat([eta_abs @ basis, eta_rel]))

    def expand(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        free = self.basis.shape[1]
        return self.basis @ parameters[:free], parameters[free:]

    def rows(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, nats per row, and the pattern `[T, T]`."""
        alpha, rho = self.expand(parameters)
        position = torch.arange(len(alpha), device=alpha.device)
        distance = position[:, None] - position
        logits = (alpha + rho[distance.clamp(min=0)]).masked_fill(distance < 0, -torch.inf)
        loss = (logits.logsumexp(-1).sum() - self.target @ parameters) / len(alpha)
        return loss, logits.softmax(-1)

    def derivatives(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        """Return T times the gradient and the Hessian of the loss."""
        position = torch.arange(len(pattern), device=pattern.device)
        back, ahead = position[:, None] - position, position[:, None] + position
        by_distance = pattern.gather(1, back.clamp(min=0)) * (back >= 0)
        by_key_and_distance = pattern.T.gather(1, ahead.clamp(max=len(pattern) - 1)) * (ahead < len(pattern))
        means = torch.cat([pattern @ self.basis, by_distance], -1)  # of each row's features
        fitted, free = means.sum(0), self.basis.shape[1]
        second = torch.diag(fitted)
        second[:free, free:] = self.basis.T @ by_key_and_distance
        second[free:, :free] = second[:free, free:].T
        return fitted - self.target, second - means.T @ means


def _newton(model: _DenseModel, tolerance: float, max_steps: int) -> tuple[Tensor, int]:
    """Minimise one head's loss by damped Newton steps; return its parameters and the number of steps."""
    parameters = torch.zeros_like(model.target)
    loss, pattern = model.rows(parameters)
    for step in range(max_steps):
        gradient, hessian = model.derivatives(pattern)
        # Scaled by the targets' magnitudes; the pseudo-inverse leaves the gauge directions alone.
        scale = model.target.rsqrt()
        inverse = torch.linalg.pinv(scale[:, None] * hessian * scale, rtol=_GAUGE, hermitian=True)
        direction = -scale * (inverse @ (scale * gradient))
        slope = gradient @ direction / len(pattern)
        if -slope.item() < tolerance:
            return parameters + direction, step + 1
        size = 1.0
        while size > _SHORTEST:
            candidate = parameters + size * direction
            next_loss, next_pattern = model.rows(candidate)
            if (next_loss <= loss + _SUFFICIENT * size * slope).item():
                break
            size /= 2
        else:
            return parameters, step
        parameters, loss, pattern = candidate, next_loss, next_pattern
    return parameters, max_steps
