"""What attention is told of a pass of a model of transformers: padding, documents, places in a cache of fixed size.

`padding_mask` tells it where transformers asks for a mask; what that cannot see, positions that start again beside a
mask or a cache, `check_one_sequence_a_row` refuses.
"""

from typing import Any

import torch
from torch import Tensor

from saf.adapters.documents import Documents, documents_told
from saf.adapters.transformers.cache import NO_WINDOWS, Beginning, fills_fixed, fixed_places, left_padded
from saf.errors import InputError, UnsupportedError
from saf.ops.operator import is_capturing
from saf.ops.positions import CachePosition, assert_later, left_padding

Mask = Tensor | Documents | CachePosition | Beginning | None
"""What attention is told of a pass: padding, documents, where queries stand in a cache of fixed size; or nothing."""
_APART = "give every sequence a row of its own, padded at its ends"
_COMPILED = "with frozen heads compiled code attends to one sequence a row"


def padding_mask(
    *,
    q_length: int,
    kv_length: int | Tensor,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Mask:
    """Return which tokens are real, `[B, T]`, or None where all are, as transformers asks for it.

    Of packed documents it returns these, with a cache of fixed size where in it the queries stand. Raises
    UnsupportedError for what frozen heads would not see: keys beyond the tokens seen so far, attention that is not
    causal within each document; for documents longer than a layer's window; and for windows in a cache of fixed size.
    Raises InputError for padding between real tokens.
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(kv_length, Tensor) or isinstance(kv_offset, Tensor):
        # So transformers 5.17 counts in a growing window that was cut back; one of fixed size has numbers of places.
        kv_length, q_offset, kv_offset = int(kv_length), int(q_offset), int(kv_offset)
    fixed = fills_fixed(q_length, kv_length, q_offset, attention_mask)
    if fixed and rest.get("local_size") is not None:
        raise UnsupportedError(NO_WINDOWS)
    if not fixed and kv_offset + kv_length != q_offset + q_length:
        # More keys than tokens are those of a cache of fixed size that prompts in chunks begin to fill.
        more = kv_offset + kv_length > q_offset + q_length
        windows = f"; and {NO_WINDOWS}" if more and window_of(rest.get("config")) else ""
        raise UnsupportedError(
            "with frozen heads the keys must end where the tokens end: give an attention_mask as long as the input"
            + windows
        )
    # While compiling, transformers takes any row for several documents; that and windows are for `attend` to check.
    plain = mask_function is causal_mask_function or torch.compiler.is_compiling()
    window = rest.get("local_size") is not None
    if not plain and attention_mask is None and kv_length == q_length:
        device = torch.device(rest.get("device") or "cpu")
        documents = Documents.of(mask_function, rest["batch_size"], q_length, device)
        if documents is not None:
            return None if documents.whole else documents
        _check_window(mask_function, q_length, **rest)
    if not (plain or window):
        raise UnsupportedError(
            "with frozen heads attention is causal, within each document that position_ids tell of; another mask "
            f"cannot be followed: leave it out, and {_APART}"
        )
    if fixed:
        return fixed_places(q_length, kv_length, q_offset, attention_mask)
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] < kv_offset + kv_length and q_length < kv_length:
        raise InputError(
            f"attention_mask tells of {attention_mask.shape[-1]} tokens, and with those of the cache there are "
            f"{kv_offset + kv_length}: give it for all of them"
        )
    mask = attention_mask[:, kv_offset : kv_offset + kv_length]  # as transformers: it may tell of tokens to come
    return left_padded(mask)


def _check_window(
    mask_function: Any,
    length: int,
    *,
    batch_size: int,
    device: Any = None,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> None:
    """Raise UnsupportedError where a mask is of packed documents longer than the window of layers."""
    if local_size is None or local_size != window_of(config):
        return
    documents = Documents.of(mask_function, batch_size, length, torch.device(device or "cpu"), window=local_size)
    if documents is not None:
        raise UnsupportedError(beyond_window(documents.longest, local_size))


def check_padding(attention_mask: Tensor) -> None:
    """Raise UnsupportedError for a mask that is none of padding, `[B, T]`, InputError for padding between real tokens.

    It waits for the device.
    """
    if attention_mask.dim() != 2:
        raise UnsupportedError(no_padding(list(attention_mask.shape)))
    left_padding(attention_mask)


def no_padding(got: Any) -> str:
    """Say that a mask, of which `got` tells, is none of padding."""
    return f"frozen heads know no mask but of padding, [B, T]; got {got}, leave it out"


def window_of(config: Any) -> int | None:
    """Return the sliding window that layers of a configuration's model attend within; None where none has one."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if kinds is None or "sliding_attention" in kinds else None


def beyond_window(longest: int, window: int) -> str:
    """Say that packed documents are longer than the window of layers."""
    return (
        f"packed documents of up to {longest} tokens exceed the sliding window of {window} that layers of this model "
        f"attend within, and with frozen or pruned heads it takes packed documents up to the window: cut them to "
        f"{window} tokens, or {_APART}"
    )


def check_documents(position_ids: Tensor, window: int) -> None:
    """Raise UnsupportedError where positions `[B, T]` tell of packed documents longer than the window of layers.

    It waits for the device.
    """
    longest = longest_document(position_ids)
    if longest > window and (position_ids.diff(dim=-1) != 1).any():
        raise UnsupportedError(beyond_window(longest, window))


def check_begins(begins: Tensor | None, rows: Tensor) -> None:
    """Raise UnsupportedError for documents, in `rows [B, ...]`, of which nothing but where they begin tells.

    `begins` is `cu_seq_lens_q` of flash attention, or None. Padding behind documents, counted there, is one of them:
    that attention takes it for one, too. Compiled code and CUDA graphs, which cannot look, count those without a token.
    """
    if begins is None or len(begins) <= len(rows) + 1:
        return
    unseen = torch.compiler.is_compiling() or is_capturing(rows.device)
    if (told := len(begins) - 1 if unseen else documents_told(begins)) > len(rows):
        raise UnsupportedError(
            f"cu_seq_lens_q tells of {told} documents, padding among them if it is counted there; frozen heads know "
            "documents by position_ids that start again: give these, too (return_position_ids=True of a collator), or "
            f"{_APART}. Beside an attention_mask of padding leave it out"
        )


def longest_document(position_ids: Tensor) -> int:
    """Return the tokens of the longest document that positions `[B, T]` tell of; it waits for the device."""
    document = torch.nn.functional.pad((position_ids.diff(dim=-1) != 1).cumsum(-1), (1, 0))
    return max(int(row.bincount().max()) for row in document)


def check_one_sequence_a_row(
    position_ids: Tensor, attention_mask: Tensor | None, length: int, *, compiled: bool = False
) -> None:
    """Raise UnsupportedError where positions of real tokens do not count up by one; `length` is with cached tokens.

    In compiled code the device raises instead, a RuntimeError; asked in front of code that is `compiled` the host does.
    What CUDA graphs capture goes unchecked, as do the single tokens of decoding.
    """
    compiling = torch.compiler.is_compiling()
    if position_ids.shape[-1] < 2 or (not compiling and is_capturing(position_ids.device)):
        return
    steps = position_ids.diff(dim=-1)
    counts = steps == 1
    if attention_mask is not None:
        # As transformers: it may tell of tokens to come, and those it leaves out are padding.
        real = torch.nn.functional.pad(attention_mask.bool(), (0, length - attention_mask.shape[-1]))
        real = real[:, length - 1 - counts.shape[-1] :]
        counts = counts | ~(real[:, 1:] & real[:, :-1])
    elif not (compiling or compiled):
        # Padding on the right is not told of here. It has one position throughout; a document goes on counting.
        counts = counts.cumprod(-1)[:, :-1].bool() | (steps[:, 1:] == 0)
    if compiling:
        assert_later(counts.all(), f"{_COMPILED}: {_APART}")
    elif not counts.all() and compiled:
        raise UnsupportedError(
            "position_ids start again within a row, or leave places out, which tells of packed documents, and "
            f"{_COMPILED}: leave torch_compile out, or {_APART}"
        )
    elif not counts.all():
        raise UnsupportedError(
            "position_ids start again within a row, or leave places out, which tells of packed documents where neither "
            f"attention_mask nor a cache is given: leave attention_mask out and pass use_cache=False (in a Trainer it "
            f"is model.config.use_cache), or {_APART}"
        )
