"""Gate-Taylor, paper Eq. (19): for pruning, heads whose gate the loss feels least go first."""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.statistics import AttentionStatistics


def gate_taylor(statistics: AttentionStatistics, *, gates: Tensor) -> Tensor:
    """Return the importances `gates [L, H]` over the norm of their layer's; a layer of norm 0 scores 0."""
    if gates.shape != statistics.variance.shape:
        raise InputError(f"gates must be one number a head, {list(statistics.variance.shape)}; got {list(gates.shape)}")
    gates = gates.double().cpu()
    norm = gates.nan_to_num(0.0).norm(dim=1, keepdim=True)
    return torch.where(norm == 0, gates * 0, gates / norm)
