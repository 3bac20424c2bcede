"""`CompiledByLayer` compiles a GPT layer by layer, so that a freezing event recompiles little of it.

A model that is compiled whole is recompiled after every event. A second event costs 124M 28.5 s, by layers 3.5 s, and
updates are as fast (0.996x to 1.006x). Here attention is one program for each layout of heads; the MLP and the loss are
one program each. Weights and pattern tables are inputs of the programs, so an event compiles only layouts that are new
to the process. Programs pass the residual stream and the terms to add to it as separate tensors, and the kernel of the
next norm adds them, as in a model that is compiled whole.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from saf.machine import own_program
from saf.models.gpt import GPT, Attention, DecoderLayer, recompute_in_backward
from saf.ops import summed
from saf.ops.loss_and_gelu import linear_cross_entropy

Streams = tuple[Tensor, ...]
"""The residual stream `[B, T, C]` and one or two terms to add to it, of the same shape."""

_programs: dict[Hashable, Callable[..., Any]] = {}
"""Compiled functions of this process, by function and shapes; after `torch._dynamo.reset` they compile again."""


class CompiledByLayer:
    """The loss of a GPT with its current heads, computed by compiled layers; the model does not change.

    Build a new one after an event; programs are shared. With `activation_checkpointing` only the inputs of a layer are
    stored, and its programs run again in the backward pass. Modules with hooks, such as those of `fully_shard`, are
    called as modules; their programs leave out the norm before them.
    """

    def __init__(self, model: GPT, *, activation_checkpointing: bool = False):
        known = len(_programs)
        self._model = model
        self._recomputes = activation_checkpointing
        layers = cast(Iterable[DecoderLayer], model.blocks)
        # `fully_shard` gathers a module's weights in its hooks, so the module itself must be called.
        self._layers = [_hooked_layer(each) if each.attention._forward_hooks else _layer(each) for each in layers]
        self._loss = _program(_loss, model.norm, model.embed)
        self.num_new_programs = len(_programs) - known
        """Number of programs that the first call compiles."""

    def __call__(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` after `input_ids [B, T]`, nats per token, as the model does."""
        x, rotation = self._model.embeddings(input_ids)
        streams: Streams = (x, _zero_addition(x))  # one program for all layers is worth an addition of zeros
        for layer in self._layers:
            inputs = (rotation, *streams)
            streams = recompute_in_backward(layer, *inputs) if self._recomputes else layer(*inputs)
        return self._loss(self._model.norm, self._model.embed.weight, targets, *streams)


def _layer(layer: DecoderLayer) -> Callable[..., Streams]:
    """Return a function that runs a layer's two programs: attention and MLP, each with the norm before it."""
    attend = _program(_add, layer.attention_norm, layer.attention)
    transform = _program(_add, layer.mlp_norm, layer.mlp)

    def call(rotation: tuple[Tensor, Tensor] | None, *streams: Tensor) -> Streams:
        streams = attend(layer.attention_norm, layer.attention, (rotation, None), *streams)
        return transform(layer.mlp_norm, layer.mlp, (), *streams)

    return call


def _hooked_layer(layer: DecoderLayer) -> Callable[..., Streams]:
    """Return the same for modules with hooks: two programs add and normalise, and one runs inside each module."""
    before_attention, before_mlp = (_program(_summed, norm) for norm in (layer.attention_norm, layer.mlp_norm))
    for module in (layer.attention, layer.mlp):  # hooks run around `forward`, which alone is compiled
        module.forward = partial(_program(_forward, module), module)

    def call(rotation: tuple[Tensor, Tensor] | None, *streams: Tensor) -> Streams:
        x, normed = before_attention(layer.attention_norm, *streams)
        x, normed = before_mlp(layer.mlp_norm, x, layer.attention(normed, rotation, None))
        return x, layer.mlp(normed)

    return call


def _program(function: Callable[..., Any], *modules: nn.Module) -> Callable[..., Any]:
    key = (function, *map(_shapes, modules))
    # A code object for each key: Dynamo keeps at most eight programs of one, and generalises sizes from the second on.
    if key not in _programs:
        # Static shapes compile to faster kernels, and another number of heads is another layout anyway.
        _programs[key] = torch.compile(own_program(function), fullgraph=True, dynamic=False)
    return _programs[key]


def _shapes(module: nn.Module) -> Hashable:
    """Return what a module's program depends on, except the values of its inputs."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in tensors)
    if not isinstance(module, Attention):
        return shapes
    return shapes, module.live.kernel, None if module.frozen is None else module.frozen.compile_key()


# --- the functions that programs compile


def _add(norm: nn.LayerNorm, module: nn.Module, rest: tuple[Any, ...], *streams: Tensor) -> Streams:
    """Return the residual stream with its terms added, and a module's own terms for it."""
    x, normed = _summed(norm, *streams)
    return x, *(module.products(normed, *rest) if isinstance(module, Attention) else (module(normed, *rest),))


def _summed(norm: nn.LayerNorm, x: Tensor, *changes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream with its terms added, and the norm of that, both `[B, T, C]`."""
    x = x + summed(changes)
    return x, norm(x)


def _forward(module: nn.Module, *inputs: Any) -> Tensor:
    return type(module).forward(module, *inputs)  # the class's: the instance's is the program that calls this


def _loss(norm: nn.LayerNorm, weight: Tensor, targets: Tensor, *streams: Tensor) -> Tensor:
    return linear_cross_entropy(_summed(norm, *streams)[1], weight, targets)


def _zero_addition(x: Tensor) -> Tensor:
    """Return zeros like an MLP's output, so that the first layer shares the other layers' program."""
    kind = x.device.type
    # Another dtype or no gradient would be other guards, and another program.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return torch.zeros_like(x, dtype=dtype, requires_grad=x.requires_grad)
