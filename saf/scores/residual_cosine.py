"""Residual cosine influence, paper Eq. (11): heads whose replacement turns the residual stream least go first."""

import torch
from torch import Tensor

from saf.scores.outputs import HeadOutputs
from saf.statistics import AttentionStatistics


def residual_cosine(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Return the mean of `1 - cos(Y, Y + D)` over samples, `[L, H]`.

    Written as `(|Y|²|D|² - <Y,D>²) / (p (p + <Y,Y+D>))` with p the product of the two norms, so that nothing is
    lost where D is small. A residual stream of norm 0 counts as turned by nothing.
    """
    before, change, inner = outputs.residual[:, None], outputs.change, outputs.residual_change
    after = (before.square() + 2 * inner + change.square()).clamp(min=0).sqrt()
    product, aligned = before * after, before.square() + inner
    turned = ((before * change).square() - inner.square()).clamp(min=0)
    # For opposed vectors the denominator vanishes; the direct form loses nothing there.
    value = torch.where(aligned > 0, turned / (product * (product + aligned)), 1 - aligned / product)
    return torch.where(product == 0, 0.0, value).mean(-1)
