"""Caches of transformers beside frozen heads: what one of fixed size holds, where its passes stand, and its bytes.

A cache that grows keeps as many key and value heads as a layer gives it. One of fixed size makes room for equally many,
so that layers with other numbers of them take a room of their own in it. Frozen heads keep no keys there, unless a live
head of their group reads them.
"""

import importlib.metadata
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import HeadLayout
from saf.ops.heads import cached_order, take_heads
from saf.ops.positions import CachePosition, left_padding

NO_WINDOWS = (
    "with frozen heads, models with a sliding window take a cache that grows (the default): leave cache_implementation "
    "out"
)

NOT_QUANTISED = (
    "a quantised cache quantises keys and values alike, and a layer without live heads keeps no keys: take the default "
    "cache, an offloaded one or one of fixed size, or leave a head of each layer live (max_per_layer)"
)

# On an H200, with torch 2.11.0 and transformers 5.17.0, with and without frozen heads.
CRASHES_COMPILED = (
    "on a GPU generate compiles its steps with an offloaded cache of fixed size, which ended the whole process by a "
    "segmentation fault inside torch's compiler: pass disable_compile=True, or take the growing one (offloaded)"
)

OTHER_HEADS = "the cache was made for other frozen heads; make a new one"
FILLED_BY = "_saf_heads"
"""The name in a cache of what tells beside which heads it was filled."""

STREAMS_WAIT = (5, 20)
"""The first version of transformers whose stream of offloaded layers waits for the device's own (docs/log.md)."""


class Beginning(NamedTuple):
    """Say that a pass fills a cache of fixed size from its first place on; `mask [B, Tq]` is of its padding, or None.

    Its queries see each other alone, so that attention takes the places filled as it takes whole sequences.
    """

    mask: Tensor | None


def left_padded(attention_mask: Tensor) -> Tensor | None:
    """Return a mask `[B, T]` where it tells of padding on the left, else None; raise InputError for what none can be.

    It is looked at once a pass: it waits for the device.
    """
    return None if left_padding(attention_mask, parts=True) is None else attention_mask


def fixed_places(
    q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None
) -> CachePosition | Beginning:
    """Return where the queries of a pass stand in a cache of fixed size with `kv_length` places.

    `attention_mask [B, T]` tells of the tokens so far; what it tells of places beyond them has no effect.
    """
    if not isinstance(q_offset, Tensor):
        return Beginning(None if attention_mask is None else left_padded(attention_mask))
    start = None if attention_mask is None else left_padding(attention_mask, wait=False, parts=True)
    # The cache counts on in the very tensor that it tells its length by.
    return CachePosition.of(q_offset.clone(), q_length, kv_length, start)


def fills_fixed(q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None) -> bool:
    """Return whether these sizes are those of a cache of fixed size: its length is a tensor once it is in use."""
    if isinstance(q_offset, Tensor):
        return True
    covered = attention_mask is None or attention_mask.shape[1] == q_length
    return q_offset == 0 and kv_length > q_length and covered


def make_room(past_key_values: Any, index: int, layout: HeadLayout) -> None:
    """Let a cache of fixed size hold what a layer keeps: key heads of live heads alone, values in `cached_order`.

    Nothing for caches that grow, and for layers with a key for every value. Raises UnsupportedError for one with
    sliding windows; for any that was filled, or made room in, for other heads; for a quantised one of a layer that
    keeps no keys.
    """
    if (layers := getattr(past_key_values, "layers", None)) is None:
        return
    if index < len(layers) and is_quantised(layers[index]) and not layout.num_live:
        raise UnsupportedError(NOT_QUANTISED)
    if index >= len(layers):
        return
    if not hasattr(layers[index], "max_cache_len"):
        _check_heads(layers[index], index, layout)
        return
    if any(past_key_values.is_sliding):
        raise UnsupportedError(NO_WINDOWS)
    layer, keys, values = layers[index], layout.rows["key"], layout.rows["value"]
    # Its class is not asked for where code is compiled: a cache that was filled has its rooms.
    if (made_for := getattr(layer, "layout", None)) is not None:
        if made_for is not layout and made_for != layout:
            raise UnsupportedError(OTHER_HEADS)
    elif len(keys) != len(values) or not layout.num_live:
        if layer.is_initialized:
            raise UnsupportedError(
                "a cache of fixed size was initialised with as many key heads as value heads; make a new one, leave "
                "early_initialization and prefill_chunk_size out"
            )
        layers[index] = _room_class()(layer.max_cache_len, layout)


