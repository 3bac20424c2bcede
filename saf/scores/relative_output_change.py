"""Relative attention-output change, paper Eq. (12)."""

from torch import Tensor

from saf.scores.outputs import HeadOutputs
from saf.statistics import AttentionStatistics

FLOOR = 1e-8
"""Smallest norm of an attention output to divide by."""


def relative_output_change(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Return the mean over samples of the norm of a head's change over that of its layer's output, `[L, H]`."""
    return (outputs.change / outputs.output[:, None].clamp(min=FLOOR)).mean(-1)
