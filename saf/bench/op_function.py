"""The function of each arm of an operator benchmark, as it is written: not compiled."""

from collections.abc import Callable

import torch
from torch import Tensor

from saf.bench.arms import Arm
from saf.bench.flex import FLEX, FlexAttention, causal_blocks
from saf.bench.op_case import OpCase
from saf.bench.synthetic import synthetic_patterns
from saf.errors import UnsupportedError
from saf.ops import FrozenHeads, frozen_attention, live_attention, split_attention
from saf.patterns import CompactPattern

Function = Callable[..., tuple[Tensor, ...]]


def function_of(case: OpCase, arm: Arm) -> tuple[Function, CompactPattern | None]:
    """Return an arm's function of its operands, and the pattern of its frozen heads.

    Raises UnsupportedError for frozen heads beside flex attention.
    """
    return (_ordinary(case, arm), None) if arm.backend is None else _mixed(case, arm)


def _ordinary(case: OpCase, arm: Arm) -> Function:
    if arm.kernel == FLEX:
        flex = FlexAttention(causal_blocks(case.point.length, case.device))
        return lambda query, key, value: (flex(query, key, value, None, None),)
    return lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)


def _mixed(case: OpCase, arm: Arm) -> tuple[Function, CompactPattern]:
    if arm.kernel == FLEX:
        raise UnsupportedError("flex is measured for ordinary attention only")
    layout = case.layout(arm.rate)
    generator = torch.Generator().manual_seed(case.settings.seed)
    pattern = synthetic_patterns(layout.num_frozen, case.point.length, generator, case.device)
    kv_head = layout.kv_head if case.part == "layer" else None
    frozen = FrozenHeads.from_patterns(
        pattern, backend=str(arm.backend), dtype=case.dtype, device=case.device, kv_head=kv_head
    )
    if case.part == "frozen":
        return lambda value: (frozen_attention(value, frozen),), pattern

    def layer(*operands: Tensor) -> tuple[Tensor, ...]:
        if len(operands) == 1:
            return (frozen_attention(operands[0], frozen),)
        query, key, value = operands
        parts = split_attention(query, key, value, frozen, kernel=arm.live_kernel)
        return tuple(part for part in parts if part is not None)

    return layer, pattern
