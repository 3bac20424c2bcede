"""KV caches of transformers for layers with frozen heads: fewer keys, and recurrent states of exponential patterns.

A KV head's keys are cached only for live heads, and its values only for live heads and frozen heads without a
recurrent state. `fit_cache` replaces a layer of a cache that cannot store these by a `GrowingLayer` or `FixedLayer`.
"""

import importlib.metadata
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticCache, StaticLayer

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import HeadLayout
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.linear import RecurrentState
from saf.ops.tensors import cached_order, take_heads

OTHER_HEADS = "the cache was filled by other frozen heads, or by prefix tuning for all of them; make a new one"
SAFE_OFFLOADING = (5, 20)
"""The first version of transformers whose offloading stream waits for the device. In earlier ones its copies race with
the computation, and generated tokens are wrong."""


def fit_cache(past_key_values: Any, index: int, state: Any, device: torch.device) -> "StateLayer | None":
    """Replace a cache's layer `index` by one for the stored heads; return it where it has a recurrent state, else None.

    `state` is the attention layer's `HeadState`. Raises UnsupportedError for a cache that was filled with other frozen
    heads or patterns, a quantised one without keys in this layer, one of fixed size with sliding windows, and an
    offloaded one on a GPU whose copies would race.
    """
    if getattr(past_key_values, "offloading", False) and device.type == "cuda":
        version = importlib.metadata.version("transformers")
        if tuple(map(int, version.split(".")[:2])) < SAFE_OFFLOADING:
            raise UnsupportedError(f"an offloaded cache on a GPU needs transformers 5.20, got {version}")
    layers, new_layer = past_key_values.layers, getattr(past_key_values, "layer_class_to_replicate", None)
    while new_layer is not None and len(layers) <= index:  # such a cache adds layers lazily
        layers.append(new_layer())
    # No isinstance tests: compiled code would guard on the layer's class.
    if (filled_by := getattr(layers[index], "fingerprint", None)) is None:
        if hasattr(layers[index], "max_cache_len") and any(past_key_values.is_sliding):
            raise UnsupportedError(
                "with frozen heads models with a sliding window take a growing cache: leave cache_implementation out"
            )
        layers[index] = _fitting_layer(layers[index], state.layout, state.frozen)
        layers[index].fingerprint = state.fingerprint
    elif filled_by != state.fingerprint:
        raise UnsupportedError(OTHER_HEADS)
    return layers[index] if getattr(layers[index], "sizes", None) is not None else None


def _fitting_layer(layer: Any, layout: HeadLayout, frozen: FrozenHeads | None) -> Any:
    """Return a cache's layer, or a replacement for it where it cannot store an attention layer's heads."""
    quantised = hasattr(layer, "_quantize")
    if quantised and not layout.num_live:
        raise UnsupportedError("a quantised cache needs a live head in every layer; limit max_per_layer")
    keys, values = (len(layout.rows[role]) for role in ("key", "value"))
    if layer.is_initialized and not quantised:  # a quantised layer has no such `keys`
        if (layer.keys.shape[1], layer.values.shape[1]) != (keys, values):
            raise UnsupportedError(OTHER_HEADS)
        return layer
    # With gradients values are stored: a recurrent state is updated in place, which autograd cannot follow.
    linear = None if frozen is None or not frozen.linear or torch.is_grad_enabled() else frozen
    # A stock layer allocates equally many key and value heads, or counts its tokens by its keys. Its subclasses, for
    # sliding windows and quantised keys, stay: they hold values in place of a recurrent state.
    if type(layer) is StaticLayer and (linear is not None or keys != values):
        return FixedLayer(layer.max_cache_len, layout, linear)
    if type(layer) is DynamicLayer and (linear is not None or not keys):
        return GrowingLayer(layout, linear)
    return layer


def cache_bytes(past_key_values: Any) -> int:
    """Return the bytes of all keys, values and recurrent states in a cache of transformers, on any device.

    A cache of fixed size counts its whole length. Raises UnsupportedError for a quantised one.
    """
    if (layers := getattr(past_key_values, "layers", None)) is None:
        raise InputError(f"expected a cache of transformers, such as DynamicCache; got {shown(past_key_values)}")
    if any(hasattr(layer, "_quantize") for layer in layers):
        raise UnsupportedError("the bytes of a quantised cache are unknown; use torch.cuda.memory_allocated")
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values", "ring", "sums")]
    return sum(tensor.nbytes for tensor in states if tensor is not None)


