"""The attention layers of a whole model, without its MLPs: the rest of a prompt's time is the same in all arms.

Projections, norms, positions and the output product are inside, as the model calls them. Frozen heads save more than
their mixing, so this stands between `saf bench op`, heads without projections, and `saf bench prefill`.
"""

import gc
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from benchmarks import command
from saf.bench.protocol import Arm, Point, Subject
from saf.bench.speed import measure, require
from saf.bench.subjects import Passes, PassSpeed
from saf.machine import Compile, GraphPool
from saf.models.adapter import adapter_for


@dataclass(kw_only=True)
class Attention(PassSpeed):
    """Time a model's attention layers alone, projections inside, one after another, without gradients."""

    kind: ClassVar[str] = "attention"

    points: tuple[str, ...] = ("2048x8", "4096x8", "8192x8")
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and inputs; bf16 on CUDA, fp32 on a CPU."""
    compile: Compile = "off"
    """Off is the only value: a compiler would drop layers whose outputs nothing reads."""

    def check(self) -> None:
        super().check()
        require(self.compile == "off", "compile must be off: a compiler would drop layers whose outputs nothing reads")

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        # "fp32" is no autocast: weights and inputs have one dtype already.
        models, execution = self.plan(point), replace(self.execution, precision="fp32")
        model = models.build(arm, self.dtype_of(self.dtype)).eval()
        ((tokens, _),) = models.tokens(1, point.batch_size)
        layers = AttentionLayers(model, tokens.contiguous())
        del model
        gc.collect()  # models with frozen heads are in reference cycles: the MLPs' weights would stay in memory
        return Passes(self, layers, (), execution, pool)


class AttentionLayers(nn.Module):
    """Every attention layer of a model, on the first one's inputs in a pass over some tokens `[B, T]`."""

    def __init__(self, model: nn.Module, tokens: Tensor):
        super().__init__()
        adapter = adapter_for(model)
        self.layers = nn.ModuleList(site.attention for site in adapter.sites())  # type: ignore[attr-defined]
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

        def record(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.inputs = inputs, named

        handle = self.layers[0].register_forward_pre_hook(record, with_kwargs=True)
        with torch.no_grad():
            adapter.run(tokens)
        handle.remove()

    def forward(self) -> Tensor:
        inputs, named = self.inputs
        # Every layer takes the first one's input: no time depends on its values, and nothing lies in between.
        for layer in self.layers:
            output = layer(*inputs, **named)
        return output[0] if isinstance(output, tuple) else output


main = command(Attention, measure, prog="attention")

if __name__ == "__main__":
    sys.exit(main())
