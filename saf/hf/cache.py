"""Caches of transformers for layers with frozen heads: which keys and values they hold, and recurrent states.

A growing cache stores as many key and value heads as a layer passes to it. A `StaticCache` allocates equally many of
both, so layers with other numbers get a layer of their own in it, `FixedLayer`. Frozen heads keep no keys unless a live
head of their group reads them. Of those with exponential patterns a `GrowingLayer` or `FixedLayer` keeps a recurrent
state; their values stay only for other heads of their groups.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticCache, StaticLayer

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import HeadLayout
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.heads import cached_order, take_heads
from saf.ops.linear.op import RecurrentState

OTHER_HEADS = "the cache was filled by other frozen heads, or by prefix tuning for all of them; make a new one"
SAFE_OFFLOADING = (5, 20)
"""The first transformers whose offloading stream waits for the device; with earlier ones copies race, and tokens are
wrong (docs/log.md)."""


def prepare(past_key_values: Any, index: int, state: Any, device: torch.device) -> "StateLayer | None":
    """Fit a cache to what layer `index` keeps, before its pass; return its own layer where that keeps a state.

    `state` is the layer's `HeadState`. Raises UnsupportedError for a cache that other heads or other patterns filled, a
    quantised one of a layer without keys, one of fixed size with windows, and an offloaded one on a GPU whose copies
    would race.
    """
    if getattr(past_key_values, "offloading", False) and device.type == "cuda":
        version = importlib.metadata.version("transformers")
        if tuple(map(int, version.split(".")[:2])) < SAFE_OFFLOADING:
            raise UnsupportedError(f"an offloaded cache on a GPU needs transformers 5.20, got {version}")
    layers, new_layer = past_key_values.layers, getattr(past_key_values, "layer_class_to_replicate", None)
    while new_layer is not None and len(layers) <= index:  # a cache that adds layers as passes reach them
        layers.append(new_layer())
    layer = layers[index]
    # The layer's class is not tested, which compiled code would guard.
    if (filled_by := getattr(layer, "fingerprint", None)) is None:
        if hasattr(layer, "max_cache_len") and any(past_key_values.is_sliding):
            raise UnsupportedError(
                "with frozen heads models with a sliding window take a growing cache: leave cache_implementation out"
            )
        layers[index] = layer = _fitting_layer(layer, state.layout, state.frozen)
        layer.fingerprint = state.fingerprint
    elif filled_by != state.fingerprint:
        raise UnsupportedError(OTHER_HEADS)
    return layer if getattr(layer, "sizes", None) is not None else None


def _fitting_layer(layer: Any, layout: HeadLayout, frozen: FrozenHeads | None) -> Any:
    """Return a layer of a cache, or in its place one that fits what an attention layer keeps.

    A cache that is first filled while gradients are recorded keeps values.
    """
    fixed, quantised = hasattr(layer, "max_cache_len"), hasattr(layer, "_quantize")
    if quantised and not layout.num_live:
        raise UnsupportedError("a quantised cache needs a live head in every layer; limit max_per_layer")
    keys, values = (len(layout.rows[role]) for role in ("key", "value"))
    if not layout.num_live:
        keys, values = max(values, 1), 0  # see `_cached` in attention.py
    if layer.is_initialized and not quantised:  # a quantised one keeps its keys elsewhere
        if (layer.keys.shape[1], layer.values.shape[1]) != (keys, values):
            raise UnsupportedError(OTHER_HEADS)
        return layer
    stock = type(layer) in (DynamicLayer, StaticLayer)
    linear = frozen if frozen is not None and frozen.linear and stock and not torch.is_grad_enabled() else None
    if fixed and (linear is not None or keys != values):
        return FixedLayer(layer.max_cache_len, layout, linear)
    return layer if linear is None else GrowingLayer(layout, linear)


def first_places(key: Tensor, value: Tensor, count: int, layout: HeadLayout, *, state: bool) -> tuple[Tensor, Tensor]:
    """Return the first `count` places of a cache of fixed size; without a state value heads in the layer's order."""
    value = value[:, :, :count]
    order = cached_order(layout.kv_head, layout.num_frozen)
    if not (state or order == tuple(range(len(order)))):
        value = take_heads(value, tuple(order.index(head) for head in range(len(order))))
    return key[:, :, :count], value


