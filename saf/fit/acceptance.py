"""Which fits are close enough to their targets to be installed."""

import math

from torch import Tensor

from saf.errors import InputError

MAX_FIT_KL = 0.2
"""The paper's tolerance, nats per row."""


def accepted(kl: Tensor, *, max_fit_kl: float = MAX_FIT_KL) -> Tensor:
    """Return which fits pass, bool in the shape of `kl` (nats per row, of `fit_kl`); NaN never passes.

    Raises InputError for a tolerance that is not a positive number.
    """
    if math.isnan(max_fit_kl) or max_fit_kl <= 0:
        raise InputError(f"max_fit_kl must be positive, in nats per row; got {max_fit_kl}")
    return kl <= max_fit_kl
