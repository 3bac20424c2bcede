"""The seam: how a layer with live and frozen heads is computed, one function, several backends.

`layer` checks what it is given, and `ways` decides which way it goes. They read `frozen_heads`, which hold patterns as
a backend prepared them; `backend` says what a backend is and `backends` holds them: `reference`, the oracle;
`toeplitz`, the default; `fused`, the paper's execution. They are made of operations, a folder each: `toeplitz`, the
product of whole sequences; `fused`, one launch of all heads; `rows`, a few rows; `inference`, a whole layer without
gradients, which chooses between the first two. `live` is the ordinary attention beside frozen heads, and `decoder`
holds what serves a model around its layers. What all of these share is in `heads`, `positions`, `operator` and
`launch`. Kernels lie beside what launches them; nothing here imports Triton before it runs one.
"""

from saf.ops.backends import BACKENDS, choose_backend, explain
from saf.ops.frozen_heads import FrozenHeads, for_graphs
from saf.ops.layer import attention_products, frozen_attention, mixed_attention, split_attention, summed
from saf.ops.live import live_attention
from saf.patterns import TrainablePattern

__all__ = [
    "BACKENDS",
    "FrozenHeads",
    "TrainablePattern",
    "attention_products",
    "choose_backend",
    "explain",
    "for_graphs",
    "frozen_attention",
    "live_attention",
    "mixed_attention",
    "split_attention",
    "summed",
]
