"""Attention of transformers' models once heads of theirs are frozen: the function that layers call, and their state.

An attention layer with edited heads carries a submodule `saf`, its `HeadState`. The model then attends by the function
named "saf" in transformers' registry, `attend`, and layers with edited heads run `edited_forward`.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from saf.errors import UnsupportedError, shown
from saf.heads import HeadLayout, roles_of
from saf.hf.cache import StateLayer, filled, prepare
from saf.hf.families import Family
from saf.hf.masks import PassMask, check_positions, padding_mask
from saf.models.adapter import Receiver, Removed
from saf.ops import FrozenHeads, frozen_attention, live_attention, live_heads, mixed_attention
from saf.ops.frozen_heads import LayoutMixin
from saf.ops.heads import cached_order, join_heads
from saf.ops.positions import first_real

NAME = "saf"
"""Our name in transformers' registries of attention functions and their masks, and of a layer's state."""
STOCK = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions of transformers that compute softmax attention; others may not."""
_UNDER_HOOKS = "_old_forward"
"""Where accelerate keeps the forward pass that its hooks run."""


class HeadState(LayoutMixin):
    """The frozen heads of one attention layer and their patterns."""

    def __init__(self, layout: HeadLayout, family: Family):
        super().__init__()
        self.layout, self.family = layout, family
        self.frozen: FrozenHeads | None = None
        self.removed: Removed = {}
        self.receivers: list[Receiver] = []
        self.kernel = "auto"
        """SDPA kernel of live heads, see `mixed_attention`."""
        self.before: str | None = None
        """The model's attention function before heads were frozen."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the process that unpickles a model save it with its heads."""
        from saf.hf.pretrained import watch_folders

        super().__setstate__(state)
        watch_folders()

    def take(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout."""
        self.layout, self.frozen, self.removed = layout, frozen, dict(removed)
        self.set_layout(layout, frozen)


def state_of(attention: nn.Module) -> HeadState | None:
    """Return the state of an attention layer; None where nothing of it is frozen, captured or pinned."""
    return getattr(attention, NAME, None)


def attach_state(attention: Any, family: Family) -> HeadState:
    """Return the state of an attention layer, as its submodule `saf`."""
    if (state := state_of(attention)) is None:
        state = attention.saf = HeadState(layout_of(attention), family)
    return state


def detach_idle_state(attention: Any) -> None:
    """Leave an attention layer as it was before `attach_state` once its state is idle."""
    state = state_of(attention)
    if state is not None and state.layout.ordinary and not state.receivers and state.kernel == "auto":
        del attention.saf


def layout_of(attention: Any) -> HeadLayout:
    """Return the order of an attention layer's heads."""
    if (state := state_of(attention)) is not None:
        return state.layout
    heads = attention.config.num_attention_heads
    return HeadLayout(heads, getattr(attention.config, "num_key_value_heads", heads))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PassMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    state_layer: StateLayer | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with live and frozen heads in slot order, as transformers calls it.

    `query [B, L, Tq, D]` of the live heads, `key [B, K, T, D]` and `value` of the stored KV heads, cached tokens first;
    `attention_mask` as `padding_mask` returns it; `position_ids [B or 1, Tq]`. `state_layer` is
    the layer's own in a cache, where it keeps a recurrent state. Returns `[B, Tq, H, D]`.

    Raises UnsupportedError for dropout, attention weights as output, other masks, and a window shorter than the input
    where heads are frozen or measured; InputError for inputs longer than the patterns.
    """
    state = state_of(module)  # None in other models built from the same config, which names this function
    if dropout:
        setting = Family.dropout_setting if state is None else state.family.dropout_setting
        raise UnsupportedError(no_dropout(dropout, setting))
    if output_attentions:
        raise UnsupportedError("frozen heads have no attention weights to return; leave output_attentions out")
    seen = PassMask() if attention_mask is None else attention_mask
    if not isinstance(seen, PassMask):  # transformers passes masks of pairs on as they are
        raise UnsupportedError(
            f"attention_mask must mark padding, [B, T], got {shown(attention_mask)}: leave it out, or "
            f"set_attn_implementation({NAME!r})"
        )
    if seen.fills:
        key, value = filled(key, value, query.shape[-2], layout_of(module), state=state_layer is not None)
    length = value.shape[-2] if seen.documents is None else seen.documents.longest
    beyond = sliding_window is not None and length > sliding_window
    if beyond and state is not None and (state.frozen is not None or state.receivers):
        raise UnsupportedError(f"inputs must fit the sliding window, {sliding_window} tokens, got {length}")
    for receiver in () if state is None else state.receivers:
        receiver(query, key)
    if seen.documents is None and (module.layer_idx == 0 or beyond):  # once a pass: it may wait for the device
        check_positions(seen, position_ids, cu_seq_lens_q, len(value))
    frozen: dict[str, Any] = {"left_pad": None if seen.padding is None else first_real(seen.padding)}
    visible = None if seen.positions is None else seen.positions.visible
    live = {**frozen, "scale": scaling, "visible": visible, "window": sliding_window, "soft_cap": softcap}
    frozen["cache_position"] = seen.positions
    if state_layer is not None:
        frozen["state"] = state_layer.state()
    mix = partial(_mix, state, live, frozen)
    output = mix(query, key, value) if seen.documents is None else seen.documents.attend(mix, query, key, value)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding_mask)


def _mix(
    state: HeadState | None, live: dict[str, Any], frozen: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return the output `[B, H, Tq, D]` of a layer, one sequence a row.

    `live` and `frozen` are options of `live_attention` and `frozen_attention`; `mixed_attention` has neither a window
    nor a soft cap, and needs no window where heads are frozen: inputs fit in it.
    """
    if state is None:
        return live_attention(query, key, value, **live)
    whole = state.layout.ordinary and live["window"] is None
    if live["soft_cap"] is None and (state.frozen is not None or whole):
        return mixed_attention(query, key, value, state.frozen, scale=live["scale"], kernel=state.kernel, **frozen)
    parts, layout = [], state.layout
    if layout.num_live:
        slots = layout.kv_head[: layout.num_live]
        if frozen["cache_position"] is not None or "state" in frozen:
            slots = tuple(map(cached_order(layout.kv_head, layout.num_frozen).index, slots))
        parts.append(live_heads(query, key, value, slots, kernel=state.kernel, **live))
    if state.frozen is not None:
        parts.append(frozen_attention(value, state.frozen, rows=query.shape[-2], **frozen))
    if not parts:
        return query  # of no heads
    return join_heads(*parts)


def no_dropout(rate: float, setting: str) -> str:
    """Return the message for an attention layer with dropout."""
    return f"with frozen heads dropout of attention layers must be 0, got {rate:g}: open the model with {setting}=0"


def edited_forward(
    module: Any,
    rotate: Callable[..., tuple[Tensor, Tensor]] | None,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: PassMask | None = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute an attention layer `[B, Tq, C]` as its class does, with the heads that each role has left."""
    state, family = module.saf, module.saf.family
    query, key, value = _project(module, hidden_states)
    if state.layout.num_live and family.norms:
        query, key = module.q_norm(query), module.k_norm(key)
    if state.layout.num_live and rotate is not None and position_embeddings is not None:
        query, key = rotate(query, key, *position_embeddings)
    state_layer = None
    if past_key_values is not None:
        state_layer = prepare(past_key_values, module.layer_idx, state.layout, state.frozen, value.device)
        key, value = _cached(module, past_key_values, key, value, stock=state_layer is None)
    options = {
        "dropout": family.dropout_rate(module) if module.training else 0.0,
        "scaling": module.scaling,
        "sliding_window": getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
        "softcap": None if family.soft_cap is None else getattr(module, family.soft_cap),
        "state_layer": state_layer,
    }
    mixed, _ = attend(module, query, key, value, attention_mask, **options, **rest)
    projection = family.module(module, "output")
    if mixed.shape[2]:
        output = projection(mixed.flatten(2).contiguous())  # GPT-2's takes a view of it
    else:  # Conv1D takes no inputs without channels, and clip_grad_norm_ no gradient without elements
        bias = projection.bias
        output = torch.zeros_like(hidden_states) if bias is None else bias.expand_as(hidden_states)
    return output if family.after is None else getattr(module, family.after)(output), None


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[B, *, Tq, D]`; nothing reads the former two without live heads."""
    layout = module.saf.layout
    parts: dict[str, Tensor] = {}
    for name, attribute in module.saf.family.projections.items():
        roles = [] if name == "output" else roles_of(name)
        if "value" in roles or (roles and layout.num_live):
            counts = [len(layout.rows[role]) for role in roles]
            heads = getattr(module, attribute)(hidden_states).unflatten(-1, (sum(counts), module.head_dim))
            parts |= dict(zip(roles, heads.transpose(1, 2).split(counts, dim=1), strict=True))
    none = parts["value"][:, :0]
    return parts.get("query", none), parts.get("key", none), parts["value"]


def _cached(module: Any, cache: Any, key: Tensor, value: Tensor, *, stock: bool) -> tuple[Tensor, Tensor]:
    """Add new keys and values to a cache, and return all of its.

    Without live heads a stock layer stores the values in place of keys, by which it counts its tokens, and nothing in
    place of values; without any heads it stores one number a token.
    """
    if module.saf.layout.num_live or not stock:
        return cache.update(key, value, module.layer_idx)
    heads = value.shape[1]
    counted = value if heads else value.new_zeros(len(value), 1, value.shape[2], 1)
    counted, _ = cache.update(counted, counted[:, :0], module.layer_idx)
    return counted[:, :0], counted if heads else counted[:, :0].expand(-1, -1, -1, module.head_dim)


def choose_forward(attention: Any) -> None:
    """Set the forward pass of a layer: ours with edited heads, else its class's. Hooks of accelerate stay around it."""
    layout, name = layout_of(attention), "forward"
    if {"_hf_hook", _UNDER_HOOKS} <= vars(attention).keys():
        name = _UNDER_HOOKS
    present = vars(attention).get(name)
    if not layout.ordinary:
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        setattr(attention, name, partial(edited_forward, attention, rotate))
    elif isinstance(present, partial) and present.func is edited_forward:
        if name == _UNDER_HOOKS:
            setattr(attention, name, MethodType(type(attention).forward, attention))
        else:
            del attention.forward
