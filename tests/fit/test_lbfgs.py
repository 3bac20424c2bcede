"""L-BFGS of many functions at once: minima of functions with known ones, each as if it were alone."""

import torch
from torch import Tensor

from saf.lbfgs import minimize


def rosenbrock(x: Tensor, steepness: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gradients of curved valleys with minimum 0 at (1, ..., 1), one for each steepness."""
    along, across = 1 - x[:, :-1], x[:, 1:] - x[:, :-1] ** 2
    steep = steepness[:, None]
    gradient = torch.zeros_like(x)
    gradient[:, :-1] = -2 * along - 4 * steep * x[:, :-1] * across
    gradient[:, 1:] += 2 * steep * across
    return (along**2 + steep * across**2).sum(-1), gradient


def test_every_function_reaches_its_minimum_as_if_it_were_alone():
    steepness = torch.tensor([1.0, 10.0, 100.0, 100.0], dtype=torch.float64)
    start = torch.full((4, 6), -0.5, dtype=torch.float64)
    start[3] = 1.0  # its minimum
    together = minimize(lambda x: rosenbrock(x, steepness), start, tolerance=1e-12)
    torch.testing.assert_close(together, torch.ones_like(start), rtol=0, atol=1e-5)
    for number in range(4):
        one = slice(number, number + 1)
        alone = minimize(lambda x, one=one: rosenbrock(x, steepness[one]), start[one], tolerance=1e-12)
        torch.testing.assert_close(alone, together[one], rtol=0, atol=1e-7)
