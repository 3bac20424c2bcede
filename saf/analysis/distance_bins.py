"""A row of attention by distance, in twelve bins: the query itself, the key before it, then powers of two."""

import torch
from torch import Tensor

from saf.errors import InputError

BINS = 12
EDGES = (0, *(2**power for power in range(BINS - 1)))
"""First distance of each bin: 0; 1; 2 to 3; 4 to 7; ...; the last takes all that is left."""


def distance_profile(rows: Tensor, position: int) -> Tensor:
    """Return the mass of rows `[..., W]` at query `position` (from 0) in each distance bin, `[..., 12]` float64.

    Keys after the query have no say. Raises InputError for rows that do not reach the query.
    """
    if not 0 <= position < rows.shape[-1]:
        raise InputError(f"rows of {rows.shape[-1]} keys have no query {position}")
    by_distance = rows[..., : position + 1].double().flip(-1)
    bins = torch.bucketize(
        torch.arange(position + 1, device=rows.device), torch.tensor(EDGES[1:]).to(rows.device), right=True
    )
    return by_distance.new_zeros(*rows.shape[:-1], BINS).index_add_(-1, bins, by_distance)
