"""Minimise many smooth functions at once by L-BFGS: one evaluation of all of them a step, none waits for another."""

from collections.abc import Callable

import torch
from torch import Tensor

# Wolfe's conditions with the usual constants: enough decrease, and a slope that is flatter by a tenth.
_DECREASE, _SLOPE = 1e-4, 0.9
# Halvings of a step after which a function is left where it is.
_SHORTEST = 2.0**-30


def minimize(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    steps: int,
    tolerance: float,
    patience: int = 10,
    memory: int = 12,
) -> Tensor:
    """Return the lowest points found of N functions, `[N, n]`, from `start [N, n]`.

    `evaluate(x)` returns values `[N]` and gradients `[N, n]` of all functions. A function is finished when the last
    `patience` accepted steps lowered it by less than `tolerance` in all; at most `steps` evaluations are made. Each
    evaluation tries one step length of every function, so line searches of different functions overlap.
    """
    point = start.clone()
    value, slope = evaluate(point)
    heads, size = start.shape
    every = torch.arange(heads, device=start.device)
    taken = start.new_zeros(2, heads, memory, size)  # steps and changes of the gradient
    count = torch.zeros(heads, dtype=torch.int64, device=start.device)
    recent = value[:, None].repeat(1, patience + 1)
    direction = -slope / slope.norm(dim=1, keepdim=True).clamp(min=1.0)
    low, high, length = value.new_zeros(heads), value.new_full((heads,), torch.inf), value.new_ones(heads)
    active = torch.ones_like(count, dtype=torch.bool)
    for _ in range(steps):
        tried = point + torch.where(active, length, 0.0)[:, None] * direction
        new_value, new_slope = evaluate(tried)
        descent = (slope * direction).sum(1)
        enough = new_value <= value + _DECREASE * length * descent
        flat = (new_slope * direction).sum(1) >= _SLOPE * descent
        accepted = active & enough & (flat | (length >= 8))

        high = torch.where(enough, high, length)
        low = torch.where(enough & ~flat, length, low)
        length = torch.where(high.isinf(), 2 * length, (low + high) / 2)

        here = every[accepted], count[accepted] % memory
        taken[0][here], taken[1][here] = (tried - point)[accepted], (new_slope - slope)[accepted]
        count += accepted
        point = torch.where(accepted[:, None], tried, point)
        value = torch.where(accepted, new_value, value)
        slope = torch.where(accepted[:, None], new_slope, slope)
        recent = torch.where(accepted[:, None], torch.cat([recent[:, 1:], value[:, None]], 1), recent)
        active &= ~(accepted & (count > patience) & (recent[:, 0] - value < tolerance)) & (high - low > _SHORTEST)
        if not bool(active.any()):
            break
        direction = torch.where(accepted[:, None], -_product(taken, count, slope), direction)
        low, high = torch.where(accepted, 0.0, low), torch.where(accepted, torch.inf, high)
        length = torch.where(accepted, 1.0, length)
    return point


def _product(taken: Tensor, count: Tensor, slope: Tensor) -> Tensor:
    """Return the inverse Hessian's approximation times gradients `[N, n]`, in its compact form.

    Byrd, Nocedal and Schnabel 1994, theorem 2.2: products with all steps at once, where the usual recursion would
    launch four kernels for each of them.
    """
    steps, changes = taken
    memory = steps.shape[1]
    order = (count[:, None] + torch.arange(memory, device=count.device)) % memory  # oldest first
    inner, outer = (
        x.take_along_dim(order[..., None], 1).take_along_dim(order[:, None], 2)
        for x in (steps @ changes.mT, changes @ changes.mT)
    )
    curvature = inner.diagonal(dim1=1, dim2=2)
    empty = curvature <= 0  # not filled yet, or cut short in a line search
    scale = (curvature[:, -1] / outer[:, -1, -1].clamp(min=1e-300)).clamp(min=1e-12)
    scale = torch.where(empty[:, -1], 1.0, scale)[:, None]
    keep = (~empty).to(steps)
    triangle = inner.triu() * keep[:, :, None] * keep[:, None] + torch.diag_embed(empty.to(steps))
    by_step, by_change = ((x @ slope[..., None]).squeeze(-1).gather(1, order) * keep for x in (steps, changes))
    solved = torch.linalg.solve_triangular(triangle, by_step[..., None], upper=True).squeeze(-1) * keep
    right = curvature * solved + scale * ((outer @ solved[..., None]).squeeze(-1) - by_change)
    back = torch.linalg.solve_triangular(triangle.mT, (right * keep)[..., None], upper=False).squeeze(-1) * keep
    back, solved = (torch.zeros_like(x).scatter(1, order, x)[:, None] for x in (back, scale * solved))
    return scale * slope + (back @ steps - solved @ changes).squeeze(1)
