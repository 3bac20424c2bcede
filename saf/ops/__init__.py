"""The operators of layers with live and frozen heads: one dispatch, several backends.

    attention      checks a call and decides how it is computed: begin here
    frozen_heads   a layer's patterns, as its backend prepared them; the rule of backend "auto"
    backend        what a backend must offer; single rows of P V in PyTorch
    toeplitz/      backend of compact and dense patterns, the default
    linear/        backend of exponential patterns, in linear time
    fused/         backend with the paper's execution
    reference      backend that is the oracle of the others
    decode/        few queries after a cache, live and frozen heads in one launch
    live           ordinary attention
    decoder        the loss and GELU

In each folder `op.py` registers the operators and has their tables. `kernels.py` imports Triton, and is imported by the
first call that runs a kernel. Names that kernels share are in `launch`.

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
