"""The attention layers of a whole model, without its MLPs: the rest of a prompt's time is the same in all arms.

Projections, norms, positions and the output product are inside, as the model calls them. Frozen heads save more than
their mixing, so this stands between `saf bench op`, heads without projections, and `saf bench prefill`.
"""

import gc
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from benchmarks import command
from saf.bench.models import model_cases, plan_of, warm_up_passes
from saf.bench.protocol import Arm, Case, Point, Speed, WarmUp, measure, require
from saf.bench.record import Session
from saf.machine import Compile, GraphPool
from saf.models.adapter import adapter_for


@dataclass(kw_only=True)
class Attention(Speed):
    """Time a model's attention layers alone, projections inside, one after another, without gradients."""

    kind: ClassVar[str] = "attention"

    points: tuple[str, ...] = ("2048x8", "4096x8", "8192x8")
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and inputs; bf16 on CUDA, fp32 on a CPU."""
    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""
    compile: Compile = "off"
    """Off is the only value: a compiler would drop layers whose outputs nothing reads."""

    def cases(self, session: Session) -> list[Case]:
        require(self.compile == "off", "compile must be off: a compiler would drop layers whose outputs nothing reads")

        return model_cases(self, self.parsed_points(), self.build)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        plan = plan_of(self, point.length)
        model = plan.build(arm, self.dtype_of(self.dtype)).eval()
        ((tokens, _),) = plan.tokens(1, point.batch_size)
        layers = AttentionLayers(model, tokens.contiguous())
        del model
        gc.collect()  # models with frozen heads are in reference cycles: the MLPs' weights would stay in memory
        return partial(warm_up_passes, self, layers, pool=pool, settle_ms=self.settle_ms)


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
