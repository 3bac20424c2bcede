"""The state of an optimiser by heads: moments follow the rows of edited weights, and state of other heads is refused.

Fused optimisers do not check shapes: with the state of other rows they would train on wrong numbers silently. Logits of
trainable patterns join an optimiser without weight decay, and leave it again. Which optimiser holds the state where
ranks share it stands in `Shards` of saf/train/step.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from saf.errors import InputError, UnsupportedError, shown

# --- moments that have a weight's rows


def unwrap_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the PyTorch optimiser that steps, under wrappers such as accelerate's, itself an Optimizer."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer | None):
        raise InputError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    return optimizer


def moments(parameter: Tensor, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the optimiser's tensors of the parameter's shape, by name: not its step count, a scalar."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {name: each for name, each in state.items() if isinstance(each, Tensor) and each.shape == parameter.shape}


def check_optimizer(optimizer: Optimizer | None, parameters: Iterable[Tensor]) -> None:
    """Raise InputError or UnsupportedError unless the optimiser holds the parameters, with state of their rows."""
    if optimizer is None:
        return
    check_order(optimizer)
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in members:
            raise InputError(
                "this optimizer does not hold the model's attention weights; pass the one that trains them"
            )
        for name, state in optimizer.state.get(parameter, {}).items():
            if state is None or isinstance(state, int | float | str):
                continue
            # Rows of 8-bit state or of factored moments do not belong to heads, so they cannot follow them.
            plain = type(state) in (Tensor, nn.Parameter, type(parameter.data))
            if not plain or (state.dim() > 0 and state.shape != parameter.shape):
                kind = type(optimizer).__name__
                expected = f"a plain tensor of its weight's shape {list(parameter.shape)}, got {shown(state)}"
                raise UnsupportedError(f"{kind}'s {name!r} must be {expected}; edit before its first step")


_START_AT_ZERO = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")
)
"""State that is zero before a weight's first step in every optimiser of PyTorch (Adagrad's `sum`: by a setting)."""


def check_missing_state(parameter: Tensor, optimizer: Optimizer | None, saved: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError where returning rows lack state that does not start at zero.

    They lack what is not `saved` with them, because they left the weight before the optimiser's first step.
    """
    for name in sorted(moments(parameter, optimizer).keys() - saved.keys() - _START_AT_ZERO):
        if optimizer is not None and (name != "sum" or _group_of(optimizer, parameter)["initial_accumulator_value"]):
            raise UnsupportedError(
                f"{type(optimizer).__name__}'s {name!r} has no known start, and these heads left before its first "
                "step; delete this optimizer, undo, then make a new one"
            )


def copy_step_count_(parameter: Tensor, optimizer: Optimizer) -> None:
    """Give a weight without elements, which optimiser steps skip, the step count of the other weights."""
    own = optimizer.state.get(parameter, {})
    steps = [state["step"] for other, state in optimizer.state.items() if other.numel() and "step" in state]
    if "step" in own and steps:
        newest = max(steps, key=float)
        own["step"] = newest.clone() if isinstance(newest, Tensor) else newest


# --- the order of heads

ORDER = "saf_head_order"
"""Key of a parameter group for a digest of the heads in its weights; absent for the original order.

A group's settings are part of every optimiser's state dict, so that saved state names its heads.
"""
_orders = WeakTensorKeyDictionary()
"""The heads that the rows of an edited parameter belong to, as text; None once they are in the original order again."""
_checked: WeakKeyDictionary[Optimizer, list[int | None]] = WeakKeyDictionary()
"""Optimisers that `check_order` found in order, with the digest of each group then."""


def record_orders(rows: Mapping[Tensor, str | None], optimizer: Optimizer | None) -> None:
    """Record the heads of parameters' rows, None for the original order; `optimizer` has its moments in this order."""
    for parameter, text in rows.items():
        if text is not None or parameter in _orders:
            _orders[parameter] = text
    _checked.clear()  # any optimiser may hold these parameters, not only the one that was passed
    if optimizer is not None:
        mark_head_order(optimizer)


def check_order(optimizer: Optimizer) -> None:
    """Raise InputError unless the optimiser's state is of the heads that its weights have now."""
    # Most steps end here: only an edit or a loaded state since the last check changes this.
    if [group.get(ORDER) for group in optimizer.param_groups] == _checked.get(optimizer):
        return
    for group in optimizer.param_groups:
        if (group.get(ORDER) or None) == _digest(group["params"]):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            # State of another order is wrong but in two cases. Before a first step, all heads have the same, as with
            # Adagrad. A parameter without a recorded order may be a copy, such as a shard, with state of its own shape.
            wrong = parameter in _orders and float(state.get("step", 1)) != 0
            if state and (wrong or _has_other_rows(state, parameter)):
                raise InputError(
                    f"{type(optimizer).__name__}'s state must be of the attention heads as they are now, got that of "
                    "others; pass optimizer= to every edit, load a state saved since, or make a new optimizer"
                )
    mark_head_order(optimizer)


