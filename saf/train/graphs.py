"""Forward and backward pass of a micro-batch as a CUDA graph, one for each padded shape: one launch in place of 1,300.

With few tokens the device is done before the host has launched everything, and saving arithmetic saves no time.
"""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from saf.adapters import longest_input
from saf.errors import SafWarning, UnsupportedError
from saf.evaluate.answers import NO_TARGET
from saf.machine.cuda_graphs import GraphPool, GraphReplay
from saf.machine.execution import Execution
from saf.ops import for_graphs
from saf.train.parallel import Alone

Pass = Callable[[Tensor, Tensor], Tensor]
"""Adds the gradients of a micro-batch, given inputs and targets `[B, T]`, to the parameters' and returns its loss."""
STEP = 8
"""Smallest step between padded lengths: at 64 tokens an eighth, and whole rows of the widest loads."""
STEPS = 8
"""Padded lengths between a power of two and the next: padding adds an eighth at most above 64 tokens."""
MOST = 32
"""Graphs that are kept: as many as there are padded lengths up to 512 tokens, the paper's BoolQ."""
FEW = 8_192 * 768
"""Tokens of a micro-batch times channels of the model up to which graphs are the rule: there the host is slower than
the device, by a sixth ordinary and by two thirds with a quarter of the heads frozen (124M, two sequences of 4K)."""


