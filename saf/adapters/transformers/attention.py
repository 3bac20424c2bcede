"""What models of transformers call once heads of theirs are frozen: attention, and layers without queries."""

import inspect
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.adapters.adapter import Removed, Sink, hooked
from saf.adapters.documents import Documents
from saf.adapters.transformers.cache import Beginning, check_filled, check_offloading, filled, make_room
from saf.adapters.transformers.family import Family
from saf.adapters.transformers.mask import Mask, check_begins, check_one_sequence_a_row, no_padding, padding_mask
from saf.errors import SafWarning, UnsupportedError
from saf.heads import HeadLayout
from saf.ops import FrozenHeads, frozen_attention, live_attention, live_heads, mixed_attention
from saf.ops.heads import cached_order, join_heads
from saf.ops.layout import LAYOUT, LayoutMixin
from saf.ops.live import FLASH_DECODE
from saf.ops.positions import CachePosition, first_real

NAME = "saf"
UNDER_HOOKS = "_old_forward"
"""The attribute in which accelerate keeps the forward pass that its hooks run; theirs is in its place."""


class HeadState(LayoutMixin):
    """Hold which heads of one attention layer are frozen, and what is known of them."""

    def __init__(self, layout: HeadLayout, family: Family):
        super().__init__()
        self.layout, self.family = layout, family
        self.frozen: FrozenHeads | None = None
        self.removed: Removed = {}
        self.sinks: OrderedDict[int, Sink] = OrderedDict()
        self.kernel = "auto"
        """SDPA kernel of live heads, see `mixed_attention`."""
        self.before: str | None = None
        """The model's attention function before heads were frozen."""
        self.everywhere: tuple[HeadLayout, ...] | None = None
        """The heads of all layers of the model, once some are edited."""

    @property
    def idle(self) -> bool:
        """Return whether nothing is left that the layer would do otherwise than without this state."""
        return self.layout.ordinary and not self.sinks and self.kernel == "auto"

    def take(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout."""
        self.layout, self.frozen, self.removed = layout, frozen, dict(removed)
        self.set_layout(layout, frozen)


STOCK = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions of transformers that compute softmax attention."""
_KERNELS = re.compile(r"kernels-community/[a-z-]*flash-attn\d?")
"""Where it downloads flash attention from that is not installed."""


def is_stock(function: Any) -> bool:
    """Return whether a function is code of transformers or of this package, decorated or not."""
    # __module__ is what functools.wraps copies; the globals are of the file that the code stands in.
    return getattr(function, "__globals__", {}).get("__name__", "").startswith(("transformers.", "saf."))


def check_function(attention: Any) -> None:
    """Raise UnsupportedError unless a layer attends by a function in `STOCK`, with the mask that belongs to it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = attention.config._attn_implementation
    known = name in (*STOCK, NAME) or _KERNELS.fullmatch(str(name)) is not None
    found = inspect.unwrap(type(attention).forward).__globals__  # where the layer looks its function up
    function = found.get("ALL_ATTENTION_FUNCTIONS", {}).get(name, found.get("eager_attention_forward"))
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name, function)
    if not (known and is_stock(function) and is_stock(mask)):
        raise UnsupportedError(
            f"attention must be softmax attention by one of transformers' own functions ({', '.join(STOCK)}), got "
            f"{'another one in the place of ' if known else ''}{name!r}: choose one by model.set_attn_implementation"
        )


@cache
def register() -> None:
    """Make the function known to transformers under `NAME`, with masks that tell of padding alone."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)


def state_of(attention: nn.Module) -> HeadState | None:
    """Return the state that an attention layer carries; None where nothing of it is frozen, watched or pinned."""
    return getattr(attention, "saf", None)


def attach_state(attention: Any, family: Family) -> HeadState:
    """Return the state of an attention layer, given to it as submodule `saf` if it has none yet."""
    if (state := state_of(attention)) is not None:
        return state
    attention.saf = HeadState(layout_of(attention), family)
    attention.register_forward_pre_hook(before_pass, with_kwargs=True)
    attention.register_load_state_dict_pre_hook(check_layout)
    return attention.saf


def detach_idle_state(attention: Any) -> None:
    """Leave an attention layer as it was before `attach_state` once its state is idle."""
    if (state := state_of(attention)) is not None and state.idle:
        del attention.saf
        for number, hook in list(attention._forward_pre_hooks.items()):
            if hook is before_pass:
                del attention._forward_pre_hooks[number]
                attention._forward_pre_hooks_with_kwargs.pop(number, None)
        for number, wrapped in list(attention._load_state_dict_pre_hooks.items()):
            if wrapped.hook is check_layout:
                del attention._load_state_dict_pre_hooks[number]


def layout_of(attention: Any) -> HeadLayout:
    """Return the order of an attention layer's heads."""
    state, config = state_of(attention), attention.config
    if state is not None:
        return state.layout
    return HeadLayout(config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads))