# Every optimiser is checked at its first step after an edit: one that was not passed can be seen in no other place.
register_optimizer_step_pre_hook(lambda optimizer, *_: check_order(optimizer))


def mark_head_order(optimizer: Optimizer) -> None:
    """Record in each group of the optimiser that its state belongs to the heads that its parameters have now.

    Copies of parameters, such as the shards of FSDP2, have no heads on record: their groups keep the digest that they
    were loaded with.
    """
    digests = []
    for group in optimizer.param_groups:
        mark = group.pop(ORDER, None) or None
        recorded = any(each in _orders for each in group["params"])
        digests.append(_digest(group["params"]) if recorded else mark)
        if digests[-1] is not None:
            group[ORDER] = digests[-1]
        elif len(_orders) and not recorded and not optimizer.state:
            # set_optimizer_state_dict first steps a new optimiser, then loads only the settings that its groups have:
            # 0 makes room for a saved digest, and the next step removes it.
            group[ORDER] = 0
    _checked[optimizer] = digests


def _digest(parameters: Sequence[Tensor]) -> int | None:
    """Return 63 bits of the SHA-256 of the heads of edited parameters; None where all have the original order."""
    edited = [(number, _orders[each]) for number, each in enumerate(parameters) if _orders.get(each) is not None]
    if not edited:
        return None
    # An int64 holds 63 bits in every format of state dicts.
    return int.from_bytes(sha256(repr(edited).encode()).digest()[:8], "big") >> 1


def _has_other_rows(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Return whether state has fewer or more rows than its parameter."""
    tensors = [each for each in state.values() if isinstance(each, Tensor) and each.dim() == parameter.dim()]
    return any(each.shape != parameter.shape for each in tensors)


# --- the logits of trainable patterns

_NOT_COPIED = ("params", "param_names", "weight_decay", ORDER)
"""Entries of a parameter group that are not copied to a group with the same settings."""


def check_can_add_logits(optimizer: Optimizer | None, weight: Tensor) -> None:
    """Raise UnsupportedError where patterns cannot join the optimiser that trains a layer's `weight`."""
    if optimizer is None:
        return
    source = _group_of(optimizer, weight)
    if "param_names" in source:
        raise UnsupportedError("an optimizer of named parameters cannot take patterns; make it of model.parameters()")
    if _group_without_decay(optimizer, source) is None and _scheduled(optimizer):
        raise UnsupportedError(
            "a learning-rate scheduler counts this optimizer's groups, and trainable patterns need one without weight "
            'decay; before making the scheduler, call optimizer.add_param_group({"params": [], "weight_decay": 0.0})'
        )


def add_logits_(optimizer: Optimizer, logits: Sequence[nn.Parameter], weight: Tensor) -> None:
    """Let the optimiser of a layer's `weight` train logits of its patterns: same settings, no weight decay, no moments.

    They join the group that has these settings, so that learning-rate schedules reach them; without one, a new group.
    """
    if not logits:
        return
    source = _group_of(optimizer, weight)
    if (group := _group_without_decay(optimizer, source)) is not None:
        group["params"].extend(logits)  # not add_param_group: a scheduler has one rate for each group that it knows
    else:
        settings = {name: value for name, value in source.items() if name not in _NOT_COPIED}
        optimizer.add_param_group({**settings, "params": list(logits), "weight_decay": 0.0})


def drop_logits_(optimizer: Optimizer, logits: Iterable[nn.Parameter]) -> None:
    """Remove logits and their moments from the optimiser, and a group left empty unless a scheduler counts groups."""
    leaving = {id(parameter) for parameter in logits}
    for group in list(optimizer.param_groups):
        gone = [parameter for parameter in group["params"] if id(parameter) in leaving]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in leaving]
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        if gone and not group["params"] and not _scheduled(optimizer):
            optimizer.param_groups.remove(group)


def _group_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the group that holds a weight; the first when it is not trained."""
    groups = optimizer.param_groups
    return next((group for group in groups if any(one is weight for one in group["params"])), groups[0])


def _group_without_decay(optimizer: Optimizer, source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the group with the settings of `source` and no weight decay, perhaps itself; None without one."""
    for group in optimizer.param_groups:
        names = (group.keys() | source.keys()) - {*_NOT_COPIED}
        if group.get("weight_decay", 0) == 0 and all(group.get(name) == source.get(name) for name in names):
            return group
    return None


def _scheduled(optimizer: Optimizer) -> bool:
    """Return whether a scheduler of PyTorch belongs to the optimiser."""
    # Its other mark, a wrapped `step`, is on accelerate's optimiser where the scheduler was made of that one.
    return any("initial_lr" in group for group in optimizer.param_groups)
