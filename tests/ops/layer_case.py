"""One layer's mixed attention, forward and backward, on any device."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from saf.heads import HeadLayout
from saf.ops import FrozenHeads, mixed_attention
from saf.patterns import CompactPattern, DensePattern, ExponentialPattern
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.hard_patterns import hard_patterns


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer: `heads` query heads in groups that share a value head, of which `frozen` (original ids) are frozen.

    `patterns` are names of hard patterns, taken in turn; they cover `extra` more positions than the input, and with
    `dense` are given entry by entry, in float32 or wider. With a `band` they are exponential patterns instead.
    `layout` is how operands lie in memory: "packed" views of a larger buffer, "contiguous", or "channels", whose
    channels have no unit stride. Where no kernel of PyTorch reads it, the memory around packed views is NaN.
    """

    length: int
    dim: int = 64
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    backend: str = "toeplitz"
    heads: int = 4
    group: int = 1
    frozen: tuple[int, ...] = (1, 3)
    patterns: tuple[str, ...] = ("decay", "ripple")
    extra: int = 63
    dense: bool = False
    band: int = 0
    layout: str = "packed"

    @property
    def name(self) -> str:
        """A readable id."""
        kind = str(self.dtype).removeprefix("torch.")
        which = "".join(map(str, self.frozen)) or "none"
        grouped = f"-of-{self.heads}-by-{self.group}" if self.group > 1 else f"-of-{self.heads}"
        kind += "-dense" * self.dense
        return f"{self.backend}-{kind}-T{self.length}-B{self.batch}-D{self.dim}-{which}{grouped}-{self.layout}"

    @cached_property
    def heads_by_slot(self) -> HeadLayout:
        """Live heads first."""
        return HeadLayout(self.heads, self.heads // self.group, self.frozen)

    @cached_property
    def kv_head(self) -> tuple[int, ...]:
        """The value head of every slot."""
        return tuple(head // self.group for head in self.heads_by_slot.slots) if self.group > 1 else self._in_order

    @property
    def _in_order(self) -> tuple[int, ...]:
        return tuple(range(self.heads))

    def pattern(self, device: torch.device | str) -> CompactPattern | ExponentialPattern:
        """Return the patterns of the frozen heads."""
        if self.band:
            made = exponential_patterns(len(self.frozen), self.length + self.extra, band=self.band)
            return made.to(device=device)
        names = [self.patterns[at % len(self.patterns)] for at in range(len(self.frozen))]
        return hard_patterns(names, self.length + self.extra, device)


def operand(case: Case, heads: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Return a leaf that requires a gradient and its view `[B, heads, T, D]` in the case's layout."""
    values = torch.randn(case.batch, heads, case.length, case.dim, generator=generator, device=device)
    if case.layout == "packed":
        alone = case.backend == "fused" or not case.heads_by_slot.num_live
        shape = (case.batch, case.length + 3, heads + 2, case.dim + 8)
        fill = torch.nan if alone else 0.0
        leaf = torch.full(shape, fill, dtype=case.dtype, device=device)
        inside(leaf, case).copy_(values)
    elif case.layout == "channels":
        leaf = values.to(case.dtype).mT.contiguous()
    else:
        leaf = values.to(case.dtype)
    leaf.requires_grad_()
    return leaf, inside(leaf, case)


def inside(leaf: Tensor, case: Case) -> Tensor:
    """Return the view `[B, heads, T, D]` of a leaf, or of its gradient."""
    if case.layout == "packed":
        return leaf[:, : case.length, 1:-1, : case.dim].transpose(1, 2)
    return leaf.mT if case.layout == "channels" else leaf


def mix(
    case: Case, device: str, pattern: CompactPattern | ExponentialPattern | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Return the leaves with their views, gradients in them, the output gradient and the output."""
    slots = case.heads_by_slot
    generator = torch.Generator(device).manual_seed(5)
    used = sorted(set(case.kv_head[: slots.num_live]))
    counts = {"query": slots.num_live, "key": len(used), "value": case.heads // case.group}
    leaves = {name: operand(case, count, generator, device) for name, count in counts.items()}
    upstream = operand(case, case.heads, generator, device)[1].detach()
    frozen = None
    if pattern is not None and case.frozen:
        options = {"backend": case.backend, "dtype": case.dtype, "device": device, "kv_head": case.kv_head}
        given = (
            DensePattern(pattern.dense().to(torch.promote_types(case.dtype, torch.float32))) if case.dense else pattern
        )
        frozen = FrozenHeads.from_patterns(given, **options)
    query, key, value = (view for _, view in leaves.values())
    output = mixed_attention(query, key, value, frozen)
    assert output.dtype == case.dtype
    output.backward(upstream)
    return leaves, upstream, output.detach()


def collected(case: Case, leaves: dict[str, tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """Return the gradients of the leaves' views, and whether all around them is zero."""
    gradients, untouched = {}, True
    for name, (leaf, view) in leaves.items():
        whole = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradients[name] = inside(whole, case).clone()
        inside(whole, case).zero_()
        untouched &= not whole.nan_to_num(nan=1.0).any().item() and view.shape == gradients[name].shape
    return gradients, untouched
