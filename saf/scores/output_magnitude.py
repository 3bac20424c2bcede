"""Projected-output magnitude (paper, appendix A.3): heads that write least go first."""

from torch import Tensor

from saf.scores.outputs import HeadOutputs
from saf.statistics import AttentionStatistics


def output_magnitude(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Return the root mean square of the entries of each head's sampled contribution, `[L, H]`."""
    squares = outputs.gram.diagonal(dim1=-2, dim2=-1)
    return (squares / (outputs.num_samples * outputs.hidden_size)).sqrt()
