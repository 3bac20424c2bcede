"""The seam: how a layer with live and frozen heads is computed, one function, several backends.

`attention` hands live heads to `live` and `flash`, frozen ones to `frozen`, or all to a backend (`whole_layer`), and
`projected` adds the output product; `value_heads` says which values each reads, `frozen_heads` holds the patterns.
`backends` lists what mixes: `reference`, `fused` (its operator in `fused_operator`, what it reads in `fused_tables`)
and `toeplitz`, whose product is registered in `toeplitz_operator`, runs with live heads behind one boundary in
`inference` (in one launch where `few_tokens` says so) and trains in `pattern_gradient`. `gelu` and `softmax_gradient`
serve the decoder around them. The kernels of each are in `triton`, in files of the same names.
"""

from saf.ops.backends import BACKENDS, choose_backend, explain
from saf.ops.frozen_heads import FrozenHeads, for_graphs
from saf.ops.layer import frozen_attention, mixed_attention, projected_attention, split_attention
from saf.ops.live import live_attention
from saf.patterns import TrainablePattern

__all__ = [
    "BACKENDS",
    "FrozenHeads",
    "TrainablePattern",
    "choose_backend",
    "explain",
    "for_graphs",
    "frozen_attention",
    "live_attention",
    "mixed_attention",
    "projected_attention",
    "split_attention",
]
