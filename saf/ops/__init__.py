"""The operators of layers with live and frozen heads: one dispatch, several backends. Begin with `attention`.

    attention      checks a call and decides how it is computed
    frozen_heads   a layer's patterns, as its backend prepared them; the rule of backend "auto"; their layout on disk
    backend        what a backend must offer; single rows of P V in PyTorch; the reference, oracle of the others
    toeplitz/      backend of compact and dense patterns, the default
    linear/        backend of exponential patterns, in linear time
    fused/         backend with the paper's execution
    flash_decode/  few queries after a cache, live and frozen heads in one launch
    live           ordinary attention
    loss_and_gelu  what else of a model has kernels

In each folder `op.py` begins with the formula and what computes it in plain PyTorch, `kernels.py` has it in Triton, and
`op.py` ends with the registered operator, its gradient and the backend. The first call that runs a kernel imports
`kernels.py`. Names that kernels share are in `launch`.

The gradient of frozen heads to values is dV = P^T dO: `value_gradient` in toeplitz/op.py and linear/op.py,
`operand_gradients` in fused/op.py, `logit_gradients` in toeplitz/op.py where patterns are trained, autograd's own in
`Reference` and for stored matrices (`dense_product`).
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
