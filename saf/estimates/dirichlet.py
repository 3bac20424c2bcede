"""The Dirichlet sample: every row drawn as a whole, with the mean pattern as its mean (paper, Eq. 18)."""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.estimates.sampling import causal_mask, causal_softmax, stream_of
from saf.heads import HeadSet
from saf.statistics import AttentionStatistics

SCALE = 16.0
"""What the moment estimate of the concentration is multiplied by, as in the paper."""
BOUNDS = (1e-2, 1e6)
"""Of the concentration: from draws of nearly a single key to draws equal to the mean within about a thousandth."""
PARAMETER_FLOOR = 1e-6
"""The paper's, for numerical sampling."""
# A row with no more spread over keys, or summed variance over sequences, than this is its mean: in float32 its
# concentration would be a quotient of rounding errors.
NEAR_DETERMINISTIC = 1e-6
NEAR_CONSTANT = 1e-15  # a sum of squares of rounding errors, 3e-8 each; chosen, not measured


def dirichlet(
    statistics: AttentionStatistics,
    heads: HeadSet,
    *,
    seed: int = 0,
    scale: float = SCALE,
    bounds: tuple[float, float] = BOUNDS,
) -> Tensor:
    """Return one draw for each of `heads`, `[F, T, T]`, rows from Dirichlet(c m) with m the row of the mean pattern.

    The moment estimate of c is multiplied by `scale` and kept within `bounds`. Rows whose mean is nearly one-hot, or
    that hardly vary over the sequences, are their mean. Raises InputError unless scale > 0 and 0 < bounds, ascending.
    """
    if not (scale > 0 and 0 < bounds[0] <= bounds[1]):
        raise InputError(f"scale must be above 0 and bounds ascending above 0, got {scale} and {bounds}")
    mean, variance = statistics.take("mean", heads), statistics.take("row_variance", heads)
    causal = causal_mask(mean.shape[-1])
    drawn = []
    for number, head in enumerate(heads):
        center, spread = mean[number].double(), variance[number].double()
        strength = (scale * concentration(center, spread)).clamp(*bounds)
        parameters = (strength[:, None] * center)[causal].clamp(min=PARAMETER_FLOOR)
        logits = torch.zeros_like(center)
        logits[causal] = log_gamma_draws(parameters, seed, head)
        fixed = (1 - center.square().sum(-1) <= NEAR_DETERMINISTIC) | (spread <= NEAR_CONSTANT)
        drawn.append(torch.where(fixed[:, None], center, causal_softmax(logits)).to(mean.dtype))
    return torch.stack(drawn)


def concentration(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the moment estimate of Eq. (18), `[T]`, of rows with mean `[T, T]` and summed variance `[T]`."""
    spread = 1 - mean.square().sum(-1)
    return spread / variance.clamp(min=torch.finfo(variance.dtype).tiny) - 1


def log_gamma_draws(shape: Tensor, seed: int, head: tuple[int, ...]) -> Tensor:
    """Return logarithms of gamma variates of the given shapes, one each.

    Gamma(a) is Gamma(a + 1) · U^(1/a); in the logarithm, draws of tiny shapes do not underflow to rows of zeros.
    """
    raised = stream_of(seed, head).standard_gamma(shape.numpy() + 1)
    uniform = stream_of(seed, head, 1).random(len(shape))
    # 1 - U lies in (0, 1]: its logarithm is finite.
    return torch.from_numpy(raised).log() + torch.from_numpy(1 - uniform).log() / shape
