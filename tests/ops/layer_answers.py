"""A layer's mixed attention in float64, head by head and materialised, and how far rounding may lead from it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saf.patterns import CompactPattern, ExponentialPattern

if TYPE_CHECKING:
    from tests.ops.layer_case import Case

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
"""Largest relative error of one rounding."""


def answers(
    case: "Case", views: list[Tensor], upstream: Tensor, pattern: CompactPattern | ExponentialPattern | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return output and gradients in float64, and componentwise bounds of frozen heads' ones.

    `|O - O64| <= c u (P64 |V|) + u |O64|` with u one rounding and c = 2.5 for the rounded table and input, plus
    sqrt(T) float32 roundings of a running sum of T terms, and what underflows of every weight.
    """
    query, key, value = (x.double() for x in views)
    upstream, live = upstream.double(), case.heads_by_slot.num_live
    used = sorted(set(case.kv_head[:live]))
    expected = {"output": torch.zeros_like(upstream)} | {
        name: torch.zeros_like(x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    unit = UNIT[case.dtype]
    spread = 2.5 * unit + case.length**0.5 * min(unit, UNIT[torch.float32])
    lost = underflow(case.dtype)
    bounds = {name: torch.zeros_like(expected[name]) for name in ("output", "value")}
    future = torch.ones(case.length, case.length, dtype=torch.bool, device=query.device).triu(1)
    for slot, kv in enumerate(case.kv_head):
        given = upstream[:, slot]
        if slot < live:
            at = used.index(kv)
            for row in range(case.batch):
                q, k, v = query[row, slot], key[row, at], value[row, kv]
                weights = (q @ k.T * case.dim**-0.5).masked_fill_(future, -torch.inf).softmax(-1)
                change = given[row] @ v.T
                change = weights * (change - (change * weights).sum(-1, keepdim=True)) * case.dim**-0.5
                expected["output"][row, slot] = weights @ v
                expected["query"][row, slot] = change @ k
                expected["key"][row, at] += change.T @ q
                expected["value"][row, kv] += weights.T @ given[row]
            continue
        assert pattern is not None
        weights = pattern[slot - live].dense()[: case.length, : case.length]
        rough = spread * weights + weights * rebuilding(pattern[slot - live], case.backend, case.length)
        mixed, share = weights @ value[:, kv], weights.mT @ given
        expected["output"][:, slot] = mixed
        expected["value"][:, kv] += share
        bounds["output"][:, slot] = rough @ value[:, kv].abs() + unit * mixed.abs()
        bounds["output"][:, slot] += lost * (1 + value[:, kv].abs().sum(1, keepdim=True))
        bounds["value"][:, kv] += rough.mT @ given.abs() + 2 * unit * share.abs()
        bounds["value"][:, kv] += lost * (1 + given.abs().sum(1, keepdim=True))
    return expected, bounds


def underflow(dtype: torch.dtype) -> float:
    """Return the largest absolute error of a number too small for a dtype; hardware may drop all subnormal ones."""
    smallest = torch.finfo(dtype).smallest_normal
    return smallest * UNIT[dtype] if dtype == torch.float16 else smallest


def rebuilding(pattern: CompactPattern, backend: str, length: int) -> Tensor | float:
    """Return the largest relative error of weights `[F, T, T]` rebuilt from float32 logarithms; nothing otherwise.

    Each of the three logarithms, of size |x|, is rounded once and takes part in one rounded sum; the exponential
    adds four roundings.
    """
    if backend != "fused":
        return 0.0
    balanced, position = pattern.balanced(), torch.arange(length, device=pattern.alpha.device)
    alpha, rho, log_z = (x[..., :length].abs() for x in (balanced.alpha, balanced.rho, balanced.log_z))
    lag = (position[:, None] - position).clamp(min=0)
    return UNIT[torch.float32] * (2 * (alpha[..., None, :] + rho[..., lag] + log_z[..., :, None]) + 4)
