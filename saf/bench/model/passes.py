"""Timing forward passes of one model, called and replayed as CUDA graphs; what is timed is checked before."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from saf.bench.harness.kernels import kernels_of
from saf.bench.harness.timing import GRAPH, repeats_within, settling_calls, wall_block
from saf.bench.model.models import PassSettings
from saf.errors import AccuracyError, InputError
from saf.machine.cuda_graphs import Call, GraphPool, GraphReplay
from saf.ops import for_graphs

SAME = 2e-2
"""How far a graph's logits may be from those of a call, relative: some roundings of bfloat16. Chosen, not measured."""


class Passes:
    """Run forward passes of one model in each way that is timed: the subject of a benchmark.

    Calls and the graph are a program each, as they are for a user who makes a `saf.Prefill` of a model and calls the
    model too.
    """

    def __init__(
        self,
        settings: PassSettings,
        model: nn.Module,
        program: Callable[[], Call],
        *,
        ways: Sequence[str],
        device: torch.device,
        pool: GraphPool,
    ):
        """Take the model and what returns a new program of it, whose call returns logits without gradients."""
        self.model, self._settings, self._program, self._ways = model, settings, program, ways
        self._device, self._pool = device, pool
        self._calls: dict[str, tuple[Call, int, int]] = {}

    def warm_up(self) -> None:
        """Compile, run untimed, check the logits, capture the graph if one is timed and check it against a call.

        Raises:
            InputError: The logits are not finite.
            AccuracyError: Those of the graph are others.
        """
        for way in self._ways:
            call = self._program()
            with for_graphs(self.model) if way == GRAPH else nullcontext():
                for _ in range(self._settings.warmup):
                    call()
                logits = call().float()
                if not bool(logits.isfinite().all()):
                    raise InputError("the logits are not finite")
                if way == GRAPH:
                    call = self._captured(call, logits)
            once = wall_block(call, repeats=2, device=self._device)
            repeats = repeats_within(self._settings.block_ms, once, self._settings.repeats)
            self._calls[way] = call, repeats, settling_calls(self._settings.settle_ms, once, self._device)

    def _captured(self, call: Call, logits: Tensor) -> GraphReplay:
        """Return the graph of a call, whose logits are compared with `logits`."""
        replay = GraphReplay(call, device=self._device, pool=self._pool)
        replay()
        error = ((replay.outcome.float() - logits).norm() / logits.norm()).item()
        if not error <= SAME:
            raise AccuracyError(f"a replayed pass is {error:.1e} from a called one, the bar is {SAME:g}")
        return replay

    def timed_block(self, variant: str) -> float:
        """Return the median milliseconds of one pass, the device waited for before and after."""
        call, repeats, settle = self._calls[variant]
        return wall_block(call, repeats=repeats, device=self._device, settle=settle)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one pass, those of a graph where one is timed."""
        call, *_ = self._calls.get(GRAPH) or next(iter(self._calls.values()))
        return kernels_of(call, self._device)
