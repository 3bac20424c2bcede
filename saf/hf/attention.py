"""Attention of transformers' models once heads of theirs are frozen: the function that layers call, and its masks.

An attention layer with edited heads carries a submodule `saf`, its `HeadState`. The model then attends by the function
named "saf" in transformers' registry, `attend`, with the masks of `padding_mask`, and layers with edited heads run
`edited_forward`. Packed documents (`position_ids` that start again) attend in rows of their own, so that live and
frozen heads compute each as if alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import HeadLayout, roles_of
from saf.hf.cache import StateLayer, first_places, prepare
from saf.hf.families import Family
from saf.models.adapter import Receiver, Removed
from saf.ops import FrozenHeads, frozen_attention, live_attention, live_heads, mixed_attention
from saf.ops.frozen_heads import LayoutMixin, beyond_patterns
from saf.ops.heads import cached_order, join_heads
from saf.ops.operator import is_capturing
from saf.ops.positions import CachePosition, device_assert, first_real, left_padding

NAME = "saf"
"""Our name in transformers' registries of attention functions and their masks, and of a layer's state."""
STOCK = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions of transformers that compute softmax attention; others may not."""
_UNDER_HOOKS = "_old_forward"
"""Where accelerate keeps the forward pass that its hooks run."""
_SLIDING = "sliding_attention"
_OWN_ROWS = "pad each document in a row of its own"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: "PassMask | None", dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    output_attentions: bool = False, position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    state_layer: StateLayer | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend with live and frozen heads in slot order, as transformers calls it.

    `query [B, L, Tq, D]` of the live heads, `key [B, K, T, D]` and `value` of the stored KV heads, cached tokens first;
    `attention_mask` as `padding_mask` returns it; `position_ids [B or 1, Tq]`. `state_layer` is the layer's own in a
    cache, where it keeps a recurrent state. Returns `[B, Tq, H, D]`.

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
        key, value = first_places(key, value, query.shape[-2], layout_of(module), state=state_layer is not None)
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


