"""Timing forward passes over whole prompts."""

from typing import Any

import torch
from torch import Tensor

from saf.adapters import adapter_for
from saf.bench.arms import Arm
from saf.bench.grids import Point
from saf.bench.models import ModelPlan, build_model
from saf.bench.profiling import kernels_of
from saf.bench.settings import PrefillSettings
from saf.bench.synthetic import random_tokens
from saf.bench.timing import GRAPH, repeats_within, settling_calls, wall_block, ways_of
from saf.bench.work import Work, prefill_work
from saf.errors import InputError
from saf.machine.cuda_graphs import Call, GraphPool, GraphReplay
from saf.machine.execution import Execution
from saf.ops import for_graphs
from saf.prefill import LastToken

PRECISIONS = {"autocast": ("bf16", torch.float32), "bf16": ("fp32", torch.bfloat16), "fp32": ("fp32", torch.float32)}
"""By name: the precision of autocast ("fp32" is none) and the dtype of weights."""


def precisions_of(settings: PrefillSettings, device: torch.device) -> tuple[str, ...]:
    """Return the precisions asked for, or the device's usual one; raise InputError for an unknown name."""
    names = settings.precisions or (("autocast",) if device.type == "cuda" else ("fp32",))
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise InputError(f"precisions are {', '.join(PRECISIONS)}; got {unknown}")
    return names


class PrefillSubject:
    """One model and one batch of prompts."""

    def __init__(self, settings: PrefillSettings, point: Point, arm: Arm, pool: GraphPool):
        self._settings = settings
        self._pool = pool
        autocast, dtype = PRECISIONS[point.precision or "fp32"]
        usual = Execution.of(settings.device, compile=settings.compile)
        self._execution = Execution(usual.device, autocast, usual.compile)
        self._device = usual.device
        plan = ModelPlan.of(settings, point.length)
        model = build_model(plan, arm, device=self._device, dtype=dtype).eval()
        generator = torch.Generator().manual_seed(settings.seed)
        vocabulary = plan.shape.vocab_size
        tokens = random_tokens(1, point.batch_size, point.length, vocabulary, generator, self._device)
        self._tokens = tokens[0][0].contiguous()
        self._model = model
        self._forward = self._execution.callable(LastToken(model), fullgraph=adapter_for(model).one_graph)
        self._calls: dict[str, tuple[Call, int, int]] = {}

    def _call(self) -> Tensor:
        with torch.no_grad(), self._execution.autocast():
            return self._forward(self._tokens)

    def warm_up(self) -> None:
        """Compile, run untimed, check that the outcome is finite, capture the graph if one is timed."""
        for _ in range(self._settings.warmup):
            self._call()
        if not bool(self._call().isfinite().all()):
            raise InputError("the logits are not finite")
        for variant in ways_of(self._settings.graphs, self._device):
            call = self._call
            if variant == GRAPH:
                with for_graphs(self._model):
                    call = GraphReplay(self._call, device=self._device, pool=self._pool)
            once = wall_block(call, repeats=2, device=self._device)
            repeats = repeats_within(self._settings.block_ms, once, self._settings.repeats)
            self._calls[variant] = call, repeats, settling_calls(self._settings.settle_ms, once, self._device)

    def block(self, variant: str) -> float:
        """Return the median milliseconds of one prefill, the device waited for before and after."""
        call, repeats, settle = self._calls[variant]
        return wall_block(call, repeats=repeats, device=self._device, settle=settle)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one prefill, those of a graph where one is timed."""
        call, *_ = self._calls.get(GRAPH) or next(iter(self._calls.values()))
        return kernels_of(call, self._device)


def work_of(settings: PrefillSettings, point: Point, arm: Arm) -> Work:
    """Return the work of one prefill of an arm."""
    plan = ModelPlan.of(settings, point.length)
    dtype = PRECISIONS[point.precision or "fp32"][1]
    return prefill_work(
        plan.shape,
        plan.per_layer(arm),
        batch=point.batch_size,
        length=point.length,
        weight_bytes=dtype.itemsize,
        free=arm.backend == "free",
    )