def before_pass(module: Any, _: Any, options: dict[str, Any]) -> None:
    """Make room in a cache of fixed size.

    Raises UnsupportedError where other code than ours is about to attend, and as `make_room`, `check_filled` and
    `check_offloading`.
    """
    name = module.config._attn_implementation
    if not module.saf.layout.ordinary and name != NAME:
        raise UnsupportedError(
            f"a model with frozen or pruned heads attends by {NAME!r}, not {name!r}; call "
            f"model.set_attn_implementation({NAME!r}), or uninstall_ first"
        )
    if not (torch.compiler.is_compiling() or module.saf.layout.ordinary) and (found := hooked(module)):
        warnings.warn(
            f"hooks on {found} of layer {module.layer_idx} find heads in slot order: live ones first, frozen ones "
            "without queries and keys; hook the layer instead",
            SafWarning,
            stacklevel=2,
        )
    if (cache := options.get("past_key_values")) is not None:
        if getattr(cache, "offloading", False):
            check_offloading(next(module.parameters()).device)
        make_room(cache, module.layer_idx, module.saf.layout)
        check_filled(cache, module.layer_idx, module.saf.everywhere)


def check_layout(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise CheckpointError for weights of a layer that tell of other frozen heads, or of none.

    Adapters of LoRA alone tell of none, and have to fit by their shapes.
    """
    names = [prefix + name for name in module.saf.family.projections.values()]
    told = f"{prefix}saf.{LAYOUT}"
    if not state_dict.keys().isdisjoint([told, *(f"{name}{own}" for name in names for own in _WEIGHTS)]):
        module.saf.compare_layout(state_dict, prefix, told)


_WEIGHTS = (".weight", ".base_layer.weight")
"""What a projection's own weight is called, and under an adapter of peft."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with live and frozen heads in slot order, as transformers calls it.

    `query [B, L, Tq, D]` of the live heads, `key [B, K, T, D]` and `value` of the KV heads kept, cached tokens first;
    `attention_mask [B, T]` is True for real tokens, or is what else `padding_mask` returns; `position_ids [B or 1,
    Tq]`. Returns `[B, Tq, H, D]`.

    Raises:
        UnsupportedError: Dropout or output of attention weights, a mask of pairs, positions that start again beside a
            cache or an attention_mask; with frozen heads, or while it is measured, a window shorter than the sequence.
        InputError: Inputs longer than the patterns.
        RuntimeError: In compiled code, several sequences in one row.
    """
    # Models built from one config share the choice of this function; the others have no state of ours.
    state = state_of(module)
    if dropout:
        raise UnsupportedError(no_dropout(dropout, None if state is None else state.family))
    if output_attentions:
        raise UnsupportedError("attention weights are not kept once heads are frozen; leave output_attentions out")
    if isinstance(attention_mask, Beginning):
        key, value = filled(key, value, query.shape[-2], layout_of(module))
        attention_mask = attention_mask.mask
    documents = attention_mask if isinstance(attention_mask, Documents) else None
    places = attention_mask if isinstance(attention_mask, CachePosition) else None
    if documents is None and module.layer_idx == 0:  # once a pass: it may wait for the device
        check_begins(cu_seq_lens_q, value)
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    positions = value.shape[-2] if documents is None else documents.longest
    beyond = sliding_window is not None and positions > sliding_window
    if beyond and state is not None and (state.frozen is not None or state.sinks):
        raise UnsupportedError(
            f"{positions} positions exceed the sliding window of {sliding_window}; measured or with frozen "
            "heads, this model takes inputs up to its window"
        )
    for sink in () if state is None else state.sinks.values():
        sink(query, key)
    if not (attention_mask is None or documents or places or (mask is not None and mask.dim() == 2)):
        got = type(attention_mask).__name__ if mask is None else list(mask.shape)
        raise UnsupportedError(no_padding(got))
    if position_ids is not None and documents is None and (module.layer_idx == 0 or beyond):
        real, length = (mask, value.shape[-2]) if places is None else (places.real, query.shape[-2])
        check_one_sequence_a_row(position_ids, real, length)
    start = None if mask is None else first_real(mask)
    options = {"scale": scaling, "left_pad": start, "cache_position": places}
    mix = partial(_mixed, state, options, {"window": sliding_window, "soft_cap": softcap})
    output = mix(query, key, value) if documents is None else documents.apart(mix, query, key, value)
    return output.transpose(1, 2), None


def _mixed(
    state: HeadState | None,
    options: dict[str, Any],
    ordinary: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Return the output `[B, H, Tq, D]` of a layer's query, key and value, one sequence a row.

    The window and the soft cap, in `ordinary`, are for live heads; the seam does not know them.
    """
    if state is None:
        places = options["cache_position"]
        own = {"scale": options["scale"], "left_pad": options["left_pad"]}
        return live_attention(query, key, value, visible=None if places is None else places.visible, **own, **ordinary)
    ours = state.frozen is not None or (
        state.kernel == FLASH_DECODE and state.layout.ordinary and ordinary["window"] is None
    )
    if not ours or ordinary["soft_cap"] is not None:
        return _attend_apart(query, key, value, state, options | ordinary)
    return mixed_attention(query, key, value, state.frozen, **options, kernel=state.kernel)


def _attend_apart(query: Tensor, key: Tensor, value: Tensor, state: HeadState, options: dict[str, Any]) -> Tensor:
    """Return live heads and frozen ones, computed each by themselves, joined."""
    parts, layout = [], state.layout
    start, places = options["left_pad"], options.pop("cache_position")
    if layout.num_live:
        slots = layout.kv_head[: layout.num_live]
        if places is not None:
            slots = tuple(map(cached_order(layout.kv_head, layout.num_frozen).index, slots))
        visible = None if places is None else places.visible
        parts.append(live_heads(query, key, value, slots, **options, visible=visible, kernel=state.kernel))
    if state.frozen is not None:
        parts.append(frozen_attention(value, state.frozen, left_pad=start, cache_position=places, rows=query.shape[-2]))
    if not parts:
        return query  # of no heads
    return parts[0] if len(parts) == 1 else join_heads(*parts)


def no_dropout(rate: float, family: Family | None) -> str:
    """Say that attention dropout cannot be, and how to switch it off in a family, Llama's way if it is not known."""
    told = Family if family is None else family
    return (
        f"with frozen heads there is no attention dropout, this model has {rate:g}: {told.no_dropout}, or build or "
        f"open it without (from_pretrained(..., {told.dropout_setting}=0))"
    )


def forward_without_queries(
    module: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Mask = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute an attention layer `[B, Tq, C]` none of whose heads is live: values, their mix, the output projection.

    A cache holds the values in the place of keys, by which it counts its tokens, and nothing in the place of values. Of
    a layer without any heads it holds one number a token.
    """
    heads, family = len(module.saf.layout.rows["value"]), module.saf.family
    # Of a fused projection the rows of values are all that is left.
    value = family.module(module, "value")(hidden_states).unflatten(-1, (heads, module.head_dim)).transpose(1, 2)
    rows = value.shape[-2]
    if past_key_values is not None:
        counted = value if heads else hidden_states[:, None, :, :1]
        counted, _ = past_key_values.update(counted, counted[:, :0], module.layer_idx)
        value = counted if heads else counted[:, :0].expand(-1, -1, -1, module.head_dim)
    dropout = float(family.dropout(module)) if module.training else 0.0
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    query, key = value[:, :0, :rows], value[:, :0]
    mixed, _ = attend(module, query, key, value, attention_mask, dropout, sliding_window=window, **rest)
    flat = mixed.flatten(2).contiguous()  # GPT-2's projection takes a view of it
    if family.output is not None:
        return family.output(module, flat), None
    projection = family.module(module, "output")
    if heads:
        return projection(flat), None
    # The empty weight gets no gradient: clip_grad_norm_ finds no largest element in one.
    return F.linear(flat, projection.weight.detach(), projection.bias), None


def choose_forward(attention: Any, family: Family) -> None:
    """Let a layer without live heads compute as above, one with edited heads as its family, or else its class, does.

    Their own forward pass reads the number of heads off a projection's size, which does not work for none. Hooks of
    accelerate stay around the one that is chosen.
    """
    layout, name = layout_of(attention), _forward_name(attention)
    if not layout.num_live:
        setattr(attention, name, partial(forward_without_queries, attention))
    elif family.forward is not None and not layout.ordinary:
        setattr(attention, name, partial(family.forward, attention))
    elif (own := replaced_forward(attention)) is not None and own in (forward_without_queries, family.forward):
        if name == UNDER_HOOKS:
            setattr(attention, name, MethodType(type(attention).forward, attention))
        else:
            del attention.forward


def _forward_name(attention: Any) -> str:
    """Return the attribute that holds a layer's own forward pass, under the hooks of accelerate if it has any."""
    return UNDER_HOOKS if {"_hf_hook", UNDER_HOOKS} <= vars(attention).keys() else "forward"


def replaced_forward(attention: Any) -> Any:
    """Return the function that an attention layer runs in the place of its class's; None for that one."""
    own = vars(attention).get(_forward_name(attention))
    if isinstance(own, MethodType) and own.__func__ is type(attention).forward:
        return None  # as some ways of recording outputs leave it behind
    return own.func if isinstance(own, partial) else own


def idle_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names in a model of what does not change by training since heads were edited, while others may.

    They are the buffers of frozen heads, and in a layer without live heads the weights of queries and keys, which no
    pass reads.
    """
    for name, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        yield from (f"{name}.{NAME}.{buffer}" for buffer, _ in state.named_buffers())
        if not state.layout.num_live:
            read = {id(one) for role in ("value", "output") for one in state.family.module(module, role).parameters()}
            logits = {id(one) for one in state.parameters()}
            own = module.named_parameters()
            yield from (f"{name}.{part}" for part, one in own if id(one) not in read | logits)