def _mix(
    state: "HeadState | None", live: dict[str, Any], frozen: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
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
    return join_heads(*parts) if parts else query  # of no heads


def no_dropout(rate: float, setting: str) -> str:
    """Return the message for an attention layer with dropout."""
    return f"with frozen heads dropout of attention layers must be 0, got {rate:g}: open the model with {setting}=0"


# --- layers with edited heads


def edited_forward(
    module: Any, rotate: Callable[..., tuple[Tensor, Tensor]] | None, hidden_states: Tensor, *,
    position_embeddings: tuple[Tensor, Tensor] | None = None, attention_mask: "PassMask | None" = None,
    past_key_values: Any = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute an attention layer `[B, Tq, C]` as its class does, with the heads that each role has left."""
    state, family = module.saf, module.saf.family
    query, key, value = _project(module, hidden_states)
    if state.layout.num_live and family.norms:
        query, key = module.q_norm(query), module.k_norm(key)
    if state.layout.num_live and rotate is not None and position_embeddings is not None:
        query, key = rotate(query, key, *position_embeddings)
    state_layer = None
    if past_key_values is not None:
        state_layer = prepare(past_key_values, module.layer_idx, state, value.device)
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


class HeadState(LayoutMixin):
    """The frozen heads of one attention layer and their patterns: its submodule `saf`."""

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
        self.fingerprint = ""
        """Kinds of the heads and digests of their patterns: a cache goes on with those that filled it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the process that unpickles a model save it with its heads."""
        from saf.hf.pretrained import watch_folders

        super().__setstate__(state)
        watch_folders()

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout, its frozen heads, and the rows for undoing."""
        self.layout, self.frozen, self.removed = layout, frozen, dict(removed)
        self.set_layout(layout, frozen)
        self.fingerprint = "" if self.frozen_layout is None else str(self.frozen_layout.tolist())


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


def choose_forward(attention: Any) -> None:
    """Set the forward pass of a layer: ours with edited heads, else its class's. Hooks of accelerate stay around it."""
    hooked = {"_hf_hook", _UNDER_HOOKS} <= vars(attention).keys()
    name = _UNDER_HOOKS if hooked else "forward"
    present = vars(attention).get(name)
    if not layout_of(attention).ordinary:
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        setattr(attention, name, partial(edited_forward, attention, rotate))
    elif isinstance(present, partial) and present.func is edited_forward:
        if hooked:
            setattr(attention, name, MethodType(type(attention).forward, attention))
        else:
            del attention.forward


# --- masks: padding, packed documents, positions in a cache of fixed size


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch of rows `[B, T]` lie, in groups of similar length."""

    groups: tuple[tuple[Tensor, Tensor], ...]
    """Of each group `[N, L]` the tokens' indices in the flattened rows, and which are no padding on the right."""
    length: int
    """Tokens of a row."""
    longest: int
    """Tokens of the longest document."""

    @classmethod
    def of(cls, mask: Callable[..., Tensor], batch: int, length: int, device: torch.device) -> "Documents | None":
        """Return the documents that transformers' `mask(row, head, query, key)` separates; None for whole rows.

        A document begins where a token does not see the one before it. Waits for the device.
        """
        row, position = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
        begins = torch.ones(batch, length, dtype=torch.bool, device=device)
        begins[:, 1:] = ~mask(row, position.new_zeros(()), position[1:], position[:-1])
        first = begins.flatten().nonzero().flatten()
        if len(first) == batch:
            return None
        sizes = torch.diff(first, append=first.new_tensor([batch * length]))
        power = (sizes - 1).double().log2().floor()  # lengths of one group differ by a factor of two at most
        groups = []
        for each in power.unique():
            begin, size = first[power == each], sizes[power == each]
            step = torch.arange(int(size.max()), device=device)
            real = step < size[:, None]
            groups.append((torch.where(real, begin[:, None] + step, begin[:, None]), real))
        return cls(tuple(groups), length, int(sizes.max()))

    def attend(self, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the outputs `[B, H, T, D]` of `attend` for `inputs [B, *, T, D]`, every document in a row of its own.

        The padding of a group stands behind its documents, where none of their tokens sees it.
        """
        flat = [each.transpose(1, 2).flatten(0, 1) for each in inputs]
        rows = [attend(*(each[index].transpose(1, 2) for each in flat)).transpose(1, 2) for index, _ in self.groups]
        output = rows[0].new_empty(flat[0].shape[0], *rows[0].shape[2:])
        for (index, real), part in zip(self.groups, rows, strict=True):
            output = output.index_put((index[real],), part[real])
        return output.unflatten(0, (-1, self.length)).transpose(1, 2)


class PassMask(NamedTuple):
    """Which tokens those of a pass see, among the ones before them."""

    padding: Tensor | None = None
    """`[B, T]`, zero at padding; None where all tokens are real."""
    documents: Documents | None = None
    """Where the documents of packed rows lie."""
    positions: CachePosition | None = None
    """Where the pass stands in a cache of fixed size."""
    fills: bool = False
    """Whether the pass fills a cache of fixed size from its first place on. Its queries see each other alone, so
    attention reads the filled places as it reads whole sequences."""


def padding_mask(
    *, q_length: int, kv_length: int | Tensor, q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0,
    mask_function: Any, attention_mask: Tensor | None = None, batch_size: int = 1, device: Any = None,
    local_size: int | None = None, config: Any = None, use_vmap: bool = False, **_: Any,
) -> PassMask | None:  # fmt: skip
    """Return which tokens those of a pass see, as transformers asks for each kind of layer; None for all before them.

    Raises UnsupportedError for masks that frozen heads cannot follow, InputError for padding between real tokens.
    """
    kinds = getattr(config, "layer_types", None) or [_SLIDING]
    if local_size is not None and _SLIDING not in kinds:
        return None  # Gemma makes this mask, and no layer takes it
    if isinstance(kv_length, Tensor) or isinstance(kv_offset, Tensor):  # transformers 5.17, of a growing window
        kv_length, q_offset, kv_offset = int(kv_length), int(q_offset), int(kv_offset)
    # The length of a cache of fixed size is a tensor once it is in use.
    fixed = isinstance(q_offset, Tensor) or (
        q_offset == 0 and kv_length > q_length and (attention_mask is None or attention_mask.shape[1] == q_length)
    )
    if not fixed and kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError(
            "with frozen heads the keys must end where the tokens end: give an attention_mask as long as the input"
        )
    # While compiling, transformers takes any row for several documents; `attend` checks positions and windows then.
    plain = mask_function is causal_mask_function or torch.compiler.is_compiling()
    alone = attention_mask is None and kv_length == q_length
    if use_vmap or not getattr(config, "is_causal", True) or not (plain or alone or local_size is not None):
        raise UnsupportedError(f"frozen heads take causal masks, and packed documents without cache: {_OWN_ROWS}")
    if alone and not plain:
        documents = Documents.of(mask_function, batch_size, q_length, torch.device(device or "cpu"))
        _check_length(q_length if documents is None else documents.longest, config)
        if documents is None or documents.longest <= (local_size or inf):
            return None if documents is None else PassMask(documents=documents)
        raise UnsupportedError(f"packed documents must fit the sliding window, {local_size} tokens: {_OWN_ROWS}")
    _check_length(kv_length if fixed else q_offset + q_length, config)
    if fixed:
        return _in_fixed_cache(q_length, kv_length, q_offset, attention_mask)
    if attention_mask is None:
        return None
    if (last := kv_offset + kv_length) > attention_mask.shape[-1]:
        raise InputError(f"attention_mask must cover cached tokens too, {last}, got {attention_mask.shape[-1]}")
    padding = _if_padded(attention_mask[:, kv_offset:last])  # it may cover tokens to come
    return None if padding is None else PassMask(padding)


def _check_length(length: Any, config: Any) -> None:
    """Raise InputError for more positions than the patterns cover, before the first layer: a cache stays as it was."""
    longest = (getattr(config, "saf", None) or {}).get("max_length")
    if longest is not None and length > longest:
        raise InputError(beyond_patterns(length, longest))


def _if_padded(attention_mask: Tensor) -> Tensor | None:
    """Return a mask `[B, T]` where it has padding on the left, else None. It waits for the device, once a pass."""
    return None if left_padding(attention_mask, allow_empty=True) is None else attention_mask


def _in_fixed_cache(q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None) -> PassMask:
    """Return what the queries of a pass see in a cache of fixed size with `kv_length` places."""
    if not isinstance(q_offset, Tensor):
        return PassMask(None if attention_mask is None else _if_padded(attention_mask), fills=True)
    start = None if attention_mask is None else left_padding(attention_mask, wait=False, allow_empty=True)
    # The cache counts on in the tensor that holds its length.
    return PassMask(positions=CachePosition.of(q_offset.clone(), q_length, kv_length, start))


def mask_for_generation(*, attention_mask: Tensor | None, past_key_values: Any, **_: Any) -> Tensor | None:
    """Return the mask `[B, T]` of a step of `generate`, where transformers would make one of all pairs.

    It is padded to the places of a cache of fixed size that is in use: compiled code needs one shape in every step.
    """
    if attention_mask is None or not isinstance(past_key_values.get_seq_length(), Tensor):
        return attention_mask
    places = past_key_values.get_mask_sizes(attention_mask.shape[1], 0)[0]
    return F.pad(attention_mask, (0, places - attention_mask.shape[1]))


def check_positions(seen: PassMask, position_ids: Tensor | None, cu_seq_lens: Tensor | None, rows: int) -> None:
    """Raise UnsupportedError for packed documents where each row is taken for one sequence.

    With a mask or a cache transformers takes it so, and its documents see each other. The positions of real tokens
    must count up by one; in compiled code the device raises a RuntimeError instead, and CUDA graphs go unchecked.
    """
    if cu_seq_lens is not None and len(cu_seq_lens) > rows + 1:
        raise UnsupportedError(f"frozen heads know packed documents by position_ids, not cu_seq_lens_q: {_OWN_ROWS}")
    compiling = torch.compiler.is_compiling()
    if position_ids is None or position_ids.shape[-1] < 2 or (not compiling and is_capturing(position_ids.device)):
        return
    steps = position_ids.diff(dim=-1)
    counts = steps == 1
    real = seen.padding if seen.positions is None else seen.positions.real
    if real is not None:
        real = real[:, -position_ids.shape[-1] :].bool()
        counts = counts | ~(real[:, 1:] & real[:, :-1])
    elif not compiling:
        # Padding on the right, which no mask shows here, has one position throughout; a document goes on counting.
        counts = counts.cumprod(-1)[:, :-1].bool() | (steps[:, 1:] == 0)
    if compiling:
        device_assert(counts.all(), f"with frozen heads compiled code attends to one sequence a row: {_OWN_ROWS}")
    elif not counts.all():
        raise UnsupportedError(
            "packed documents (position_ids that start again) take no attention_mask and no cache: leave the mask out "
            f"and pass use_cache=False, or {_OWN_ROWS}"
        )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding_mask)
