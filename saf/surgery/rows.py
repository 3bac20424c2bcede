"""Rearranging the head rows of a parameter together with its optimiser state; the parameter stays the same object."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saf.surgery.optimizer import head_orders, remember_optimizer

Plan = Sequence[int | Mapping[str, Tensor]]
"""For each head of the result: the old slot it comes from, or rows to put back, by name (`weight`, moments)."""


def moments(parameter: Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the optimiser's tensors that have the parameter's shape, by name."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {name: t for name, t in state.items() if isinstance(t, Tensor) and t.shape == parameter.shape}


def take_rows(
    parameter: Tensor, dimension: int, slot: int, head_dim: int, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Return copies on the CPU of one slot's weight rows and moments, by name."""
    tensors = {"weight": parameter.data, **moments(parameter, optimizer)}
    return {
        name: tensor.narrow(dimension, slot * head_dim, head_dim).detach().to("cpu", copy=True)
        for name, tensor in tensors.items()
    }


def write_rows_(parameter: Tensor, dimension: int, slot: int, rows: Tensor) -> None:
    """Give one slot other weight rows `[D, ...]`; its moments and its gradient stay.

    An open autocast context would go on with its cast of the old ones, so its cache is emptied.
    """
    parameter.data.movedim(dimension, 0).unflatten(0, (-1, len(rows)))[slot] = rows.to(parameter)
    torch.clear_autocast_cache()


def rearrange_(
    parameter: Tensor,
    dimension: int,
    plan: Plan,
    head_dim: int,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Rebuild the head rows of a parameter, its moments and its gradient by a plan.

    Rows to put back that lack a moment (frozen before the optimiser's first step) get zeros, as do their gradients.
    """
    head_orders.moved[parameter] = True
    if optimizer is not None:
        remember_optimizer(parameter, optimizer)
    if optimizer is not None and not parameter.numel():
        _catch_up_(parameter, optimizer)
    for name, old in moments(parameter, optimizer).items():
        assert optimizer is not None
        optimizer.state[parameter][name] = _rebuilt(old, dimension, plan, head_dim, name)
    gradient = parameter.grad
    replace_data_(parameter, _rebuilt(parameter.data, dimension, plan, head_dim, "weight"))
    if gradient is not None and parameter.numel():  # a forward pass gives an empty weight none either
        parameter.grad = _rebuilt(gradient.detach(), dimension, plan, head_dim, "gradient")


def _catch_up_(parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Give a weight without elements, which steps pass over for want of a gradient, the step count of the others."""
    own = optimizer.state.get(parameter, {})
    steps = [state["step"] for other, state in optimizer.state.items() if other.numel() and "step" in state]
    if "step" in own and steps:
        newest = max(steps, key=float)
        own["step"] = newest.clone() if isinstance(newest, Tensor) else newest


def replace_data_(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data, perhaps of another shape, and no gradient; it stays the same object.

    A graph that is still alive (a loss kept in a variable) keeps the node that accumulates the parameter's gradient,
    with the old shape. PyTorch forgets that node when the dtype changes, so the data passes through another one.
    An open autocast context would go on with the old data's cast, so its cache is emptied.
    """
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data
    parameter.grad = None
    torch.clear_autocast_cache()


def _rebuilt(old: Tensor, dimension: int, plan: Plan, head_dim: int, name: str) -> Tensor:
    """Return a tensor whose head rows are those of the plan, in its order."""
    shape = list(old.shape)
    shape[dimension] = head_dim
    parts = []
    for item in plan:
        if isinstance(item, int):
            parts.append(old.narrow(dimension, item * head_dim, head_dim))
        else:
            parts.append(item[name].to(old) if name in item else old.new_zeros(shape))
    if not parts:
        shape[dimension] = 0
        return old.new_empty(shape)
    return torch.cat(parts, dim=dimension)
