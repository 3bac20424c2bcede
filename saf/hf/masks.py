"""Masks of a pass of a model of transformers: padding, packed documents, positions in a cache of fixed size.

transformers asks `padding_mask` for the mask of each kind of layer. Packed documents (`position_ids` that start again)
attend in rows of their own, those of similar length together, so that live and frozen heads compute each as if alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.ops.frozen_heads import beyond_patterns
from saf.ops.operator import is_capturing
from saf.ops.positions import CachePosition, device_assert, left_padding

_SLIDING = "sliding_attention"
_OWN_ROWS = "pad each document in a row of its own"


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
        """Return the documents that transformers' `mask(row, head, query, key)` keeps apart; None for whole rows.

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
    *,
    q_length: int,
    kv_length: int | Tensor,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    device: Any = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> PassMask | None:
    """Return what the tokens of a pass see; None for all those before them.

    Raises UnsupportedError for masks that frozen heads cannot follow, InputError for padding between real tokens.
    """
    from transformers.masking_utils import causal_mask_function

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
    padding = _padded(attention_mask[:, kv_offset:last])  # it may cover tokens to come
    return None if padding is None else PassMask(padding)


def _check_length(length: Any, config: Any) -> None:
    """Raise InputError for more positions than the patterns cover, before the first layer: a cache stays as it was."""
    longest = (getattr(config, "saf", None) or {}).get("max_length")
    if longest is not None and length > longest:
        raise InputError(beyond_patterns(length, longest))


def _padded(attention_mask: Tensor) -> Tensor | None:
    """Return a mask `[B, T]` where it has padding on the left, else None. It waits for the device, once a pass."""
    return None if left_padding(attention_mask, allow_empty=True) is None else attention_mask


def _in_fixed_cache(q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None) -> PassMask:
    """Return what the queries of a pass see in a cache of fixed size with `kv_length` places."""
    if not isinstance(q_offset, Tensor):
        return PassMask(None if attention_mask is None else _padded(attention_mask), fills=True)
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

    Beside a mask or a cache transformers takes it so, and its documents see each other. The positions of real tokens
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
