"""Three-way proportional fitting, the default: exact block minimisation of Eq. (4), without a step size.

Rows, keys and distances each divide the causal entries among them, so normalising the rows, scaling each key to
its marginal and scaling each distance to its marginal are exact minimisations over log Z, alpha and rho. One
such sweep is a fixed-point map; Anderson extrapolation over the last sweeps shortens its linear tail. A point
that raises the loss is replaced by the plain sweep, which cannot raise it.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from saf.fit.objective import TOLERANCE, fit_loss, initial_parameters, meaningful
from saf.log_sums import log_column_sums, log_diagonal_sums, log_row_sums

# Extrapolating over three sweeps, 144 heads of a trained model took 16 sweeps at most, and 54 without (docs/log.md);
# 500 leave room for harder heads.
_MEMORY, _MOST_SWEEPS = 3, 500
# Added to the diagonal of the extrapolation's equations, as a share of its sum: sweeps that hardly differ would make
# them singular. The second is for sweeps that are all equal. Round numbers, not measured.
_RIDGE, _RIDGE_OF_NONE = 1e-10, 1e-300
# An extrapolation that moves a parameter further than this from the plain sweep, in nats, is rejected.
_LONGEST_STEP = 5.0
# Rounding of the loss, in nats: a rise below this does not count.
_LOSS_NOISE = 1e-12


def fit_proportional(
    eta_abs: Tensor,
    eta_rel: Tensor,
    *,
    tolerance: float = TOLERANCE,
    max_sweeps: int = _MOST_SWEEPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, rho `[N, T]` and the sweeps taken `[N]` for targets `[N, T]` (of `check_targets`).

    A head is finished, and leaves the batch, when the next sweep would change no meaningful marginal by more
    than half of `tolerance`, relatively, and both marginals together by no more than half of it in L1 per row.
    """
    alpha, rho = initial_parameters(eta_rel)
    sweeps = torch.full(eta_abs.shape[:1], max_sweeps, dtype=torch.int64, device=eta_abs.device)
    active = torch.arange(len(eta_abs), device=eta_abs.device)
    heads = _Heads.start(eta_abs, eta_rel, torch.cat([alpha, rho], -1))
    for sweep in range(1, max_sweeps + 1):
        image = heads.sweep()
        alpha[active], rho[active] = image.chunk(2, -1)
        running = heads.change(image) > tolerance / 2
        sweeps[active[~running]] = sweep
        if not bool(running.any()):
            break
        heads.advance(image, sweep)
        if not bool(running.all()):
            active, heads = active[running], heads.select(running)
    return alpha, rho, sweeps


@dataclass
class _Heads:
    """The unfinished heads: targets `[N, T]`, points (alpha, rho) `[N, 2T]`, and earlier sweeps."""

    eta_abs: Tensor
    eta_rel: Tensor
    point: Tensor
    loss: Tensor  # [N], of the last accepted point
    plain: Tensor  # the image of that point under one sweep
    residual: Tensor  # that image less that point
    images: Tensor  # differences of the images of consecutive points, [N, memory, 2T]
    residuals: Tensor  # differences of their residuals

    @classmethod
    def start(cls, eta_abs: Tensor, eta_rel: Tensor, point: Tensor) -> "_Heads":
        history = point.new_zeros(len(point), _MEMORY, point.shape[-1])
        loss = point.new_full(point.shape[:1], torch.inf)
        return cls(eta_abs, eta_rel, point, loss, point, torch.zeros_like(point), history, history.clone())

    def select(self, keep: Tensor) -> "_Heads":
        return _Heads(*(getattr(self, field.name)[keep] for field in fields(self)))

    def sweep(self) -> Tensor:
        """Return the image of each point, after falling back to `plain` where the point raised the loss."""
        log_z, loss = self._rows(slice(None))  # Eq. (S.9)
        worse = ~(loss <= self.loss + _LOSS_NOISE)
        if bool(worse.any()):
            self.point = torch.where(worse[:, None], self.plain, self.point)
            self.images[worse], self.residuals[worse] = 0.0, 0.0
            log_z[worse], loss[worse] = self._rows(worse)
        self.loss = loss
        rho = self.point.chunk(2, -1)[1]
        alpha = self.eta_abs.log() - log_column_sums(-log_z, rho)  # Eq. (S.10)
        rho = self.eta_rel.log() - log_diagonal_sums(-log_z, alpha)  # Eq. (S.11)
        return torch.cat([alpha, rho], -1)

    def _rows(self, which: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalisers and the loss of some patterns at the current point."""
        alpha, rho = self.point[which].chunk(2, -1)
        log_z = log_row_sums(alpha, rho)
        return log_z, fit_loss(alpha, rho, log_z, self.eta_abs[which], self.eta_rel[which])

    def change(self, image: Tensor) -> Tensor:
        """Return the largest relative change of a meaningful marginal or, if larger, the L1 change per row."""
        change = (image - self.point).abs()
        counted = torch.cat([meaningful(self.eta_abs), meaningful(self.eta_rel)], -1)
        mass = torch.cat([self.eta_abs, self.eta_rel], -1) / self.eta_abs.shape[-1]
        return torch.maximum((change * counted).amax(-1), (change * mass).sum(-1))

    def advance(self, image: Tensor, sweep: int) -> None:
        """Move to the point extrapolated from the last sweeps, `image` itself in the first."""
        residual = image - self.point
        if sweep > 1:
            slot = sweep % _MEMORY
            self.images[:, slot], self.residuals[:, slot] = image - self.plain, residual - self.residual
        self.plain, self.residual, self.point = image, residual, image
        if sweep <= 2:
            return
        # Anderson mixing: point = g - dG^T (dF W dF^T + ridge I)^-1 dF W f of image g, residual f, W = diag(eta).
        weighted = self.residuals * torch.cat([self.eta_abs, self.eta_rel], -1)[:, None]
        gram = weighted @ self.residuals.mT
        ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).sum(-1) + _RIDGE_OF_NONE
        gram = gram + ridge[:, None, None] * torch.eye(_MEMORY, dtype=gram.dtype, device=gram.device)
        coefficients = torch.linalg.solve(gram, weighted @ residual[..., None])
        step = (coefficients * self.images).sum(1)
        self.point = image - torch.where((step.abs().amax(-1) <= _LONGEST_STEP)[:, None], step, 0.0)
