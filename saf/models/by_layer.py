"""A GPT compiled by its decoder layers: one program for all layers of one layout, kept from one event to the next.

Compiled whole, a model compiles anew after every event, though most of it is as it was. Here attention is a program for
each layout of heads, the MLP and the loss are one each, and an event compiles only the layouts that no model of this
process has had before: layers with as many frozen heads are one program, whose weights and tables are inputs. The
residual stream and what is added to it, the products of live and of frozen heads each by itself, go from program to
program apart, so that their sum is taken by the kernel that norms it, as it is where the whole model is one program.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from saf.machine import own_program
from saf.models.gpt import GPT, Attention, DecoderLayer, recomputed
from saf.ops import summed
from saf.ops.decoder import linear_cross_entropy

Streams = tuple[Tensor, ...]
"""The residual stream `[B, T, C]` and what is added to it next: one such tensor, or two."""

_programs: dict[Hashable, Callable[..., Any]] = {}
"""What this process has compiled, by layout; `torch._dynamo.reset` empties the programs, which then compile again."""


class CompiledByLayer:
    """Compute the loss of a GPT as it is now, its layers compiled; the model itself is left alone.

    Make another after heads were frozen or made live: it takes up what was compiled for this one. With
    `activation_checkpointing` the programs of a layer run again in the backward pass, which finds only their input.

    Hooks around attention and MLP, which put the layers of a model in shares together, stay out of programs: such
    modules are programs without the norm before them, and are called as modules.
    """

    def __init__(self, model: GPT, *, activation_checkpointing: bool = False):
        known = len(_programs)
        self._model = model
        self._recomputes = activation_checkpointing
        layers = cast(Iterable[DecoderLayer], model.blocks)
        self._layers = [_HookedLayer(each) if each.attention._forward_hooks else _Layer(each) for each in layers]
        self._loss = _program(_loss, model.norm, model.embed)
        self.new = len(_programs) - known
        """How many programs the first call compiles: those of layouts that were not met before."""

    def __call__(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` given `input_ids [B, T]`, nats per token, as the model does."""
        return self._loss(self._model.norm, self._model.embed.weight, targets, *self.hidden(input_ids))

    def hidden(self, input_ids: Tensor) -> Streams:
        """Return the residual stream before the last layer's MLP, and what that adds to it; both `[B, T, C]`."""
        x, rotation = self._model.embedded(input_ids)
        streams: Streams = (x, _nothing_to_add(x))
        for layer in self._layers:
            streams = recomputed(layer, rotation, *streams) if self._recomputes else layer(rotation, *streams)
        return streams


class _Layer:
    """Run a layer's two programs: that of its attention and that of its MLP, each with the norm before it."""

    def __init__(self, layer: DecoderLayer):
        attention, mlp = (layer.attention_norm, layer.attention), (layer.mlp_norm, layer.mlp)
        self._attention, self._mlp = ((_program(_add, *part), *part) for part in (attention, mlp))

    def __call__(self, rotation: tuple[Tensor, Tensor] | None, *streams: Tensor) -> Streams:
        """Return the residual stream and what is added to it next, given both."""
        program, *attention = self._attention
        streams = program(*attention, (rotation, None), *streams)
        program, *mlp = self._mlp
        return program(*mlp, (), *streams)


class _HookedLayer:
    """Run a layer whose modules have hooks: programs of the two sums with their norms, and one within each module."""

    def __init__(self, layer: DecoderLayer):
        self._parts = [(layer.attention_norm, layer.attention), (layer.mlp_norm, layer.mlp)]
        self._sums = [_program(_summed, norm) for norm, _ in self._parts]
        for _, module in self._parts:
            module.forward = partial(_program(_forward, module), module)

    def __call__(self, rotation: tuple[Tensor, Tensor] | None, *streams: Tensor) -> Streams:
        """Return the residual stream and what is added to it next, given both."""
        for add, (norm, module), rest in zip(self._sums, self._parts, ((rotation, None), ()), strict=True):
            x, normed = add(norm, *streams)
            streams = (x, module(normed, *rest))
        return streams


def _program(function: Callable[..., Any], *modules: nn.Module) -> Callable[..., Any]:
    """Return a function compiled for modules of one layout, the same one for the same layout."""
    key = (function, *map(_layout, modules))
    if key not in _programs:
        # Sizes left open would make slower kernels, and another number of heads is another layout.
        _programs[key] = torch.compile(own_program(function), fullgraph=True, dynamic=False)
    return _programs[key]


def _layout(module: nn.Module) -> Hashable:
    """Return what the program of a module depends on, beside its input."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    shapes = tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in tensors)
    if not isinstance(module, Attention):
        return shapes
    return shapes, module.live.kernel, None if module.frozen is None else module.frozen.program()


def _add(norm: nn.LayerNorm, module: nn.Module, rest: tuple[Any, ...], *streams: Tensor) -> Streams:
    """Return the sum of the residual stream and what is added to it, and what a module adds next."""
    x, normed = _summed(norm, *streams)
    return x, *(module.products(normed, *rest) if isinstance(module, Attention) else (module(normed, *rest),))


def _summed(norm: nn.LayerNorm, x: Tensor, *changes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the residual stream and what is added to it, and the norm of the sum; all `[B, T, C]`."""
    x = x + summed(changes)
    return x, norm(x)


def _forward(module: nn.Module, *inputs: Any) -> Tensor:
    """Return what a module computes, its hooks left out."""
    return type(module).forward(module, *inputs)


def _loss(norm: nn.LayerNorm, weight: Tensor, targets: Tensor, *streams: Tensor) -> Tensor:
    """Return the mean loss of `targets [B, T]`, given the residual stream and what the last layer adds to it."""
    return linear_cross_entropy(_summed(norm, *streams)[1], weight, targets)


def _nothing_to_add(x: Tensor) -> Tensor:
    """Return zeros such as an MLP would add to `x`, so that the first layer is the same program as the others."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return torch.zeros_like(x, dtype=dtype, requires_grad=x.requires_grad)
