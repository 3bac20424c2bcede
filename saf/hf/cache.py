"""Caches of transformers beside frozen heads.

A growing cache stores as many key and value heads as a layer passes to it. A `StaticCache` allocates equally many of
both, so layers with other numbers get a `Room` in it. Frozen heads keep no keys unless a live head of their group reads
them.
"""

import importlib.metadata
from functools import cache
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import HeadLayout
from saf.ops.heads import cached_order, take_heads

NO_WINDOWS = "with frozen heads models with a sliding window take a growing cache: leave cache_implementation out"
NOT_QUANTISED = "a quantised cache needs a live head in every layer; use another cache, or limit max_per_layer"
# torch 2.11 ends the process there by a segmentation fault, with and without frozen heads.
NOT_COMPILED = "an offloaded cache of fixed size on a GPU needs disable_compile=True"
OTHER_HEADS = "the cache was filled beside other frozen heads; make a new one"
_FILLED_BY = "_saf_heads"
STREAMS_WAIT = (5, 20)
"""transformers whose offloading stream waits for the device; before, copies raced and tokens were wrong (log)."""


def prepare(past_key_values: Any, index: int, layout: HeadLayout, everywhere: tuple[HeadLayout, ...] | None) -> None:
    """Fit a cache to what layer `index` keeps, before its pass: a `Room` in one of fixed size.

    `everywhere` holds the heads of all layers. Raises UnsupportedError for a cache that was filled beside other heads,
    a quantised one of a layer without keys, and one of fixed size with windows.
    """
    if (layers := getattr(past_key_values, "layers", None)) is None:
        return
    _check_filled(past_key_values, index, everywhere)
    if index >= len(layers):
        return
    layer, keys, values = layers[index], len(layout.rows["key"]), len(layout.rows["value"])
    if is_quantised(layer) and not layout.num_live:
        raise UnsupportedError(NOT_QUANTISED)
    if not hasattr(layer, "max_cache_len"):
        return
    if any(past_key_values.is_sliding):
        raise UnsupportedError(NO_WINDOWS)
    # The layer's class is not tested, which compiled code would guard.
    if (own := getattr(layer, "layout", None)) is not None:
        if own is not layout and own != layout:
            raise UnsupportedError(OTHER_HEADS)
    elif keys != values or not layout.num_live:
        if layer.is_initialized:
            raise UnsupportedError("frozen heads need a fixed-size cache without early_initialization")
        layers[index] = _room_class()(layer.max_cache_len, layout)


def _check_filled(past_key_values: Any, index: int, heads: tuple[HeadLayout, ...] | None) -> None:
    """Raise UnsupportedError where a cache was filled beside other heads than `heads`.

    With grouped queries a layer keeps as many keys whichever heads are frozen, so sizes do not show it. Compiled code,
    which would be compiled anew for every cache, goes unchecked.
    """
    if heads is None or torch.compiler.is_compiling():
        return
    length, attributes = past_key_values.get_seq_length(index), vars(past_key_values)
    empty = not isinstance(length, Tensor) and length == 0  # a tensor in a cache of fixed size that is in use
    before = attributes.get(_FILLED_BY, heads)
    if not empty and before is not heads and before != heads:
        raise UnsupportedError(OTHER_HEADS)
    attributes[_FILLED_BY] = heads


def check_offloading(device: torch.device) -> None:
    """Raise UnsupportedError where this transformers lets copies of offloaded layers race on a GPU."""
    version = importlib.metadata.version("transformers")
    if device.type == "cuda" and tuple(map(int, version.split(".")[:2])) < STREAMS_WAIT:
        raise UnsupportedError(f"an offloaded cache on a GPU needs transformers 5.20, got {version}")


def filled(key: Tensor, value: Tensor, count: int, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Return the first `count` places of a cache of fixed size, value heads in the layer's own order."""
    value = value[:, :, :count]
    if (order := _value_order(layout)) is not None:
        value = take_heads(value, tuple(order.index(head) for head in range(len(order))))
    return key[:, :, :count], value


def _value_order(layout: HeadLayout) -> tuple[int, ...] | None:
    """Return the order of a layer's values in a cache of fixed size; None for their own."""
    order = cached_order(layout.kv_head, layout.num_frozen)
    return None if order == tuple(range(len(order))) else order


def is_quantised(layer: Any) -> bool:
    """Return whether a layer of a cache holds keys and values in fewer bits."""
    return hasattr(layer, "_quantize")


def cache_bytes(past_key_values: Any) -> int:
    """Return the bytes of the keys and values in a cache of transformers, wherever they are.

    A cache of fixed size counts all of its places. Raises UnsupportedError for a quantised one.
    """
    if not hasattr(past_key_values, "layers"):
        raise InputError(f"expected a cache of transformers, such as DynamicCache; got {shown(past_key_values)}")
    if any(map(is_quantised, past_key_values.layers)):
        raise UnsupportedError("the bytes of a quantised cache are not known; use torch.cuda.memory_allocated")
    states = [tensor for layer in past_key_values.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in states)


@cache
def _room_class() -> type[Any]:
    from transformers.cache_utils import StaticLayer

    class Room(StaticLayer):
        """A layer of a cache of fixed size with different numbers of key and value heads."""

        def __init__(self, max_cache_len: int, layout: HeadLayout):
            super().__init__(max_cache_len=max_cache_len)
            self.layout, self.order = layout, _value_order(layout)

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            assert self.values is not None
            batch, heads, _, dim = value_states.shape  # the stock values have as many heads as there are keys
            self.values = self.values.new_zeros(batch, heads, self.max_cache_len, dim)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            if self.order is not None:  # next to nothing to copy for a single token
                value_states = take_heads(value_states, self.order)
            return super().update(key_states, value_states, *args, **options)

    return Room
