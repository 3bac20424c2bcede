"""Attention layers of transformers' models with frozen or pruned heads: forward pass, attention function and masks.

A layer with edited heads has a submodule `saf`, its `HeadState` (saf/hf/adapter.py), and runs `edited_forward` in place
of its class's forward pass. All layers of the model then call `attend`, which is registered with transformers as "saf",
and get their masks from `padding_mask`. Packed documents (`position_ids` that restart) are split into one row each
before attention.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from saf.errors import InputError, UnsupportedError, shown
from saf.heads import roles_of
from saf.hf.cache import fit_cache
from saf.ops import frozen_attention, live_attention, mixed_attention
from saf.ops.frozen_heads import beyond_patterns
from saf.ops.linear import RecurrentState
from saf.ops.tensors import CachePosition, cached_order, device_assert, first_real_position, join_heads, left_padding

NAME = "saf"
"""The name of `attend` and `padding_mask` in transformers' registries, and of a layer's submodule with its state."""
_UNDER_HOOKS = "_old_forward"
"""The attribute in which accelerate stores the forward pass that its hooks wrap."""
_SLIDING = "sliding_attention"
_SEPARATE_ROWS = "pad each document in a row of its own"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: "PassMask | None",
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    output_attentions: bool = False, position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    recurrent: RecurrentState | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention of live and frozen heads, `[B, Tq, H, D]` in slot order: an attention function of transformers.

    `query [B, L, Tq, D]` has the live heads, `key [B, K, T, D]` and `value [B, V, T, D]` the stored KV heads, cached
    tokens first. `attention_mask` is the result of `padding_mask`; `position_ids` are `[B or 1, Tq]`. `recurrent` is
    the state of exponential patterns, where the cache has one.

    Raises UnsupportedError for `output_attentions`, masks of query-key pairs, and inputs beyond the sliding window
    where heads are frozen or measured; InputError for inputs longer than the patterns.
    """
    state = state_of(module)  # None in other models built from the same config, which names this function
    if output_attentions:
        raise UnsupportedError("frozen heads have no attention weights to return; leave output_attentions out")
    mask = PassMask() if attention_mask is None else attention_mask
    if not isinstance(mask, PassMask):  # transformers hands masks [B, 1, Tq, T] to the layers as they are
        raise UnsupportedError(
            f"attention_mask must mark padding, [B, T], got {shown(attention_mask)}: leave it out, or "
            f"set_attn_implementation({NAME!r})"
        )
    if mask.prefill:  # layers without edited heads hand over the whole cache, others the new tokens alone
        key, value = key[:, :, : query.shape[-2]], value[:, :, : query.shape[-2]]
    length = value.shape[-2] if mask.documents is None else mask.documents.longest
    # Live heads apply the window themselves; patterns and statistics are of whole causal rows.
    beyond_window = sliding_window is not None and length > sliding_window
    if beyond_window and state is not None and (state.frozen is not None or state.receivers):
        raise UnsupportedError(f"inputs must fit the sliding window, {sliding_window} tokens, got {length}")
    if state is not None:
        for receiver in state.receivers:
            receiver(query, key)
    if mask.documents is None and module.layer_idx == 0:  # once a pass, as it may synchronise with the device
        check_positions(mask, position_ids, cu_seq_lens_q, len(value))
    left_pad = None if mask.padding is None else first_real_position(mask.padding)
    visible = None if mask.positions is None else mask.positions.visible
    live = {"left_pad": left_pad, "scale": scaling, "visible": visible, "window": sliding_window, "soft_cap": softcap}
    frozen = {"left_pad": left_pad, "cache_position": mask.positions, "state": recurrent}
    attend_rows = partial(_attend_rows, state, live, frozen)
    if mask.documents is not None:
        attend_rows = partial(mask.documents.attend, attend_rows)
    return attend_rows(query, key, value).transpose(1, 2), None


