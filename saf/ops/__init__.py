"""The operators of layers with live and frozen heads: one dispatch, several backends.

`attention` checks a call and decides how it is computed; `frozen_heads` holds a layer's patterns as a backend prepared
them; `backend` is what a backend must offer. A folder each: `toeplitz`, the default; `linear`, exponential patterns;
`fused`, the paper's execution; `decode`, few queries after a cache. In each, `op.py` registers the operators and has
their tables; `kernels.py` imports Triton, and the first call that runs a kernel imports it. `reference` is the oracle,
`live` ordinary attention, `decoder` the loss and GELU.

The gradient of frozen heads to values is dV = P^T dO: `value_gradient` in toeplitz/op.py and linear/op.py,
`operand_gradients` in fused/op.py, `logit_gradients` in toeplitz/op.py where patterns are trained (by
`pattern_gradient`), autograd's own in `reference` and for stored matrices (`dense_product`).
"""

from saf.ops.attention import (
    attention_parts,
    attention_products,
    frozen_attention,
    live_heads,
    mixed_attention,
    summed,
)
from saf.ops.frozen_heads import BACKENDS, FrozenHeads, choose_backend, explain, for_graphs
from saf.ops.live import live_attention

__all__ = [
    "BACKENDS",
    "FrozenHeads",
    "attention_parts",
    "attention_products",
    "choose_backend",
    "explain",
    "for_graphs",
    "frozen_attention",
    "live_attention",
    "live_heads",
    "mixed_attention",
    "summed",
]
