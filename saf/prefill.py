"""`Prefill` compiles the prefill of one shape, captures it as a CUDA graph and replays it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError
from saf.machine import GraphPool, GraphReplay, own_program
from saf.models.adapter import adapter_for, evaluation_mode, longest_input
from saf.ops import for_graphs


class LastToken(nn.Module):
    """Run a model with its output layer on the last position alone: `[B, T]` token ids to logits `[B, 1, V]`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        adapter = adapter_for(model)
        self.model = adapter.model
        # The code of transformers' models may break the graph.
        self._last_logits, self._fullgraph = adapter.last_logits, adapter.is_gpt

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of the token after the prompt."""
        return self._last_logits(self.model, input_ids)

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """Return this module compiled for its own shapes, whatever else the process compiles.

        A model that is written to be one graph raises an error where it is not. Captured graphs need a program of
        their own, as frozen layers run other kernels in them (`saf.ops.for_graphs`).
        """

        # A new function each time, and `own_program` gives it code of its own: Dynamo keeps what it compiles by code.
        def logits(model: nn.Module, input_ids: Tensor) -> Tensor:
            return model(input_ids)

        return partial(torch.compile(own_program(logits), fullgraph=self._fullgraph, dynamic=False), self)


class Prefill:
    """Run a model's prefill at one shape, without the launches that make the host the bottleneck with few sequences.

    >>> prefill = Prefill(model, batch_size=1, length=4096)  # doctest: +SKIP
    >>> logits = prefill(input_ids)  # [1, 1, vocab_size]  # doctest: +SKIP

    The model itself stays as it was: calling or compiling it elsewhere neither affects the graph nor is affected.
    The graph reads the weights where they are now: make a new one after freezing, loading or moving the model.
    Matrix products of all graphs share scratch memory: replay them one after another, not on two streams at once.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, length: int, compile: bool = True, autocast: bool = True):
        """Compile and capture `[batch_size, length]`; `autocast` runs float32 weights in bfloat16.

        Raises UnsupportedError for a model that is not on CUDA, InputError for a length that it does not take.
        """
        self._shape = (batch_size, length)
        device, longest = adapter_for(model).device, longest_input(model)
        if not 1 <= length <= (longest or length):
            raise InputError(f"length must be 1 to {longest} tokens; got {length}")
        if device.type != "cuda":
            raise UnsupportedError(f"a CUDA graph needs a model on CUDA; it is on {device}: call the model itself")
        self._input_ids = torch.zeros(self._shape, dtype=torch.long, device=device)
        last = LastToken(model)
        forward = last.compiled() if compile else last

        def run() -> Tensor:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return forward(self._input_ids)

        # In a graph, few tokens take the path that is fastest on the device; outside, the one that spares the host.
        with for_graphs(model), evaluation_mode(last):
            self._replay = GraphReplay(run, device=device, pool=GraphPool())

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the logits `[B, 1, V]` after `input_ids [B, T]`, in memory of their own."""
        if tuple(input_ids.shape) != self._shape or input_ids.is_floating_point():
            got = f"{input_ids.dtype} {list(input_ids.shape)}"
            raise InputError(f"input_ids must be token ids {list(self._shape)}, as captured; got {got}: capture again")
        # Every replay reads and writes the same memory: tokens go in and logits come out by copies.
        self._input_ids.copy_(input_ids)
        self._replay()
        return self._replay.outcome.clone()
