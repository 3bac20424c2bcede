"""Redundancy within the layer, paper Eq. (10): heads that write what another head writes go first."""

import torch
from torch import Tensor

from saf.scores.outputs import HeadOutputs
from saf.statistics import AttentionStatistics


def redundancy(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Return minus the largest cosine between a head's contribution and another live head's of its layer, `[L, H]`.

    A head that writes nothing has cosine 0 to all; a layer's only live head scores 1, as if opposed to all.
    """
    norm = outputs.gram.diagonal(dim1=-2, dim2=-1).sqrt()
    product = norm[..., :, None] * norm[..., None, :]
    cosine = torch.where(product == 0, 0.0, outputs.gram / product).clamp(-1, 1)
    same = torch.eye(cosine.shape[-1], dtype=torch.bool)
    largest = cosine.masked_fill(same | cosine.isnan(), -1).amax(-1)
    return torch.where(norm.isnan(), torch.nan, -largest)
