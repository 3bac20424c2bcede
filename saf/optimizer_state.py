"""Optimiser state under edits: what can be carried by heads, and what must be refused.

Moments follow the rows of the weights (saf/surgery.py); state that was left behind is refused, since fused kernels do
not check shapes. The logits of trainable patterns join an optimiser without weight decay, and leave it again.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from saf.errors import InputError, UnsupportedError


def unwrap_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the PyTorch optimiser under wrappers such as accelerate's."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        if not hasattr(optimizer, "optimizer"):
            raise InputError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        optimizer = optimizer.optimizer
    return optimizer


def moments(parameter: Tensor, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the optimiser's tensors that have the parameter's shape, by name."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {name: each for name, each in state.items() if isinstance(each, Tensor) and each.shape == parameter.shape}


def check_optimizer(optimizer: Optimizer | None, parameters: Iterable[Tensor]) -> None:
    """Raise unless the optimiser holds the parameters' training state in a form that can be carried by rows."""
    if optimizer is None:
        return
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise UnsupportedError(f"{kind} keeps one state for all weights together, which cannot be carried by heads")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in held:
            raise InputError(
                "this optimizer does not hold the model's attention weights; pass the one that trains them"
            )
        plain = (Tensor, nn.Parameter, type(parameter.data))
        for name, state in optimizer.state.get(parameter, {}).items():
            if state is None or isinstance(state, int | float | str):
                continue
            if type(state) not in plain:  # such as 8-bit moments, or a list of factors
                raise UnsupportedError(
                    f"{kind} keeps {name!r} as {type(state).__name__}; only plain tensors can be carried by heads: "
                    "edit before its first step, or train with an optimizer that keeps plain moments"
                )
            if state.dim() > 0 and state.shape != parameter.shape:
                raise UnsupportedError(
                    f"{kind} keeps {name!r} of shape {tuple(state.shape)} for a weight of shape "
                    f"{tuple(parameter.shape)}; only state of the weight's own shape can be carried by heads"
                )


_START_AT_ZERO = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")
)
"""State that is zero before a weight's first step, whatever optimiser of PyTorch keeps it (`sum`: see below)."""


def check_returning(optimizer: Optimizer, parameter: Tensor, missing: Iterable[str]) -> None:
    """Raise UnsupportedError for state, by name, that rows put back lack and that does not start at zero.

    They left before the optimiser's first step, so only their start is known, as zero or not at all.
    """
    group = _group_of(optimizer, parameter)
    adagrad = {"sum"} if group.get("initial_accumulator_value") == 0 else set()
    if unknown := sorted(set(missing) - _START_AT_ZERO - adagrad):
        raise UnsupportedError(
            f"{type(optimizer).__name__} keeps {unknown[0]!r}, whose start is unknown, and these heads left before its "
            "first step; delete this optimizer, undo, then make a new one"
        )


ORDER = "saf_head_order"
"""Key of a parameter group for the order of heads in its weights: a digest, or no key for the original order.

A group's settings are part of every optimiser's state dict, so saved state names its heads.
"""


_OWN = ("params", "param_names", "weight_decay", ORDER)
"""Entries of a parameter group that are not copied to a group with the same settings."""


