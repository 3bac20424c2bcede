"""Projections whose weights are used together with others, not one by one."""

from torch import Tensor, nn

from saf.errors import UnsupportedError


def plain_weight(projection: nn.Module) -> Tensor:
    """Return a projection's weight `[O, I]`.

    Raises UnsupportedError for what would be passed over without its own forward pass: a wrapper in place of the
    projection, and hooks on it.
    """
    if type(projection) is not nn.Linear:
        raise UnsupportedError(
            f"a projection must be a plain nn.Linear, got {type(projection).__module__}.{type(projection).__name__}; "
            "merge adapters into the weights"
        )
    if projection._forward_hooks or projection._forward_pre_hooks or projection._backward_hooks:
        raise UnsupportedError(
            "projections are computed together with others: its hooks would not run; hook the layer instead"
        )
    return projection.weight