def _attend_rows(
    state: Any, live: dict[str, Any], frozen: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return the attention output `[B, H, Tq, D]`, where each row of the batch is one sequence.

    `live` and `frozen` are the keyword arguments of `live_attention` and `frozen_attention`. `mixed_attention` takes
    neither a window nor a soft cap. Layers with frozen heads need no window: `attend` refuses inputs beyond it.
    """
    if state is None:
        return live_attention(query, key, value, **live)
    plain = state.layout.ordinary and live["window"] is None
    if live["soft_cap"] is None and (state.frozen is not None or plain):
        return mixed_attention(query, key, value, state.frozen, scale=live["scale"], kernel=state.kernel, **frozen)
    parts, layout = [], state.layout
    if layout.num_live:
        slots = layout.kv_head[: layout.num_live]
        if frozen["cache_position"] is not None or frozen["state"] is not None:
            slots = tuple(map(cached_order(layout.kv_head, layout.num_frozen).index, slots))
        parts.append(live_attention(query, key, value, live_kv=slots, kernel=state.kernel, **live))
    if state.frozen is not None:
        parts.append(frozen_attention(value, state.frozen, rows=query.shape[-2], **frozen))
    return join_heads(*parts) if parts else query  # [B, 0, Tq, D]: all heads are pruned


# --- layers with edited heads


def edited_forward(
    module: Any, rotate: Callable[..., tuple[Tensor, Tensor]] | None, hidden_states: Tensor, *,
    position_embeddings: tuple[Tensor, Tensor] | None = None, attention_mask: "PassMask | None" = None,
    past_key_values: Any = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the layer's output `[B, Tq, C]` as its class does, from the heads that its projections still have.

    `rotate` is `apply_rotary_pos_emb` of the model's file, None for models without rotary positions.
    """
    state, family = module.saf, module.saf.family
    query, key, value = _project(module, hidden_states)
    if state.layout.num_live and family.norms:
        query, key = module.q_norm(query), module.k_norm(key)
    if state.layout.num_live and rotate is not None and position_embeddings is not None:
        query, key = rotate(query, key, *position_embeddings)
    recurrent = None
    if past_key_values is not None:
        layer = fit_cache(past_key_values, module.layer_idx, state, value.device)
        cached = past_key_values.update(key, value, module.layer_idx)
        if layer is not None:
            recurrent = layer.take_state()
        # A prefill reads the new tokens alone, which a cache of fixed size returns with its values in another order.
        if recurrent is not None or not (isinstance(attention_mask, PassMask) and attention_mask.prefill):
            key, value = cached
    mixed, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.scaling,
        # Mistral and Phi-3 read the window from the configuration, other families set it on each layer.
        sliding_window=getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
        softcap=None if family.soft_cap is None else getattr(module, family.soft_cap),
        recurrent=recurrent,
        **rest,
    )
    projection = family.module(module, "output")
    if mixed.shape[2]:
        output = projection(mixed.flatten(2).contiguous())  # Conv1D calls `view` on its input
    else:  # Conv1D fails on inputs without channels, and clip_grad_norm_ on gradients without elements
        bias = projection.bias
        output = torch.zeros_like(hidden_states) if bias is None else bias.expand_as(hidden_states)
    return output if family.output_dropout is None else getattr(module, family.output_dropout)(output), None


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[B, *, Tq, D]`; without live heads queries and keys have no heads."""
    layout = module.saf.layout
    parts: dict[str, Tensor] = {}
    for name, attribute in module.saf.family.projections.items():
        roles = [] if name == "output" else roles_of(name)
        if "value" in roles or (roles and layout.num_live):
            counts = [len(layout.rows[role]) for role in roles]
            heads = getattr(module, attribute)(hidden_states).unflatten(-1, (sum(counts), module.head_dim))
            parts |= dict(zip(roles, heads.transpose(1, 2).split(counts, dim=1), strict=True))
    empty = parts["value"][:, :0]
    return parts.get("query", empty), parts.get("key", empty), parts["value"]


def state_of(attention: nn.Module) -> Any:
    """Return a layer's `HeadState`; None where no head is edited, no receiver listens and no kernel is pinned."""
    return getattr(attention, NAME, None)


def config_entry(config: Any) -> dict[str, Any]:
    """Return a configuration's entry `saf` about frozen and pruned heads; empty where no head is edited."""
    return getattr(config, "saf", None) or {}


def set_forward(attention: Any) -> None:
    """Set a layer's forward pass: `edited_forward` with edited heads, else its class's. Hooks of accelerate stay."""
    hooked = {"_hf_hook", _UNDER_HOOKS} <= vars(attention).keys()
    name = _UNDER_HOOKS if hooked else "forward"
    current = vars(attention).get(name)
    if not attention.saf.layout.ordinary:
        # Each file of transformers has its own: Helium rotates neighbouring channels, Phi-3 only some of them.
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        setattr(attention, name, partial(edited_forward, attention, rotate))
    elif isinstance(current, partial) and current.func is edited_forward:
        if hooked:  # the hooks call this attribute, so it must stay
            setattr(attention, name, MethodType(type(attention).forward, attention))
        else:
            del attention.forward


# --- masks: padding, packed documents, positions in a cache of fixed size


class Documents(NamedTuple):
    """Token indices of the packed documents in a batch `[B, T]`, grouped by length to limit padding."""

    groups: tuple[Tensor, ...]
    """Of each group of N documents `[N, L]`: indices into the flattened batch `[B * T]`, -1 at padding on the right."""
    length: int
    """T, tokens in a row of the batch."""
    longest: int
    """Tokens in the longest document."""

    @classmethod
    def of(cls, mask: Callable[..., Tensor], batch: int, length: int, device: torch.device) -> "Documents | None":
        """Return the documents that transformers' `mask(row, head, query, key)` separates; None for one a row.

        A document begins where a token does not see the token before it. Synchronises with the device.
        """
        row, position = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
        begins = torch.ones(batch, length, dtype=torch.bool, device=device)
        head = position.new_zeros(())  # any: the documents are the same for all heads
        begins[:, 1:] = ~mask(row, head, position[1:], position[:-1])
        first = begins.flatten().nonzero().flatten().tolist()
        if len(first) == batch:
            return None
        documents = torch.arange(batch * length, device=device).tensor_split(first[1:])
        groups: dict[int, list[Tensor]] = {}
        for each in documents:  # lengths in a group differ by at most a factor of two
            groups.setdefault((len(each) - 1).bit_length(), []).append(each)
        padded = (pad_sequence(group, batch_first=True, padding_value=-1) for group in groups.values())
        return cls(tuple(padded), length, max(map(len, documents)))

    def attend(self, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the output `[B, H, T, D]` of `attend(*inputs)`, where each document is a row of its own.

        `inputs` are `[B, *, T, D]`. Padding follows the documents, so causal attention never reads it.
        """
        flat = [each.transpose(1, 2).flatten(0, 1) for each in inputs]
        rows = [attend(*(each[index].transpose(1, 2) for each in flat)).transpose(1, 2) for index in self.groups]
        output = rows[0].new_empty(flat[0].shape[0], *rows[0].shape[2:])
        for index, part in zip(self.groups, rows, strict=True):
            output = output.index_put((index[index >= 0],), part[index >= 0])
        return output.unflatten(0, (-1, self.length)).transpose(1, 2)


class PassMask(NamedTuple):
    """What limits causal attention in one forward pass: padding, packed documents, or a cache of fixed size."""

    padding: Tensor | None = None
    """`[B, T]`, zero at padding; None without padding."""
    documents: Documents | None = None
    """The documents of packed rows; None for one sequence a row."""
    positions: CachePosition | None = None
    """Cache positions of the queries in a cache of fixed size that already holds tokens."""
    prefill: bool = False
    """Whether the pass writes the first tokens of a cache of fixed size. Attention then reads these tokens alone,
    without the cache's empty positions."""


def padding_mask(
    *, q_length: int, kv_length: int | Tensor, q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0,
    mask_function: Any, attention_mask: Tensor | None = None, batch_size: int = 1, device: Any = None,
    local_size: int | None = None, config: Any = None, use_vmap: bool = False, **_: Any,
) -> PassMask | None:  # fmt: skip
    """Return the mask of a forward pass for one kind of layer: a mask function of transformers. None is plain causal.

    Raises UnsupportedError for masks that frozen heads cannot apply, InputError for padding between real tokens.
    """
    kinds = getattr(config, "layer_types", None) or [_SLIDING]
    if local_size is not None and _SLIDING not in kinds:
        return None  # Gemma requests this mask without having such a layer
    if isinstance(kv_length, Tensor) or isinstance(kv_offset, Tensor):  # transformers 5.17, growing sliding cache
        kv_length, q_offset, kv_offset = int(kv_length), int(q_offset), int(kv_offset)
    # A cache of fixed size counts its tokens in a tensor once it holds any; an empty one is longer than the input.
    # Without a cache kv_length is that of a longer attention_mask, which is refused below.
    fixed = isinstance(q_offset, Tensor) or (
        q_offset == 0 and kv_length > q_length and (attention_mask is None or attention_mask.shape[1] == q_length)
    )
    if not fixed and kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError(
            "with frozen heads the keys must end where the tokens end: give an attention_mask as long as the input"
        )
    # Under torch.compile transformers always passes the mask function of packed rows; `attend` checks positions.
    plain = mask_function is causal_mask_function or torch.compiler.is_compiling()
    alone = attention_mask is None and kv_length == q_length
    # Other mask functions separate packed documents, without a cache, or are of a window, which `attend` applies.
    if use_vmap or not getattr(config, "is_causal", True) or not (plain or alone or local_size is not None):
        raise UnsupportedError(f"frozen heads take causal masks, and packed documents without cache: {_SEPARATE_ROWS}")
    if alone and not plain:  # packed documents
        documents = Documents.of(mask_function, batch_size, q_length, torch.device(device or "cpu"))
        longest = q_length if documents is None else documents.longest
        _check_length(longest, config)
        if documents is None:
            return None
        if local_size is not None and longest > local_size:
            raise UnsupportedError(
                f"packed documents must fit the sliding window, {local_size} tokens: {_SEPARATE_ROWS}"
            )
        return PassMask(documents=documents)
    _check_length(kv_length if fixed else q_offset + q_length, config)
    if isinstance(q_offset, Tensor):  # a later step with a cache of fixed size
        # Without waiting for the device, or steps of decoding could not be captured as a CUDA graph.
        pad = None if attention_mask is None else left_padding(attention_mask, wait=False, allow_empty=True)
        # Cloned: the cache increments this tensor in place.
        return PassMask(positions=CachePosition.of(q_offset.clone(), q_length, kv_length, pad))
    first, last = (0, q_length) if fixed else (kv_offset, kv_offset + kv_length)
    padding = _padding(attention_mask, first, last)
    return PassMask(padding, prefill=fixed) if fixed or padding is not None else None


def _check_length(length: Any, config: Any) -> None:
    """Raise InputError for more positions than the patterns cover, before any layer has changed the cache."""
    longest = config_entry(config).get("max_length")
    if longest is not None and length > longest:
        raise InputError(beyond_patterns(length, longest))


def _padding(attention_mask: Tensor | None, first: int, last: int) -> Tensor | None:
    """Return columns of a mask `[B, T]`, which may cover later tokens too; None without padding on the left."""
    if attention_mask is None:
        return None
    if last > attention_mask.shape[1]:
        raise InputError(f"attention_mask must cover cached tokens too, {last}, got {attention_mask.shape[1]}")
    mask = attention_mask[:, first:last]
    return None if left_padding(mask, allow_empty=True) is None else mask  # synchronises with the device


def mask_for_generation(*, attention_mask: Tensor | None, past_key_values: Any, **_: Any) -> Tensor | None:
    """Return the padding mask `[B, T]` of a step of `generate`, where transformers would build `[B, 1, Tq, T]`.

    For a cache of fixed size it is padded to the cache's length, so that compiled code sees one shape in every step.
    """
    if attention_mask is None or not isinstance(past_key_values.get_seq_length(), Tensor):
        return attention_mask
    length = past_key_values.get_mask_sizes(attention_mask.shape[1], 0)[0]
    return F.pad(attention_mask, (0, length - attention_mask.shape[1]))


def check_positions(mask: PassMask, position_ids: Tensor | None, cu_seq_lens: Tensor | None, rows: int) -> None:
    """Raise UnsupportedError for packed documents in a pass that treats each row as one sequence.

    transformers does so with a mask or a cache, and documents then attend to each other. Positions of real tokens must
    increase by one. Compiled code raises a RuntimeError on the device instead; a CUDA graph capture is not checked.
    """
    if cu_seq_lens is not None and len(cu_seq_lens) > rows + 1:
        raise UnsupportedError(
            f"frozen heads know packed documents by position_ids, not cu_seq_lens_q: {_SEPARATE_ROWS}"
        )
    compiling = torch.compiler.is_compiling()
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    if not compiling and position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # the test below waits for the device
    steps = position_ids.diff(dim=-1)
    valid = steps == 1
    real = mask.padding if mask.positions is None else mask.positions.real
    if real is not None:
        real = real[:, -position_ids.shape[-1] :].bool()
        valid = valid | ~(real[:, 1:] & real[:, :-1])
    elif not compiling:
        # Padding on the right is not in the mask: after the first step that is not 1, one position may repeat to the
        # end of the row. Positions of another document would increase.
        valid = valid.cumprod(-1)[:, :-1].bool() | (steps[:, 1:] == 0)
    if compiling:
        device_assert(valid.all(), f"with frozen heads compiled code attends to one sequence a row: {_SEPARATE_ROWS}")
    elif not valid.all():
        raise UnsupportedError(
            "packed documents (position_ids that start again) take no attention_mask and no cache: leave the mask out "
            f"and pass use_cache=False, or {_SEPARATE_ROWS}"
        )


# Registering changes nothing for other models: only configurations that name "saf" look it up.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding_mask)