def padded_length(length: int, longest: int | None = None) -> int:
    """Return the length that a micro-batch is padded to, so that few graphs serve all; `longest` is never exceeded.

    >>> [padded_length(length) for length in (3, 50, 64, 65, 200, 511)], padded_length(62, longest=63)
    ([8, 56, 64, 72, 208, 512], 63)
    """
    step = max(STEP, (1 << (length - 1).bit_length()) // (2 * STEPS))
    rounded = -(-length // step) * step
    return rounded if longest is None else min(rounded, max(longest, length))


def graphs_pay(
    execution: Execution, kind: str, *, size: int, trained_patterns: bool, many_lengths: bool = False
) -> bool:
    """Return whether passes are replayed where a run leaves it open: micro-batches of one length, and of few tokens.

    `size` is their tokens times the channels of the model; the others are those of `check_graphs`.
    """
    free = _obstacle(execution, kind, trained_patterns=trained_patterns, many_lengths=many_lengths) is None
    return free and size <= FEW and not many_lengths


def check_graphs(execution: Execution, kind: str, *, trained_patterns: bool, many_lengths: bool = False) -> None:
    """Raise UnsupportedError for updates whose passes cannot be captured, or were never tried to be.

    `kind` is how processes share updates; `trained_patterns` tells of a model that has some, or will, `many_lengths` of
    micro-batches that differ in theirs.
    """
    if why := _obstacle(execution, kind, trained_patterns=trained_patterns, many_lengths=many_lengths):
        raise UnsupportedError(f"micro-batches cannot be replayed as CUDA graphs: {why}")


def _obstacle(execution: Execution, kind: str, *, trained_patterns: bool, many_lengths: bool) -> str | None:
    """Return why passes cannot be captured, and what to do; None where they can."""
    obstacles = {
        f"they need a CUDA device, and updates run on {execution.device}": execution.device.type != "cuda",
        "compiled, every length of micro-batches is a program; pass compile='off'": execution.compile and many_lengths,
        "they are for one process": kind != Alone.kind,
        "they keep all activations; leave activation_checkpointing out": execution.activation_checkpointing,
        "they know no patterns that are trained; freeze with fixed ones": trained_patterns,
    }
    return next((why for why, there in obstacles.items() if there), None)


@dataclass
class _Captured:
    """Hold a graph of one shape with the memory that it reads."""

    inputs: Tensor
    targets: Tensor
    replay: GraphReplay


class GraphedPasses:
    """Do what a pass does, replaying a graph of it; in place of the pass wherever that is called.

    The first micro-batch runs as it is, and tells which parameters have gradients; from then on these are added up in
    memory that stays. Every later micro-batch is padded behind, where causal attention does not look and nothing is a
    target: losses and gradients are those of the pass at the padded length. Without `pads`, for a compiled pass, whose
    programs are each of a shape, there is a graph for every shape as it is. Beyond `most` shapes it runs as it is.

    Graphs read weights and tables where they lie. When one of these moved, all graphs are thrown away; make a new
    object after an event, all the same: what a graph computes depends on more than memory.
    """

    def __init__(self, run: Pass, model: nn.Module, device: torch.device, *, pads: bool = True, most: int = MOST):
        self._run, self._model, self._device, self._most, self._pads = run, model, device, most, pads
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._read: list[int] = []
        self._longest: int | None = None
        self._forget()
        self.uncaptured = 0
        """Micro-batches that ran as they are because there were as many graphs as are kept."""

    def _forget(self) -> None:
        """Throw all graphs away, and their memory with them."""
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool = GraphPool()

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the padded shapes that there are graphs of, sequences and tokens."""
        return list(self._graphs)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a micro-batch and return its loss, which the next call may overwrite."""
        read = [tensor.data_ptr() for tensor in chain(self._model.parameters(), self._model.buffers())]
        if read != self._read:
            self._forget()
            self._read = []  # until the pass went through: what it leaves tells where graphs add gradients
            loss = self._run(inputs, targets)
            self._gradients = [(p, torch.empty_like(p)) for p in self._model.parameters() if p.grad is not None]
            self._read, self._longest = read, longest_input(self._model)
            return loss
        self._attach_gradients()
        count, length = inputs.shape
        shape = count, padded_length(length, self._longest) if self._pads else length
        if shape not in self._graphs:
            if len(self._graphs) >= self._most:
                return self._run_uncaptured(inputs, targets)
            self._graphs[shape] = self._capture(inputs, targets, shape)
        graph = self._graphs[shape]
        _fill(graph.inputs, inputs, 0)
        _fill(graph.targets, targets, NO_TARGET)
        graph.replay()
        return graph.replay.outcome

    def _attach_gradients(self) -> None:
        """Have gradients lie where graphs add to them, as large as they are: zero where there are none."""
        absent = [own for parameter, own in self._gradients if parameter.grad is None]
        if absent:
            torch._foreach_zero_(absent)  # type: ignore[attr-defined]
        for parameter, own in self._gradients:
            if parameter.grad is not own:
                if parameter.grad is not None:
                    own.copy_(parameter.grad)
                parameter.grad = own

    def _capture(self, inputs: Tensor, targets: Tensor, shape: tuple[int, int]) -> _Captured:
        """Return a graph of a shape; gradients are afterwards what they were."""
        own_inputs, own_targets = inputs.new_empty(shape), targets.new_empty(shape)
        _fill(own_inputs, inputs, 0)
        _fill(own_targets, targets, NO_TARGET)
        kept = [own.clone() for _, own in self._gradients]
        # An earlier pass that a reference cycle keeps alive would lend its nodes, of another stream, to this one.
        gc.collect()
        if self._device.type == "cuda":
            # What passes without a graph hold of the device would lie beside the graphs' own memory, unused.
            torch.cuda.empty_cache()
        try:
            with for_graphs(self._model):
                replay = GraphReplay(
                    lambda: self._run(own_inputs, own_targets), device=self._device, pool=self._pool, same_stream=True
                )
            self._check_gradients()
        finally:
            for (_, own), before in zip(self._gradients, kept, strict=True):
                own.copy_(before)
        return _Captured(own_inputs, own_targets, replay)

    def _check_gradients(self) -> None:
        """Raise UnsupportedError for a parameter that has a gradient now and had none after the first micro-batch."""
        known = {id(parameter) for parameter, _ in self._gradients}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and id(parameter) not in known:
                parameter.grad = None
                raise UnsupportedError(
                    f"micro-batches cannot be replayed as CUDA graphs: {name} has a gradient in some of them alone, "
                    "and none in the first; leave graphs out"
                )

    def _run_uncaptured(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run a micro-batch as it is, count it, and say so the first time."""
        if self.uncaptured == 0:
            told = (
                f"{self._most} shapes of micro-batches have a CUDA graph each, as many as are kept; micro-batches of "
                "other shapes are launched kernel by kernel, which takes longer: give examples of fewer lengths"
            )
            warnings.warn(told, SafWarning, stacklevel=2)
        self.uncaptured += 1
        return self._run(inputs, targets)


def _fill(memory: Tensor, rows: Tensor, padding: int) -> None:
    """Write rows `[B, T]` into memory of at least as many columns, padded behind."""
    length = rows.shape[1]
    memory[:, :length].copy_(rows)
    memory[:, length:].fill_(padding)
