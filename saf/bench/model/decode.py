"""`saf bench decode`: one more token after a filled cache of fixed size, called and as a CUDA graph, and its bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from saf.bench.harness.arms import FREE, Arm
from saf.bench.harness.measured import Record
from saf.bench.harness.recorder import Say, say_on_stderr
from saf.bench.harness.runner import Subject
from saf.bench.harness.settings import Point
from saf.bench.harness.shape import ModelShape
from saf.bench.harness.timing import ways_of
from saf.bench.harness.work import Work
from saf.bench.model.measuring import ModelKind
from saf.bench.model.models import ModelPlan, PassSettings, build_model, dtype_of
from saf.bench.model.passes import Passes
from saf.errors import InputError
from saf.heads import HeadLayout
from saf.machine.cuda_graphs import Call, GraphPool
from saf.machine.execution import Execution, own_program
from saf.ops.live import SPLIT
from saf.records.paper import Quoted
from saf.settings import documented

OTHERS = ("cudnn", "efficient", "math")
"""Kernels of ordinary attention beside PyTorch's choice: those that take a mask, which a cache of fixed size needs."""


@documented
@dataclass(kw_only=True)
class DecodeSettings(PassSettings):
    """Time one more token of every sequence after a filled cache of fixed size, and tell the cache's bytes."""

    kind: ClassVar[str] = "decode"
    grid: Literal["contexts"] = "contexts"
    """4K and 64K tokens, of 1 and of 8 sequences."""
    model: str = "llama-124m"
    """A model of transformers: llama-124m and llama-7b, of one KV head each, or qwen3-4b, of grouped queries."""
    backends: tuple[str, ...] = ("toeplitz",)
    """Backends of frozen heads that decode."""
    kernels: tuple[str, ...] = ("auto",)
    """Attention kernels of live heads, the same on both sides of a ratio. `split` takes frozen heads in its launch."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to measure against the first one; left out: cudnn, efficient and math on CUDA,
    none on CPU. Measure with the fastest of them by --kernels."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of weights and cache; bf16 on CUDA, fp32 on CPU."""
    graphs: Literal["off", "on", "both"] = "both"
    """Call the model, replay a CUDA graph of it, or both; calls alone on CPU."""


class Step(nn.Module):
    """Compute the logits of one more token of every sequence, which stands at the last place of a cache."""

    def __init__(self, model: nn.Module, batch: int, places: int, vocabulary: int, generator: torch.Generator):
        """Draw the token, and the keys and values before it."""
        from saf.integrations.random_model import random_cache

        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.token, self.last = torch.randint(vocabulary, (batch, 1), generator=generator).to(device), places - 1
        self.position = torch.full((batch, 1), self.last, device=device)
        self.cache, self.filled = random_cache(model, self.token, places)

    def forward(self) -> Tensor:
        """Return logits `[B, 1, V]`."""
        self.filled.fill_(self.last)
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def compiled(self) -> Call:
        """Return this as a compiled program of its own."""
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)


def _run(step: nn.Module) -> Tensor:
    """Return what a step computes."""
    return step()


def decode_passes(settings: DecodeSettings, point: Point, arm: Arm, pool: GraphPool) -> Passes:
    """Return the steps of one model after one filled cache, ready to be warmed up."""
    execution = Execution.of(settings.device, compile=settings.compile)
    device, plan = execution.device, ModelPlan.of(settings, point.length)
    model = build_model(plan, arm, device=device, dtype=dtype_of(settings.dtype, device)).eval()
    generator = torch.Generator().manual_seed(settings.seed)
    step = Step(model, point.batch_size, point.length, plan.shape.vocab_size, generator)
    if execution.compile:
        torch._dynamo.reset()  # what an earlier point compiled

    def program() -> Call:
        """Return what computes a step, a program of its own where it is compiled."""
        forward = step.compiled() if execution.compile else step

        def call() -> Tensor:
            with torch.no_grad():
                return forward()

        return call

    return Passes(settings, step, program, ways=ways_of(settings.graphs, device), device=device, pool=pool)


