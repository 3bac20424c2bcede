"""The operators of layers with live and frozen heads: one dispatch, several backends. Begin with `attention`.

    attention      checks a call and decides how it is computed
    frozen_heads   a layer's patterns, as its backend prepared them; the rule of backend "auto"
    backend        how operators are registered; what a backend must offer; the reference, oracle of the others
    toeplitz       backend of compact and dense patterns, the default
    linear         backend of exponential patterns, in linear time
    fused          backend with the paper's execution
    flash_decode   few queries after a cache, live and frozen heads in one launch
    live           ordinary attention
    loss_and_gelu  what else of a model has kernels
    tensors        heads and positions of the tensors that all of these take

An operation begins with the formula and what computes it in plain PyTorch, and ends with the registered operator, its
gradient and the backend. Its Triton kernels are in the file NAME_kernels beside it. That knows nothing of its caller,
and the first call that runs a kernel imports it; what kernels share is in `launch`.

The gradient of frozen heads to values is dV = P^T dO: `value_gradient` in toeplitz and linear, `operand_gradients` in
fused, `logit_gradients` in toeplitz where patterns are trained, autograd's own in `Reference` and for stored matrices
(`dense_product`).
"""

from saf.ops.attention import (
    attention_parts,
    attention_products,
    frozen_attention,
    mixed_attention,
    summed,
)
from saf.ops.frozen_heads import BACKENDS, FrozenHeads, choose_backend, explain, for_graphs
from saf.ops.live import live_attention

__all__ = [
    "BACKENDS", "FrozenHeads", "attention_parts", "attention_products", "choose_backend", "explain", "for_graphs",
    "frozen_attention", "live_attention", "mixed_attention", "summed",
]  # fmt: skip
