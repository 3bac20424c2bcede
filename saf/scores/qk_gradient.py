"""Q/K gradient, paper Eqs. (8) and (9): heads whose queries and keys training moves least go first."""

from torch import Tensor

from saf.scores.ranks import check_gradient
from saf.statistics import AttentionStatistics


def qk_gradient(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Return the running average of relative gradient norms, `[L, H]`: `gradient`, from `QKGradient.scores()`."""
    return check_gradient(gradient, statistics.measured)
