"""The attention function that models of transformers call once heads of theirs are frozen."""

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters.site import Sink
from saf.errors import UnsupportedError
from saf.heads import HeadLayout
from saf.models.gpt import left_padding
from saf.ops import FrozenHeads, live_attention, mixed_attention

NAME = "saf"


class HeadState(nn.Module):
    """Which heads of one attention layer are frozen, and what is known of them."""

    def __init__(self, layout: HeadLayout):
        super().__init__()
        self.layout = layout
        self.frozen: FrozenHeads | None = None
        self.removed: dict[int, dict[str, Tensor]] = {}
        self.sinks: OrderedDict[int, Sink] = OrderedDict()
        self.kernel = "auto"
        """SDPA kernel of live heads, see `mixed_attention`."""


@cache
def register() -> None:
    """Make the function known to transformers under `NAME`, with masks that tell of padding alone."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with live and frozen heads in slot order, as transformers calls it.

    `query [B, L, Tq, D]` of the live heads, `key` and `value` of every KV head kept, `[B, K, T, D]`, cached ones first;
    `attention_mask [B, T]` is True for real tokens. Returns `[B, Tq, H, D]`.

    Raises:
        UnsupportedError: Dropout of attention weights, or a window shorter than the sequence.
        InputError: Padding that is not on the left, inputs longer than the patterns.
    """
    state: HeadState = module.saf
    if dropout:
        raise UnsupportedError(f"frozen heads have no attention dropout; set config.attention_dropout to 0 ({dropout})")
    if sliding_window is not None and key.shape[-2] > sliding_window:
        raise UnsupportedError(f"{key.shape[-2]} positions exceed the sliding window of {sliding_window}")
    for sink in state.sinks.values():
        sink(query, key)
    start = None if attention_mask is None else left_padding(attention_mask)
    if state.frozen is None:
        output = live_attention(query, key, value, scale=scaling, start=start, kernel=state.kernel)
    else:
        used = sorted(set(state.layout.kv_head[: state.layout.num_live])) if state.layout.grouped else None
        if used is not None and len(used) < key.shape[1]:
            key = torch.index_select(key, 1, torch.tensor(used, device=key.device))
        output = mixed_attention(query, key, value, state.frozen, scale=scaling, start=start, kernel=state.kernel)
    return output.transpose(1, 2), None
