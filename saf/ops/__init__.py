"""The seam: how a layer with live and frozen heads is computed, one function, several backends."""

from saf.ops.attention import frozen_attention, mixed_attention, split_attention
from saf.ops.backends import BACKENDS, choose_backend, explain
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.live import live_attention
from saf.ops.trainable_pattern import TrainablePattern

__all__ = [
    "BACKENDS",
    "FrozenHeads",
    "TrainablePattern",
    "choose_backend",
    "explain",
    "frozen_attention",
    "live_attention",
    "mixed_attention",
    "split_attention",
]
