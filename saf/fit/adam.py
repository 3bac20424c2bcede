"""The paper's fitter: a fixed number of Adam steps on Eq. (4) from the marginals alone."""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.fit.objective import initial_parameters
from saf.log_sums import log_column_sums, log_diagonal_sums, log_row_sums

STEPS, LEARNING_RATE = 400, 0.05
"""The paper's numbers."""


def fit_adam(eta_abs: Tensor, eta_rel: Tensor, *, steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, rho `[N, T]` and the steps taken `[N]` for targets `[N, T]` (of `check_targets`).

    Adam's defaults otherwise, no early stop. The gradient is fitted less target marginals over T, from tiles in
    the log domain: an FFT loses rows with a small normaliser. Raises InputError for no steps.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    alpha, rho = initial_parameters(eta_rel)
    length = alpha.shape[-1]
    optimizer = torch.optim.Adam([alpha, rho], lr=LEARNING_RATE, foreach=False)
    for _ in range(steps):
        log_row = -log_row_sums(alpha, rho)
        alpha.grad = ((log_column_sums(log_row, rho) + alpha).exp() - eta_abs) / length
        rho.grad = ((log_diagonal_sums(log_row, alpha) + rho).exp() - eta_rel) / length
        optimizer.step()
    taken = torch.full(alpha.shape[:1], steps, dtype=torch.int64, device=alpha.device)
    return alpha.detach(), rho.detach(), taken
