"""The cases of operator benchmarks: what is asked for, heads, operands and work of each arm, and its function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from saf.bench.harness.arms import FLEX, FREE, Arm
from saf.bench.harness.baselines import FlexAttention, causal_blocks
from saf.bench.harness.settings import Point, SpeedSettings
from saf.bench.harness.shape import shape_of
from saf.bench.harness.synthetic import synthetic_patterns
from saf.bench.harness.timing import GRAPH, ways_of
from saf.bench.harness.work import Work, attention_work
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadLayout
from saf.ops import FrozenHeads, frozen_attention, live_attention, split_attention
from saf.patterns import CompactPattern
from saf.settings import documented

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@documented
@dataclass(kw_only=True)
class OpSettings(SpeedSettings):
    """Time one layer's attention without projections: frozen heads alone, and the whole layer."""

    kind: ClassVar[str] = "op"
    grid: Literal["lengths", "qwen"] = "lengths"
    """32,768 tokens at 1K to 64K, or B 4 and 8 at 2K, 4K, 8K."""
    shape: str = "124m"
    """Preset whose heads and channels the layer has; also qwen3-4b and llamas."""
    num_heads: int | None = None
    """Query heads, instead of the shape's."""
    num_kv_heads: int | None = None
    """Key and value heads, instead of the shape's."""
    head_dim: int | None = None
    """Channels of a head, instead of the shape's."""
    whole_groups: bool = False
    """Freeze whole groups of heads that share keys, instead of heads by themselves."""
    parts: tuple[Literal["frozen", "layer"], ...] = ("frozen", "layer")
    """The frozen heads against the same heads as ordinary attention; the mixed layer against an ordinary one."""
    directions: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Forward alone, forward and backward."""
    graphs: Literal["off", "on", "both"] = "both"
    """Events around each eager call, around replays of a CUDA graph (no launch cost, layers compiled), or both."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the operands; bf16 on CUDA, fp32 on CPU."""
    repeats: int = 20
    """Passes over the operands in a timed block; the block's time is their median."""
    block_ms: float = 15.0
    """Fewer repeats where a timed block would take longer than this, milliseconds."""
    rest_ms: float | None = None
    """Idle time before every timed block, so that each begins at full clocks, ms; left out: 200 on CUDA, 0 on CPU."""

    def __post_init__(self):
        """Check the settings of operators too."""
        super().__post_init__()
        self._require("pairs", self.pairs >= 1, "at least 1")
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("parts", "directions"):
            self._require(name, len(getattr(self, name)) >= 1, "at least one")
        self._require("block_ms", self.block_ms > 0, "above 0")
        self._require("rest_ms", self.rest_ms is None or self.rest_ms >= 0, "at least 0")
        own = self.num_heads is not None and self.head_dim is not None
        self._refuse("shape", own, "beside num_heads and head_dim; leave it out, or one of them")


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """Describe one part of one point. In the part "frozen", `rate` says how many heads ordinary arms have too."""

    settings: OpSettings
    point: Point
    part: str
    rate: float
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return query heads, KV heads and channels."""
        own, usual = self.settings, shape_of(self.settings.shape, self.point.length)
        kv_heads = own.num_kv_heads or own.num_heads or usual.num_kv_heads
        return own.num_heads or usual.num_heads, kv_heads, own.head_dim or usual.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the operands."""
        usual = "bf16" if self.device.type == "cuda" else "fp32"
        return DTYPES[usual if self.settings.dtype == "auto" else self.settings.dtype]

    @property
    def reason_against(self) -> str | None:
        """Return why this case cannot be measured; None when it can."""
        if self.part == "frozen" and round(self.rate * self.shape[0]) == 0:
            return f"a rate of {self.rate:g} freezes none of {self.shape[0]} heads"
        if self.part == "frozen" and self.shape[0] != self.shape[1]:
            return "with grouped queries frozen heads share values; only the whole layer is compared"
        return None

    def layout(self, rate: float) -> HeadLayout:
        """Return the layer's heads, the frozen ones drawn from the seed; raise InputError when there are none."""
        heads, kv_heads, _ = self.shape
        size = heads // kv_heads if self.settings.whole_groups else 1
        count = round(rate * heads / size)
        if count == 0:
            raise InputError(f"a rate of {rate:g} freezes none of {heads} heads" + ", whole groups" * (size > 1))
        drawn = torch.randperm(heads // size, generator=torch.Generator().manual_seed(self.settings.seed))[:count]
        frozen = sorted(size * one + each for one in drawn.tolist() for each in range(size))
        return HeadLayout(heads, kv_heads, tuple(frozen))

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


Function = Callable[..., tuple[Tensor, ...]]


def function_of(case: OpCase, arm: Arm) -> tuple[Function, CompactPattern | None]:
    """Return an arm's function of its operands, and the pattern of its frozen heads.

    Raises UnsupportedError for frozen heads beside flex attention.
    """
    return (_ordinary(case, arm), None) if arm.backend is None else _mixed(case, arm)


def _ordinary(case: OpCase, arm: Arm) -> Function:
    if arm.kernel == FLEX:
        flex = FlexAttention(causal_blocks(case.point.length, case.device))
        return lambda query, key, value: flex(query, key, value, None, None)
    return lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)


def _mixed(case: OpCase, arm: Arm) -> tuple[Function, CompactPattern]:
    """Return the function that runs this case's layer with an arm's share of heads frozen, and their patterns."""
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
        """Return the live and the frozen heads' outputs apart, as a model with a split output projection takes them."""
        if len(operands) == 1:
            return (frozen_attention(operands[0], frozen),)
        query, key, value = operands
        parts = split_attention(query, key, value, frozen, kernel=arm.live_kernel)
        return tuple(part for part in parts if part is not None)

    return layer, pattern
