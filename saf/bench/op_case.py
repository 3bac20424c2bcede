"""The shapes of operator benchmarks: heads, operands and work of each arm."""

from dataclasses import dataclass
from typing import Literal

import torch

from saf.bench.arms import FREE, Arm
from saf.bench.flex import FLEX
from saf.bench.grids import Point
from saf.bench.settings import OpSettings
from saf.bench.shape import shape_of
from saf.bench.timing import GRAPH, ways_of
from saf.bench.work import Work, attention_work
from saf.errors import InputError
from saf.heads import HeadLayout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One part of one point. In the part "frozen", `rate` says how many heads ordinary arms have too."""

    settings: OpSettings
    point: Point
    part: str
    rate: float
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, KV heads, channels."""
        own, usual = self.settings, shape_of(self.settings.shape, self.point.length)
        kv_heads = own.num_kv_heads or own.num_heads or usual.num_kv_heads
        return own.num_heads or usual.num_heads, kv_heads, own.head_dim or usual.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands."""
        usual = "bf16" if self.device.type == "cuda" else "fp32"
        return DTYPES[usual if self.settings.dtype == "auto" else self.settings.dtype]

    @property
    def reason_against(self) -> str | None:
        """Why this case cannot be measured; None when it can."""
        if self.part == "frozen" and round(self.rate * self.shape[0]) == 0:
            return f"a rate of {self.rate:g} freezes none of {self.shape[0]} heads"
        if self.part == "frozen" and self.shape[0] != self.shape[1]:
            return "with grouped queries frozen heads share values; only the whole layer is compared"
        return None

    def layout(self, rate: float) -> HeadLayout:
        """Return the layer's heads, the frozen ones drawn from the seed; raise InputError when there are none."""
        heads, kv_heads, _ = self.shape
        count = round(rate * heads)
        if count == 0:
            raise InputError(f"a rate of {rate:g} freezes none of {heads} heads")
        drawn = torch.randperm(heads, generator=torch.Generator().manual_seed(self.settings.seed))[:count]
        return HeadLayout(heads, kv_heads, tuple(sorted(drawn.tolist())))

    def operands(self, arm: Arm) -> tuple[int, int, int]:
        """Return how many query, key and value heads an arm reads."""
        heads, kv_heads, _ = self.shape
        if self.part == "frozen":
            frozen = self.layout(self.rate).num_frozen
            return (0, 0, frozen) if arm.backend else (frozen, frozen, frozen)
        if arm.backend is None:
            return heads, kv_heads, kv_heads
        layout = self.layout(arm.rate)
        return layout.num_live, len(set(layout.kv_head[: layout.num_live])), kv_heads

    def runs(self, arm: Arm, variant: str, *, compiled: bool) -> Literal["compiled", "eager"]:
        """Return how an arm's function runs where `compiled` asks for the compiler; so do its warm-up and its check.

        Layers with frozen heads are compiled where they are replayed as graphs, as inside a compiled model, and eager
        where they are called: a compiled function checks its guards at every call, a model once for all its layers,
        and ordinary attention not at all. Ordinary attention and frozen heads alone are one operator each, which
        nothing can be fused with, and always eager; flex attention is a kernel only when compiled, and always is.
        """
        layer = arm.backend is not None and self.part == "layer" and variant.endswith(GRAPH)
        flex = arm.backend is None and arm.kernel == FLEX
        return "compiled" if compiled and (layer or flex) else "eager"

    def work(self, arm: Arm, variant: str) -> Work:
        """Return the work of one call."""
        query, key, _ = self.operands(arm)
        return attention_work(
            batch=self.point.batch_size,
            length=self.point.length,
            dim=self.shape[2],
            live=query,
            frozen=self.layout(arm.rate).num_frozen if arm.backend else 0,
            kv_heads=key,
            backward=variant.startswith("both"),
            element=self.dtype.itemsize,
            free=arm.backend == FREE,
        )


def variants_of(settings: OpSettings, device: torch.device) -> tuple[str, ...]:
    """Return what is timed: a direction, then "graph" (replayed) or "call".

    Raises UnsupportedError when graphs alone are asked for without CUDA.
    """
    ways = tuple(reversed(ways_of(settings.graphs, device)))
    return tuple(f"{direction} {way}" for direction in settings.directions for way in ways)
