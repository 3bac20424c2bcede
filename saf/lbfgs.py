"""`minimize` minimises many smooth functions at once by L-BFGS, so that a GPU fits all heads of a model together.

It is for functions scaled to a curvature near one, as exponential_fit.py makes them. SciPy's L-BFGS takes one function
at a time and would bring every value to the CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# Evaluations of every function at most. The twelve heads of tests/fixtures take about 40 (4,096 positions, 16 poles).
_EVALUATIONS = 200
# Steps and changes of the gradient that approximate the curvature; 4 or 24 take a few evaluations more.
_MEMORY = 12
# A function is finished when this many accepted steps have lowered it by less than the tolerance together, since steps
# gain unevenly. Three do as well for those heads, in 32 evaluations; ten leave room for harder ones.
_PATIENCE = 10
# Wolfe's conditions, with the usual constants: a step must lower the function by this share of what its first slope
# promises, and leave a slope of at most this share of the first.
_DECREASE, _SLOPE = 1e-4, 0.9
# A step of this length or more is accepted however steep the slope still is, and the next direction goes on from
# there. A round number.
_LONG = 8.0
# Width of a line search's bracket, in step lengths, below which its function is finished: rounding decides there.
_SHORTEST = 2.0**-30


def minimize(evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, *, tolerance: float) -> Tensor:
    """Minimise N smooth functions at once by L-BFGS; return their lowest points `[N, n]` from `start [N, n]`.

    `evaluate(x)` returns values `[N]` and gradients `[N, n]` of all functions, at most 200 times. A function is
    finished when the last ten accepted steps lowered it by less than `tolerance` in all. Each evaluation tries
    one step length of every function, so no function waits for the line search of another.
    """
    value, gradient = evaluate(start)
    heads, size = start.shape
    # One tensor, so that accepting a step is one kernel: the last steps, oldest first, the changes of the gradient over
    # them, the point, and its gradient.
    state = torch.cat([start.new_zeros(heads, 2 * _MEMORY, size), start[:, None], gradient[:, None]], 1)
    grams = start.new_zeros(heads, 2, _MEMORY, _MEMORY)  # products of steps, and of changes, with the changes
    direction = -gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1.0)
    search = _LineSearch(value.cpu(), tolerance)
    for _ in range(_EVALUATIONS):
        # A finished function takes steps of length zero until the last one is finished.
        step = torch.where(search.active, search.length, 0.0).to(start.device)[:, None] * direction
        tried = state[:, -2] + step
        value, gradient = evaluate(tried)
        gradients = torch.stack([state[:, -1], gradient])
        # Both slopes and the value in one copy: the only wait for the device in an evaluation.
        accepted = search.update(*torch.cat([(gradients * direction).sum(-1), value[None]]).cpu())
        moved, change = accepted.to(start.device)[:, None, None], gradient - state[:, -1]
        past = state[:, 1:_MEMORY], step[:, None], state[:, _MEMORY + 1 : 2 * _MEMORY], change[:, None]
        state = torch.where(moved, torch.cat([*past, tried[:, None], gradient[:, None]], 1), state)
        if not bool(search.active.any()):
            break
        by_change, by_gradient = ((state[:, :-2] @ x[..., None]).unflatten(1, (2, -1)) for x in (change, state[:, -1]))
        # The oldest row and column go; the new step's row is never read (`_inverse_hessian_times`), so it stays zero.
        shifted = torch.cat([pad(grams[:, :, 1:, 1:], (0, 0, 0, 1)), by_change], -1)
        grams = torch.where(moved[..., None], shifted, grams)
        direction = torch.where(moved[:, 0], -_inverse_hessian_times(grams, by_gradient, state), direction)
    return state[:, -2]


class _LineSearch:
    """The step lengths of N line searches, by bisection; on the CPU, so that each step waits for a GPU once."""

    def __init__(self, value: Tensor, tolerance: float):
        self.value, self.tolerance = value, tolerance
        self.length, self.active = torch.ones_like(value), torch.ones(len(value), dtype=torch.bool)
        self._low, self._high = torch.zeros_like(value), torch.full_like(value, torch.inf)  # the bracket
        self._recent = value[:, None].repeat(1, _PATIENCE + 1)  # values of the last accepted points, oldest first
        self._steps = torch.zeros(len(value), dtype=torch.int64)

    def update(self, slope_before: Tensor, slope_after: Tensor, value_after: Tensor) -> Tensor:
        """Return which steps are accepted, by slopes before and after them and values after; set the next lengths."""
        # Wolfe's two conditions. Too little decrease: the step was too long. Still steep: it was too short.
        enough = value_after <= self.value + _DECREASE * self.length * slope_before
        flat = slope_after >= _SLOPE * slope_before
        accepted = self.active & enough & (flat | (self.length >= _LONG))
        high = torch.where(enough, self._high, self.length)
        low = torch.where(enough & ~flat, self.length, self._low)
        length = torch.where(high.isinf(), 2 * self.length, (low + high) / 2)
        self._steps += accepted
        self.value = torch.where(accepted, value_after, self.value)
        recent = torch.cat([self._recent[:, 1:], self.value[:, None]], 1)
        self._recent = torch.where(accepted[:, None], recent, self._recent)
        settled = accepted & (self._steps > _PATIENCE) & (self._recent[:, 0] - self.value < self.tolerance)
        self.active &= ~settled & (high - low > _SHORTEST)
        # After an accepted step a new search begins, with the length one that L-BFGS expects.
        self._low, self._high = torch.where(accepted, 0.0, low), torch.where(accepted, torch.inf, high)
        self.length = torch.where(accepted, 1.0, length)
        return accepted


def _inverse_hessian_times(grams: Tensor, by_gradient: Tensor, state: Tensor) -> Tensor:
    """Return the inverse Hessian's approximation times gradients `[N, n]`, in its compact form.

    Byrd, Nocedal and Schnabel 1994, theorem 2.2: products with all steps at once, where the usual recursion would
    launch four kernels for each of them. For steps S and changes Y as columns, R the upper triangle of S^T Y, D its
    diagonal and c = s^T y / y^T y of the last step, it is

        c g + S R^-T ((D + c Y^T Y) R^-1 S^T g - c Y^T g) - c Y R^-1 S^T g

    `grams` are S^T Y and Y^T Y, of which only the upper triangles are filled; `by_gradient` are S^T g and Y^T g.
    """
    step_change, change_change = grams.unbind(1)
    curvature = step_change.diagonal(dim1=1, dim2=2)  # D
    # Steps of no positive curvature stay out: those not filled yet, and those of a line search that was cut short.
    keep = (curvature > 0).to(step_change)
    scale = (curvature[:, -1:] / change_change[:, -1, -1:].clamp(min=1e-300)).clamp(min=1e-12)
    scale = torch.where(curvature[:, -1:] > 0, scale, 1.0)  # c
    # A one on the diagonal in place of a step left out, so that R can be inverted.
    triangle = step_change.triu() * keep[:, :, None] * keep[:, None] + torch.diag_embed(1 - keep)  # R
    by_step, by_change = (by_gradient * keep[:, None, :, None]).unbind(1)
    solved = torch.linalg.solve_triangular(triangle, by_step, upper=True)  # R^-1 S^T g
    symmetric = change_change.triu() + change_change.triu(1).mT  # Y^T Y
    right = curvature[..., None] * solved + scale[..., None] * (symmetric @ solved - by_change)
    back = torch.linalg.solve_triangular(triangle.mT, right * keep[..., None], upper=False)
    coefficients = torch.cat([back, -scale[..., None] * solved], 1)
    return scale * state[:, -1] + (coefficients.mT @ state[:, :-2]).squeeze(1)