class HeadOrders:
    """Hold which heads have which rows of edited parameters, weakly, and refuse optimiser state of others.

    State dicts are looked at when loaded into an optimiser that is known here, and every optimiser at its first step
    after an edit: PyTorch offers no other place to see one that was not passed than a hook before all steps.
    """

    def __init__(self):
        self.rows = WeakTensorKeyDictionary()
        """The heads that the rows of an edited parameter belong to, as text."""
        self.moved = WeakTensorKeyDictionary()
        """Parameters whose rows an edit moved in this process: state from before does not fit them."""
        self.checked: WeakKeyDictionary[Optimizer, list[int | None]] = WeakKeyDictionary()
        """The digest by group of optimisers whose state is in order."""
        self.known: WeakSet[Optimizer] = WeakSet()
        self.handle: RemovableHandle | None = None

    def set(self, rows: Iterable[tuple[Tensor, str | None]], optimizer: Optimizer | None) -> None:
        """Record the rows of parameters, None for the original order; `optimizer` was carried along."""
        for parameter, text in rows:
            if text is not None:
                self.rows[parameter] = text
            elif parameter in self.rows:
                del self.rows[parameter]
        self.checked.clear()
        if optimizer is not None:
            self._accept(getattr(optimizer, "optimizer", optimizer))  # accelerate's holds the one that steps
        if self.handle is None and len(self.rows):
            self.handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise InputError where the optimiser's state is of other heads; look once, and when a group's key changed."""
        if [group.get(ORDER) for group in optimizer.param_groups] != self.checked.get(optimizer):
            self._check(optimizer, optimizer.param_groups, optimizer.state)
            self._accept(optimizer)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Raise InputError for a state dict of other heads than the parameters have, before it is loaded."""
        self._check(optimizer, state_dict["param_groups"], state_dict["state"])

    def _accept(self, optimizer: Optimizer) -> None:
        """Mark the optimiser's groups as of the heads that their parameters have."""
        digests = [self._digest(group["params"]) for group in optimizer.param_groups]
        for group, digest in zip(optimizer.param_groups, digests, strict=True):
            group.pop(ORDER, None)
            if digest is not None:
                group[ORDER] = digest
        self.checked[optimizer] = digests
        if optimizer not in self.known and any(digest is not None for digest in digests):
            self.known.add(optimizer)
            optimizer.register_load_state_dict_pre_hook(self._before_load)

    def _digest(self, parameters: Sequence[Tensor]) -> int | None:
        """Return 63 bits of the SHA-256 of what the rows of edited parameters are; None where none was edited."""
        rows = [(place, self.rows[each]) for place, each in enumerate(parameters) if each in self.rows]
        return int.from_bytes(sha256(repr(rows).encode()).digest()[:8], "big") >> 1 if rows else None

    def _check(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], state: Mapping) -> None:
        """Raise InputError unless groups and state, loaded or to be, are of the heads that the parameters have."""
        for own, group in zip(optimizer.param_groups, groups, strict=False):
            if (recorded := group.get(ORDER)) == self._digest(own["params"]):
                continue
            for parameter, key in zip(own["params"], group["params"], strict=False):
                # Others are copies, such as shards, that took over the groups of an optimiser with its state.
                concerned = parameter in self.rows or (recorded is not None and parameter in self.moved)
                if not concerned or not state.get(key) or _unused(state[key], parameter):
                    continue
                # An optimiser made since whose groups say nothing, such as one filled by hand, is taken by its shapes.
                made_since = recorded is None and optimizer not in self.known and parameter not in self.moved
                if not (made_since and _fits(state[key], parameter)):
                    raise InputError(
                        f"{type(optimizer).__name__}'s state must be of the attention heads as they are now, got that "
                        "of others; pass optimizer= to every edit, or load a state saved since, or make a new optimizer"
                    )


