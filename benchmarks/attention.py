"""The attention layers of a whole model, alone: what is left of a prompt without its MLPs.

Projections, norms, positions and the output product are inside, as the model calls them. What frozen heads save is more
than their mixing, so this stands between `saf bench op`, heads without projections, and `saf bench prefill`.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from benchmarks import run
from saf.adapters import adapter_for
from saf.bench.models import mixing_work, random_tokens
from saf.bench.protocol import Arm, Point, Subject, Work
from saf.bench.speed import measure
from saf.bench.whole import Passes, PassSpeed
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Compile


@dataclass(kw_only=True)
class Attention(PassSpeed):
    """Time a model's attention layers alone, projections inside, one after another, without gradients."""

    kind: ClassVar[str] = "attention"

    points: tuple[str, ...] = ("2048x8", "4096x8", "8192x8")
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of weights and inputs; bf16 on CUDA, fp32 on a CPU."""
    compile: Compile = "off"
    """Layers are called as they are: a compiler would drop those whose outputs nothing reads."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        compiled = "compile must be off: a compiler would drop layers whose outputs nothing reads"
        return [*super().check(), (self.compile == "off", compiled)]

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return the layers of an arm, ready to be warmed up."""
        plan, device = self.plan(point), self.execution.device
        model = plan.build(arm, self.weights(self.dtype)).eval()
        generator = torch.Generator().manual_seed(self.seed)
        drawn = random_tokens(1, point.batch_size, point.length, plan.shape.vocab_size, generator, device)
        layers = AttentionLayers(model, drawn[0][0].contiguous())
        del model
        gc.collect()  # edited models are in cycles, whose other weights would stay

        def call() -> Tensor:
            with torch.no_grad():
                return layers()

        return Passes(self, layers, lambda: call, pool=pool)

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of an arm's layers: their matrices, and the mixing."""
        plan = self.plan(point)
        entries, tokens = sum(map(plan.shape.attention_entries, plan.layouts(arm))), point.batch_size * point.length
        mixing = mixing_work(plan, arm, batch=point.batch_size, length=point.length, backward=False)
        weights = float(self.weights(self.dtype).itemsize * entries)
        return Work(2.0 * tokens * entries + mixing.flops, weights + mixing.bytes)


class AttentionLayers(nn.Module):
    """Every attention layer of a model, on what its first one is given in a pass over some tokens `[B, T]`."""

    def __init__(self, model: nn.Module, tokens: Tensor):
        super().__init__()
        adapter = adapter_for(model)
        self.layers = nn.ModuleList(site.attention for site in adapter.sites())  # type: ignore[attr-defined]
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

        def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.inputs = inputs, named

        handle = self.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                adapter.run(tokens)
        finally:
            handle.remove()

    def forward(self) -> Tensor:
        """Return the output `[B, T, C]` of the last layer; every layer has the same inputs."""
        inputs, named = self.inputs
        for layer in self.layers[:-1]:
            layer(*inputs, **named)
        output = self.layers[-1](*inputs, **named)
        return output[0] if isinstance(output, tuple) else output


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    run(Attention, measure, words, prog="attention")
    return 0


if __name__ == "__main__":
    sys.exit(main())