def cache_bytes(past_key_values: Any) -> int:
    """Return the bytes of the keys, values and recurrent states in a cache of transformers, wherever they are.

    A cache of fixed size counts all of its places. Raises UnsupportedError for a quantised one.
    """
    if (layers := getattr(past_key_values, "layers", None)) is None:
        raise InputError(f"expected a cache of transformers, such as DynamicCache; got {shown(past_key_values)}")
    if any(hasattr(layer, "_quantize") for layer in layers):
        raise UnsupportedError("the bytes of a quantised cache are not known; use torch.cuda.memory_allocated")
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values", "ring", "sums")]
    return sum(tensor.nbytes for tensor in states if tensor is not None)


class StateLayer:
    """A layer of a cache that keeps some value heads, and a state of linear heads.

    Attributes:
        order: the value heads kept, in order; None for all in the layer's own order.
        sizes: `FrozenHeads.state_sizes`; None without linear heads.
        value: `[B, H_kv, rows, D]`, the new values of all heads during a pass.
    """

    ring: Tensor | None = None
    sums: Tensor | None = None
    value: Tensor | None = None

    def describe(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Set which values the layer keeps, and the sizes of its state."""
        self.sizes = None if frozen is None else frozen.state_sizes()
        order = cached_order(layout.kv_head, layout.num_frozen, () if frozen is None else frozen.linear)
        self.order = None if order == tuple(range(len(layout.rows["value"]))) else order

    def take(self, value: Tensor) -> Tensor:
        """Hold new values `[B, H_kv, rows, D]` for the pass, and return those that the cache keeps."""
        if self.sizes is not None:
            self.value = value
            if self.ring is None:
                self.ring, self.sums, _ = RecurrentState.empty(value, self.sizes)
        if self.order is None:
            return value
        return take_heads(value, self.order) if self.order else value[:, :0]

    def state(self) -> RecurrentState:
        """Return the state and the new values, once a pass."""
        ring, sums, value = self.ring, self.sums, self.value
        assert ring is not None and sums is not None and value is not None  # noqa: PT018
        self.value = None
        return RecurrentState(ring, sums, value)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the state by that of other sequences."""
        if self.ring is not None and self.sums is not None:
            self.ring, self.sums = function(self.ring), function(self.sums)

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))


class GrowingLayer(StateLayer, DynamicLayer):
    """A layer of a growing cache that keeps a recurrent state for linear heads."""

    def __init__(self, layout: HeadLayout, frozen: FrozenHeads):
        super().__init__()
        self.describe(layout, frozen)
        self.chunk = frozen.state_sizes()[2]
        # The kept keys and values may be of no head: the tokens are counted here.
        self.length = self.longest = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.length += value_states.shape[-2]
        self.longest = max(self.longest, self.length)
        return super().update(key_states, self.take(value_states), *args, **options)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        # A positive number is the length that stays: transformers 5.17 takes it, later ones refuse it.
        stays = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        left = max(0, min(self.length, stays))
        if 0 < left < self.longest - self.chunk:
            raise UnsupportedError(
                f"with a recurrent state at most {self.chunk} tokens can be cropped, got {self.longest - left}: "
                "propose fewer, or use a new cache"
            )
        super().crop(tokens_to_remove)
        self.length, self.longest = left, self.longest if left else 0
        if not left:
            self.map_rows(Tensor.zero_)

    def reset(self) -> None:
        super().reset()
        self.length = self.longest = 0
        self.ring = self.sums = None  # the next sequences may be more or fewer

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.map_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.map_rows(lambda x: x[indices])


class FixedLayer(StateLayer, StaticLayer):
    """A layer of a cache of fixed size with different numbers of key and value heads."""

    def __init__(self, size: int, layout: HeadLayout, frozen: FrozenHeads | None):
        super().__init__(max_cache_len=size)  # pyright: ignore[reportCallIssue]
        self.describe(layout, frozen)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.values is not None
        batch, heads, _, dim = value_states.shape  # the stock values have as many heads as there are keys
        self.values = self.values.new_zeros(batch, heads, self.max_cache_len, dim)
        for tensor in () if torch.compiler.is_compiling() else (self.values, self.ring, self.sums):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states, self.take(value_states), *args, **options)

    def reset(self) -> None:
        super().reset()
        self.map_rows(Tensor.zero_)


def random_cache(model: Any, token: Tensor, places: int) -> tuple[Any, Tensor]:
    """Return a cache of fixed size full of drawn keys and values, and how far its layers are filled, `[layers]`.

    A pass of `token [B, 1]` allocates the cache. Each layer's count is a view of the tensor returned, so that one
    kernel resets all of them.
    """
    cache: Any = StaticCache(config=model.config, max_cache_len=places)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache)
    filled = torch.zeros(len(cache.layers), dtype=torch.long, device=token.device)
    generator = torch.Generator(token.device).manual_seed(0)
    for layer, own in zip(cache.layers, filled.unbind(), strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = own
    return cache, filled