def _fits(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Return whether the tensors of a parameter's state can be of its shape: each size is its own, or one."""
    return all(
        value.dim() != parameter.dim()
        or all(size in (1, own) for size, own in zip(value.shape, parameter.shape, strict=True))
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _unused(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Return whether state is as made before a first step, as Adagrad makes it."""
    return "step" in state and float(state["step"]) == 0 and _fits(state, parameter)


head_orders = HeadOrders()

_edited_with = WeakTensorKeyDictionary()
"""The optimiser whose moments followed the last edit of a parameter, held weakly."""


def remember_optimizer(parameter: Tensor, optimizer: Optimizer) -> None:
    """Remember that an edit of a parameter took this optimiser along."""
    _edited_with[parameter] = weakref.ref(optimizer)


def check_left_behind(parameters: Iterable[Tensor]) -> None:
    """Raise InputError when an optimiser that followed the last edit still has moments of one of the parameters."""
    left = [parameter for parameter in parameters if _has_moments(parameter)]
    if not left:
        return
    # A scheduler and its optimiser hold one another: dropped ones live on until they are collected.
    gc.collect()
    if any(map(_has_moments, left)):
        raise InputError(
            "these heads were frozen together with an optimizer, whose moments would be left behind; pass it as "
            "optimizer=, even if it is not used any more"
        )


def _has_moments(parameter: Tensor) -> bool:
    """Return whether the optimiser that followed the last edit of a parameter still has its moments."""
    reference = _edited_with.get(parameter)
    return bool(moments(parameter, None if reference is None else reference()))


def update_steps_(parameter: Tensor, optimizer: Optimizer) -> None:
    """Give a weight without elements, which steps pass over for want of a gradient, the step count of the others."""
    own = optimizer.state.get(parameter, {})
    steps = [state["step"] for other, state in optimizer.state.items() if other.numel() and "step" in state]
    if "step" in own and steps:
        newest = max(steps, key=float)
        own["step"] = newest.clone() if isinstance(newest, Tensor) else newest


def check_group(optimizer: Optimizer | None, weight: Tensor) -> None:
    """Raise UnsupportedError when patterns cannot join the optimiser that trains a layer's `weight`."""
    if optimizer is None:
        return
    source = _group_of(optimizer, weight)
    if "param_names" in source:
        raise UnsupportedError("an optimizer of named parameters cannot take patterns; make it of model.parameters()")
    if _undecayed(optimizer, source) is None and _scheduled(optimizer):
        raise UnsupportedError(
            "a learning-rate scheduler counts on this optimizer's groups, and none has the settings of the attention "
            "weights with weight_decay=0, where trainable patterns would join; before making the scheduler, call "
            'optimizer.add_param_group({"params": [], "weight_decay": 0.0})'
        )


def add_logits_(optimizer: Optimizer, logits: Sequence[nn.Parameter], weight: Tensor) -> None:
    """Let the optimiser of a layer's `weight` train logits of its patterns: same settings, no weight decay, no moments.

    They join the group that has these settings already, so that learning-rate schedules reach them; else a new one.
    """
    source = _group_of(optimizer, weight)
    group = _undecayed(optimizer, source)
    if group is None:
        settings = {name: value for name, value in source.items() if name not in _OWN}
        optimizer.add_param_group({**settings, "params": list(logits), "weight_decay": 0.0})
    else:
        group["params"].extend(logits)


def drop_logits_(optimizer: Optimizer, logits: Iterable[nn.Parameter]) -> None:
    """Take logits and their moments out of the optimiser; a group left empty goes too, unless a scheduler has it."""
    gone = {id(parameter) for parameter in logits}
    for group in list(optimizer.param_groups):
        for parameter in [parameter for parameter in group["params"] if id(parameter) in gone]:
            optimizer.state.pop(parameter, None)
        staying = [parameter for parameter in group["params"] if id(parameter) not in gone]
        emptied = bool(group["params"]) and not staying
        group["params"] = staying
        if emptied and not _scheduled(optimizer):
            optimizer.param_groups.remove(group)


def _group_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the group that holds a weight; the first when it is not trained."""
    groups = optimizer.param_groups
    return next((group for group in groups if any(one is weight for one in group["params"])), groups[0])


def _undecayed(optimizer: Optimizer, source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the group with the settings of `source` and no weight decay, itself perhaps; None when there is none."""
    for group in optimizer.param_groups:
        names = (group.keys() | source.keys()) - {*_OWN}
        if group.get("weight_decay", 0) == 0 and all(_same(group.get(name), source.get(name)) for name in names):
            return group
    return None


def _same(one: Any, other: Any) -> bool:
    """Return whether two settings of parameter groups are equal; tensors, as learning rates may be, by value."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or float(one) == float(other)
    return one == other


def _scheduled(optimizer: Optimizer) -> bool:
    """Return whether a scheduler of PyTorch was made for the optimiser; it marks the step it watches."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
