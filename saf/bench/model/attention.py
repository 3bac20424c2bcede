"""`saf bench attention`: the attention layers of a whole model, alone: what is left of prompts without MLPs.

Projections, norms, positions, heads and the output product are inside, as the model calls them. What frozen heads save
is more than their mixing, so this stands between `saf bench op`, heads without projections, and `saf bench prefill`.
"""

import gc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.bench.harness.arms import FREE, Arm
from saf.bench.harness.measured import Record
from saf.bench.harness.runner import Subject
from saf.bench.harness.settings import QWEN_POINTS, QWEN_RATES, Point
from saf.bench.harness.synthetic import random_tokens
from saf.bench.harness.timing import ways_of
from saf.bench.harness.work import Work, layers_work
from saf.bench.model.measuring import ModelKind
from saf.bench.model.models import ModelPlan, PassSettings, build_model, dtype_of
from saf.bench.model.passes import Passes
from saf.errors import InputError
from saf.machine.cuda_graphs import Call, GraphPool
from saf.machine.execution import Compile, Execution
from saf.records.paper import Quoted
from saf.settings import documented


@documented
@dataclass(kw_only=True)
class AttentionSettings(PassSettings):
    """Time the attention layers of a whole model, one after another, without gradients."""

    kind: ClassVar[str] = "attention"
    grid: Literal["lengths", "qwen"] = "lengths"
    """B 8 at 2K, 4K, 8K, or B 4 and 8."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of weights and inputs; bf16 on CUDA, fp32 on CPU."""
    graphs: Literal["off", "on", "both"] = "off"
    """Call the layers, replay a CUDA graph of them, or both."""
    compile: Compile = "off"
    """Layers are called as they are; a program of all of them would leave out those whose outputs nothing reads."""


class AttentionLayers(nn.Module):
    """Run every attention layer of a model on what its first one is given in a pass over some tokens."""

    def __init__(self, model: nn.Module, tokens: Tensor):
        """Keep a model's attention layers and no other weights; `tokens [B, T]` are run once to see the inputs."""
        super().__init__()
        adapter = adapter_for(model)
        self.layers = nn.ModuleList(site.attention for site in adapter.sites())
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

        def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.given = inputs, named

        handle = self.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                adapter.run(tokens)
        finally:
            handle.remove()

    def forward(self) -> Tensor:
        """Return the output `[B, T, C]` of the last layer; every layer has the same inputs."""
        inputs, named = self.given
        for layer in self.layers[:-1]:
            layer(*inputs, **named)
        output = self.layers[-1](*inputs, **named)
        return output[0] if isinstance(output, tuple) else output


class AttentionKind(ModelKind[AttentionSettings]):
    """Measure a model's attention layers."""

    name = "attention"
    title = "Attention layers"
    panel = "Attention layers of a model"
    gains = "attention layers"
    subject = "a model’s attention layers"
    same = "the same layers"
    settings = AttentionSettings
    grids: ClassVar = {
        "lengths": tuple((length, 8) for length in (2048, 4096, 8192)),
        "qwen": QWEN_POINTS,
    }
    grid_rates: ClassVar = {"qwen": QWEN_RATES}

    def check_compile(self, settings: AttentionSettings, execution: Execution) -> None:
        """Raise InputError for compiled layers: nothing reads their outputs, so that a compiler would drop them."""
        if settings.compile != "off":
            raise InputError(
                f"attention layers are called as they are, got compile={settings.compile!r}: a compiler would drop "
                "layers whose outputs nothing reads; leave --compile out, or time whole models (saf bench prefill)"
            )

    def variants(self, settings: AttentionSettings, device: torch.device) -> tuple[str, ...]:
        """Return what is timed of each arm; raise UnsupportedError for graphs without CUDA."""
        return ways_of(settings.graphs, device)

    def build(self, settings: AttentionSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return the layers of an arm, ready to be warmed up in this process."""
        device, plan = Execution.of(settings.device, compile="off").device, ModelPlan.of(settings, point.length)
        model = build_model(plan, arm, device=device, dtype=dtype_of(settings.dtype, device)).eval()
        generator = torch.Generator().manual_seed(settings.seed)
        drawn = random_tokens(1, point.batch_size, point.length, plan.shape.vocab_size, generator, device)
        layers = AttentionLayers(model, drawn[0][0].contiguous())
        del model
        gc.collect()  # edited models are in cycles, whose other weights would stay

        def call() -> Tensor:
            with torch.no_grad():
                return layers()

        def program() -> Call:
            """Return the call itself: nothing is compiled."""
            return call

        return Passes(settings, layers, program, ways=ways_of(settings.graphs, device), device=device, pool=pool)

    def work(self, settings: AttentionSettings, point: Point, arm: Arm) -> Work:
        """Return the work of an arm's layers: their matrices, and the mixing."""
        plan, device = ModelPlan.of(settings, point.length), Execution.of(settings.device, compile="off").device
        layouts, shape = plan.layouts(arm), plan.shape
        entries, tokens = sum(map(shape.attention_entries, layouts)), point.batch_size * point.length
        products = Work(2.0 * tokens * entries, float(dtype_of(settings.dtype, device).itemsize * entries))
        return products + layers_work(
            layouts,
            batch=point.batch_size,
            length=point.length,
            dim=shape.head_dim,
            kv_heads=shape.num_kv_heads if shape.num_kv_heads != shape.num_heads else None,
            backward=False,
            free=arm.backend == FREE,
        )

    def quoted(self, row: Record) -> Quoted | None:
        """Return None: the paper's attention operation has no projections inside, see `saf bench op`."""
        return None
