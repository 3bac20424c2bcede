"""How far a layer's mixed attention is from a dense float64 computation, head by head, and how far it may be."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saf.patterns import CompactPattern, ExponentialPattern
from tests.ops.layer_answers import UNIT, answers
from tests.ops.layer_case import Case, collected, mix

BUDGET = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads' outputs and value gradients, inputs being in the dtype."""
SDPA_BUDGET = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
"""The same of live heads, where PyTorch computes them: generous, as it is not on trial, but a wrong head map shows."""


@dataclass
class Outcome:
    """What came out, and the float64 answers; output and gradients as `[B, heads, T, D]`."""

    case: Case
    output: Tensor
    gradients: dict[str, Tensor]
    untouched: bool
    expected: dict[str, Tensor]
    bounds: dict[str, Tensor]
    sdpa: "Outcome | None" = None
    """Where our own kernels compute the live heads: the same layer with PyTorch's attention and dense patterns."""

    def relative(self, name: str, heads: slice | list[int] = slice(None)) -> float:
        """Largest relative L2 error among some heads of "output", "query", "key" or "value"."""
        found = self.output if name == "output" else self.gradients[name]
        return largest(found[:, heads], self.expected[name][:, heads])

    def worst(self, name: str, heads: slice | list[int] = slice(None)) -> float:
        """Largest error as a share of its componentwise bound, of some heads: at most 1 when all is well."""
        found = self.output if name == "output" else self.gradients[name]
        found, expected = found[:, heads].double(), self.expected[name][:, heads]
        share = (found - expected).abs() / (self.bounds[name][:, heads] + 1e-300)
        return share.nan_to_num(nan=float("inf")).max().item()

    def live_limit(self, name: str, heads: slice) -> float:
        """Largest relative error allowed where live heads take part: twice PyTorch's own, and one rounding."""
        case, exact = self.case, self.expected[name][:, heads]
        widest = SDPA_BUDGET[case.dtype]
        if self.sdpa is None:
            return widest
        rounding = largest(exact.to(case.dtype), exact)
        if case.length == 1 and name in ("query", "key"):  # zero: the difference of two equal sums over channels
            rounding = case.dim * UNIT[torch.float32]
        return min(widest, 2 * self.sdpa.relative(name, heads) + rounding)

    def problems(self) -> list[str]:
        """Return what breaks a budget or a bound; nothing when all is well."""
        case, live = self.case, self.case.heads_by_slot.num_live
        budget, frozen = BUDGET[case.dtype], slice(live, None)
        readers = [[slot for slot, of in enumerate(case.kv_head) if of == kv] for kv in range(case.heads)]
        own = [kv for kv, slots in enumerate(readers) if slots and min(slots) >= live]
        alone = [kv for kv in own if len(readers[kv]) == 1]
        shared = [kv for kv in own if kv not in alone]
        # A value head that several heads read has its gradient summed up in the dtype.
        limits = [("output", frozen, budget), ("value", alone, budget), ("value", shared, 1.5 * budget)]
        limits = [(name, heads, most) for name, heads, most in limits if heads and case.frozen]
        # Float64 tables carry the rounding of large exponents; the budget holds for them alone.
        shares = [] if case.dtype == torch.float64 else [(n, h, self.worst(n, h)) for n, h, _ in limits]
        if live:
            every = [("output", slice(live)), *((name, slice(None)) for name in ("query", "key", "value"))]
            limits += [(name, heads, self.live_limit(name, heads)) for name, heads in every]
        found = [(name, heads, self.relative(name, heads), most) for name, heads, most in limits]
        lines = [f"{name} of {heads}: {error:.2e} > {most:.1e}" for name, heads, error, most in found if error > most]
        lines += [f"{name} of {heads}: {share:.2f} times its bound" for name, heads, share in shares if share > 1]
        return lines + ([] if self.untouched else ["gradients outside the operands' views"])


def run(case: Case, device: str, pattern: CompactPattern | ExponentialPattern | None = None) -> Outcome:
    """Mix a layer and its gradients, and compute both in float64; beside our own live heads, PyTorch's."""
    pattern = pattern if pattern is not None or not case.frozen else case.pattern(device)
    leaves, upstream, output = mix(case, device, pattern)
    views = [view.detach() for _, view in leaves.values()]
    outcome = Outcome(case, output, *collected(case, leaves), *answers(case, views, upstream, pattern))
    if case.backend == "fused" and case.heads_by_slot.num_live:
        twin = replace(case, backend="reference")
        leaves, _, output = mix(twin, device, pattern)
        outcome.sdpa = Outcome(twin, output, *collected(twin, leaves), outcome.expected, outcome.bounds)
    return outcome


def largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative L2 error among heads `[B, heads, T, D]`; infinity for NaN."""
    found, expected = found.double(), expected.double()
    error, size = ((x.transpose(0, 1).flatten(1)).norm(dim=1) for x in (found - expected, expected))
    # At T = 1 gradients of queries and keys are zero; everything else here has a norm far above one.
    error = error / size.clamp(min=1.0)
    return error.nan_to_num(nan=float("inf")).max().item()