class StateLayer:
    """A cache layer that stores some of the value heads, and a recurrent state for exponential ("linear") patterns.

    Attributes:
        order: Indices of the stored value heads, in their order in the cache; None for all heads in layer order.
        sizes: `FrozenHeads.state_sizes`; None without a recurrent state.
        ring, sums: The tensors of the recurrent state, see `RecurrentState`.
        value: `[B, V, Tq, D]`, new values of all heads, from `update` until `take_state`.
    """

    order: tuple[int, ...] | None = None
    sizes: tuple[int, int, int, int] | None = None
    ring: Tensor | None = None
    sums: Tensor | None = None
    value: Tensor | None = None

    def set_heads(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Store values in `cached_order`, without those that only exponential patterns of `frozen` read."""
        self.sizes = None if frozen is None else frozen.state_sizes()
        order = cached_order(layout.kv_head, layout.num_frozen, () if frozen is None else frozen.linear)
        self.order = None if order == tuple(range(len(layout.rows["value"]))) else order

    def stored_values(self, value: Tensor) -> Tensor:
        """Return the heads to store of new values `[B, V, Tq, D]`; hold all of them for the recurrent state."""
        if self.sizes is not None:
            self.value = value
            if self.ring is None:
                self.ring, self.sums, _ = RecurrentState.empty(value, self.sizes)
        if self.order is None:
            return value
        return take_heads(value, self.order) if self.order else value[:, :0]

    def take_state(self) -> RecurrentState:
        """Return the recurrent state with the new values, once a pass, and release the values."""
        ring, sums, value = self.ring, self.sums, self.value
        assert ring is not None and sums is not None and value is not None  # noqa: PT018
        self.value = None
        return RecurrentState(ring, sums, value)

    def map_state(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to both tensors of the recurrent state."""
        if self.ring is not None and self.sums is not None:
            self.ring, self.sums = function(self.ring), function(self.sums)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states, self.stored_values(value_states), *args, **options)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.map_state(lambda x: x.index_select(0, beam_idx.to(x.device)))


class GrowingLayer(StateLayer, DynamicLayer):
    """A layer of a `DynamicCache` without keys, or with a recurrent state. It counts tokens, not its keys."""

    def __init__(self, layout: HeadLayout, frozen: FrozenHeads | None):
        super().__init__()
        self.most_cropped = inf
        self.length = self.longest = 0
        if frozen is not None:
            self.set_heads(layout, frozen)
            # The ring of values goes back one chunk; what the sums have taken up before cannot be subtracted.
            _, _, self.most_cropped, _ = frozen.state_sizes()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.length += value_states.shape[-2]
        self.longest = max(self.longest, self.length)
        return super().update(key_states, value_states, *args, **options)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        # In transformers 5.17 a positive number is the new length; later versions refuse it.
        length = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        length = max(0, min(self.length, length))
        if 0 < length < self.longest - self.most_cropped:
            raise UnsupportedError(
                f"with a recurrent state at most {self.most_cropped} tokens can be cropped, got "
                f"{self.longest - length}: propose fewer, or use a new cache"
            )
        super().crop(tokens_to_remove)
        self.length, self.longest = length, self.longest if length else 0
        if not length:
            self.map_state(Tensor.zero_)

    def reset(self) -> None:
        super().reset()
        self.length = self.longest = 0
        self.ring = self.sums = None  # the next batch may have another size

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.map_state(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.map_state(lambda x: x[indices])


class FixedLayer(StateLayer, StaticLayer):
    """A layer of a `StaticCache` with different numbers of key and value heads, or with a recurrent state."""

    def __init__(self, size: int, layout: HeadLayout, frozen: FrozenHeads | None):
        super().__init__(max_cache_len=size)  # pyright: ignore[reportCallIssue]
        self.set_heads(layout, frozen)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.values is not None
        batch, heads, _, dim = value_states.shape  # the base class allocates as many value heads as key heads
        self.values = self.values.new_zeros(batch, heads, self.max_cache_len, dim)
        if torch.compiler.is_compiling():  # cannot be traced
            return
        for tensor in (self.values, self.ring, self.sums):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)  # or no step is captured: they change in place

    def reset(self) -> None:
        super().reset()
        self.map_state(Tensor.zero_)  # in place: captured graphs read these addresses


def random_cache(model: Any, token: Tensor, length: int) -> tuple[Any, Tensor]:
    """Return a `StaticCache` of `length` tokens with random keys and values, and its layers' token counts, `[layers]`.

    A pass of `token [B, 1]` allocates the cache. The layers' own counts are views of the returned ones, so that one
    kernel resets all of them.
    """
    cache: Any = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache)
    counts = torch.zeros(len(cache.layers), dtype=torch.long, device=token.device)
    generator = torch.Generator(token.device).manual_seed(0)
    for layer, count in zip(cache.layers, counts.unbind(), strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = count
    return cache, counts