def _check_heads(layer: Any, index: int, layout: HeadLayout) -> None:
    """Raise UnsupportedError where a layer of a growing cache holds other numbers of heads than the model's keeps."""
    states = (getattr(layer, name, None) for name in ("keys", "values"))
    held = [each.shape[1] for each in states if each is not None and each.dim() == 4]
    keys, values = len(layout.rows["key"]), len(layout.rows["value"])
    # A layer without live heads keeps values in the place of keys, of no heads one number a token.
    kept = [keys, values] if layout.num_live else [values or 1, 0]
    if len(held) == 2 and held != kept:
        raise UnsupportedError(
            f"the cache holds {held[0]} heads of keys and {held[1]} of values for layer {index}, which keeps {kept[0]} "
            f"and {kept[1]}: it was filled by a model with other heads, or by prefix tuning (peft), which counts them "
            "by the configuration; make a new one, or tune by LoRA or prompts"
        )


def check_filled(past_key_values: Any, index: int, heads: tuple[HeadLayout, ...] | None) -> None:
    """Raise UnsupportedError where a cache was filled beside other heads than `heads`, those of all layers now.

    Sizes do not tell: with grouped queries a layer keeps as many keys whichever of its heads are frozen. What filled it
    is kept in the cache, but of ordinary models and of compiled code, which would be compiled anew for every cache.
    """
    if heads is None or torch.compiler.is_compiling() or not hasattr(past_key_values, "layers"):
        return
    length, kept = past_key_values.get_seq_length(index), vars(past_key_values)
    begins = not isinstance(length, Tensor) and length == 0  # of one of fixed size that is in use it is a tensor
    if not begins and (before := kept.get(FILLED_BY, heads)) is not heads and before != heads:
        raise UnsupportedError(OTHER_HEADS)
    kept[FILLED_BY] = heads


def check_offloading(device: torch.device) -> None:
    """Raise UnsupportedError where this version of transformers lets copies of offloaded layers race on a device.

    Layers then come back before they were taken away, and into memory that is still being read: on a busy device tokens
    differ from those of other caches, with and without frozen heads.
    """
    version = importlib.metadata.version("transformers")
    if device.type == "cuda" and tuple(map(int, version.split(".")[:2])) < STREAMS_WAIT:
        raise UnsupportedError(
            f"with transformers {version} copies of an offloaded cache race with attention on a GPU, which yields "
            f"wrong tokens unseen: take transformers {'.'.join(map(str, STREAMS_WAIT))} or later, or another cache"
        )


def filled(key: Tensor, value: Tensor, rows: int, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Return the first `rows` places of a cache of fixed size, value heads in the layer's own order."""
    order = value_order(layout)
    value = value[:, :, :rows]
    if order is not None:
        value = take_heads(value, tuple(order.index(head) for head in range(len(order))))
    return key[:, :, :rows], value


def value_order(layout: HeadLayout) -> tuple[int, ...] | None:
    """Return in which order a cache of fixed size holds a layer's values; None for their own."""
    order = cached_order(layout.kv_head, layout.num_frozen)
    return None if order == tuple(range(len(order))) else order


def is_quantised(layer: Any) -> bool:
    """Return whether a layer of a cache holds keys and values in fewer bits."""
    return hasattr(layer, "_quantize")


def cache_bytes(past_key_values: Any) -> int:
    """Return the bytes of the keys and values that a cache of transformers holds, all places of one of fixed size.

    Of an offloaded cache, wherever they are. Raises UnsupportedError for a quantised one, which does not tell, and
    InputError for what is no cache.
    """
    if not hasattr(past_key_values, "layers"):
        raise InputError(f"expected a cache of transformers, such as DynamicCache; got {shown(past_key_values)}")
    if any(map(is_quantised, past_key_values.layers)):
        raise UnsupportedError("a quantised cache does not tell what it holds; ask torch.cuda.memory_allocated")
    held = [tensor for layer in past_key_values.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


@cache
def _room_class() -> type[Any]:
    """Return the class of a layer of a cache of fixed size with other numbers of key and value heads."""
    from transformers.cache_utils import StaticLayer

    class Room(StaticLayer):
        """Hold keys and values of one layer, each as many heads as it has."""

        def __init__(self, max_cache_len: int, layout: HeadLayout):
            super().__init__(max_cache_len=max_cache_len)
            self.layout, self.order = layout, value_order(layout)

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Make room for as many heads as each has."""
            super().lazy_initialization(key_states, value_states)
            assert self.values is not None
            # What was made has as many heads as there are keys, and goes again.
            batch, heads, _, dim = value_states.shape
            self.values = self.values.new_zeros(batch, heads, self.max_cache_len, dim)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            if self.order is not None:  # of a single token next to nothing to copy
                value_states = take_heads(value_states, self.order)
            return super().update(key_states, value_states, *args, **options)

    return Room
