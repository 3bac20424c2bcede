"""The entrance of a decoder of transformers with frozen heads: what is too long is refused there, not layers later.

Layers before the first one with frozen heads compute nothing then, and a cache holds what it held.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters.transformers.mask import check_one_sequence_a_row, longest_document
from saf.errors import InputError
from saf.ops.frozen_heads import FrozenHeads, beyond_patterns


def covered(model: nn.Module) -> int | None:
    """Return how many positions the patterns of all frozen heads cover; None where no head is frozen."""
    return min((heads.max_length for heads in model.modules() if isinstance(heads, FrozenHeads)), default=None)


def watch_entrance(decoder: Any) -> None:
    """Let a decoder refuse what is longer than the patterns of some layer; what it refused before is forgotten."""
    for number, hook in list(decoder._forward_pre_hooks.items()):
        if isinstance(hook, partial) and hook.func is check_length:
            del decoder._forward_pre_hooks[number]
            decoder._forward_pre_hooks_with_kwargs.pop(number, None)
    if (longest := covered(decoder)) is not None:
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        decoder.register_forward_pre_hook(partial(check_length, longest, names), with_kwargs=True)


def check_length(
    longest: int, names: tuple[str, ...], _: Any, positional: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise InputError for a pass, or a cache of fixed size, of more positions than the `longest` that patterns cover.

    Cached tokens count, and so does padding; of packed documents the longest one does, which is looked for in rows that
    are too long alone: it waits for the device. Positions that such rows may not have raise as they do in attention.
    """
    given = dict(zip(names, positional, strict=False)) | options
    cache, past = given.get("past_key_values"), 0
    if cache is not None:
        layers = getattr(cache, "layers", ())
        places = getattr(layers[0], "max_cache_len", 0) if layers else 0
        if places > longest:
            raise InputError(
                f"the cache of fixed size has {places} places, the frozen heads' patterns cover {longest}: make it "
                f"with max_cache_len={longest} at most, or calibrate and freeze at the longer length"
            )
        past = cache.get_seq_length()
    rows = given.get("input_ids")
    rows = given.get("inputs_embeds") if rows is None else rows
    # Only a cache of fixed size, whose places were counted, tells its length by a tensor.
    if rows is None or isinstance(past, Tensor) or rows.shape[1] + past <= longest:
        return
    length = rows.shape[1] + past
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None and not torch.compiler.is_compiling():
        if mask is None and cache is None:
            length = longest_document(positions)
        elif mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            check_one_sequence_a_row(positions, mask, length)
    if length > longest:
        raise InputError(beyond_patterns(length, longest))