def cached_bytes(shape: ModelShape, layouts: Sequence[HeadLayout], point: Point, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of every layer, over all places."""
    heads = sum(len(layout.rows[role]) for layout in layouts for role in ("key", "value"))
    return heads * point.batch_size * point.length * shape.head_dim * dtype.itemsize


def decode_work(
    shape: ModelShape, layouts: Sequence[HeadLayout], point: Point, dtype: torch.dtype, *, free: bool
) -> Work:
    """Return the work of one step: every matrix and the whole cache read once; `free` frozen heads read no values."""
    matrices = sum(map(shape.layer_entries, layouts)) + shape.vocab_size * shape.hidden_size
    products = 2.0 * point.batch_size * matrices
    live, frozen = (sum(getattr(layout, name) for layout in layouts) for name in ("num_live", "num_frozen"))
    mixing = 2.0 * point.batch_size * point.length * shape.head_dim * (2 * live + (0 if free else frozen))
    cached = cached_bytes(shape, layouts, point, dtype)
    if free:
        unread = sum(len(layout.rows["value"]) - len(layout.rows["key"]) for layout in layouts)
        cached -= unread * point.batch_size * point.length * shape.head_dim * dtype.itemsize
    return Work(products + mixing, float(dtype.itemsize * matrices + cached))


class DecodeKind(ModelKind[DecodeSettings]):
    """Measure decoding."""

    name = "decode"
    title = "Decoding"
    panel = "One more token"
    more_kernels = (SPLIT,)
    gains = "decoding"
    subject = "decoding"
    settings = DecodeSettings
    grids: ClassVar = {"contexts": ((4096, 1), (4096, 8), (65536, 1), (65536, 8))}

    def measure(self, settings: DecodeSettings, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
        """Measure with the other kernels that the device has; raise as `SpeedKind.measure` does."""
        if settings.others is None:
            cuda = Execution.of(settings.device, compile=settings.compile).device.type == "cuda"
            settings = replace(settings, others=OTHERS if cuda else ())
        return super().measure(settings, out=out, say=say)

    def check_shape(self, settings: DecodeSettings) -> None:
        """Raise InputError for a model that does not decode."""
        super().check_shape(settings)
        if ModelPlan.of(settings, 1).shape.gpt is not None:
            raise InputError(f"{settings.model} has no cache; --model is one of transformers, such as llama-124m")

    def variants(self, settings: DecodeSettings, device: torch.device) -> tuple[str, ...]:
        """Return what is timed of each arm; raise UnsupportedError for graphs without CUDA."""
        return ways_of(settings.graphs, device)

    def build(self, settings: DecodeSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm ready to be warmed up in this process."""
        return decode_passes(settings, point, arm, pool)

    def work(self, settings: DecodeSettings, point: Point, arm: Arm) -> Work:
        """Return the work of one step of an arm."""
        plan, dtype = ModelPlan.of(settings, point.length), _dtype(settings)
        return decode_work(plan.shape, plan.layouts(arm), point, dtype, free=arm.backend == FREE)

    def describe(self, settings: DecodeSettings, plan: ModelPlan, point: Point, arm: Arm) -> Mapping[str, Any]:
        """Return what a row tells of the arm: its heads, the bytes of its cache and of the baseline's."""
        dtype = _dtype(settings)
        own, ordinary = (cached_bytes(plan.shape, plan.layouts(each), point, dtype) for each in (arm, Arm("auto")))
        return {**plan.describe(arm), "cache_bytes": own, "baseline_cache_bytes": ordinary}

    def quoted(self, row: Record) -> Quoted | None:
        """Return None: the paper leaves decoding out."""
        return None


def _dtype(settings: DecodeSettings) -> torch.dtype:
    return dtype_of(settings.dtype, Execution.of(settings.device, compile=settings.compile).device)
