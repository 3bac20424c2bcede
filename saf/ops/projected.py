"""`projected_attention`: live and frozen heads and their output product, in the fastest order."""

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.ops.attention import mixed_attention, split_attention
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.slots import flat_heads
from saf.ops.whole_layer import in_one_launch, infer_layer

JOINED = 8192 * 768
"""Size B x T x H * D up to which training joins live and frozen heads before the product.

One product and a copy then cost less than two products, whose launches outweigh their work (docs/log.md).
"""


def projected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads,
    projection: Tensor,
    *,
    start: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """`mixed_attention` of a layer with live and frozen heads, and the product with `projection [C, H * D]`.

    Of many tokens live and frozen heads are projected by a product each: nothing is copied together then, and
    attention's backward pass sees a gradient in the memory order of its output. Returns `[B, Tq, C]` in the dtype of
    `value`; raises as `mixed_attention` does.
    """
    projection = projection.to(value.dtype)  # once: autocast would cast the columns of either part by themselves
    done = infer_layer(query, key, value, frozen, start=start, kernel=kernel, projection=projection)
    if done is not None:
        return done
    heads, length, dim = query.shape[1] + frozen.num_frozen, *query.shape[2:]
    joined = torch.is_grad_enabled() and value.shape[0] * heads * length * dim <= JOINED
    if joined or in_one_launch(query, frozen):
        return F.linear(flat_heads(mixed_attention(query, key, value, frozen, start=start, kernel=kernel)), projection)
    live, mixed = split_attention(query, key, value, frozen, start=start, kernel=kernel)
    parts = [part for part in (live, mixed) if part is not None]
    columns = projection.split([part.shape[1] * dim for part in parts], dim=1)
    products = [F.linear(flat_heads(part), own) for part, own in zip(parts, columns, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]
