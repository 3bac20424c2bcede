"""`projected_attention`: live and frozen heads and their output product, in the fastest order."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.ops.attention import mixed_attention, split_attention
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.slots import flat_heads, join_heads
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

    Returns `[B, Tq, C]` in the dtype of `value`, or autocast's; raises as `mixed_attention` does.
    """
    projection = projection.to(value.dtype)  # once: autocast would cast the columns of either part by themselves
    options = {"start": start, "kernel": kernel}
    done = infer_layer(query, key, value, frozen, projection=projection, **options)
    if done is not None:
        return done
    if in_one_launch(query, frozen):
        return F.linear(flat_heads(mixed_attention(query, key, value, frozen, **options)), projection)
    parts = split_attention(query, key, value, frozen, **options)
    return project_parts([part for part in parts if part is not None], projection)


def project_parts(parts: Sequence[Tensor], projection: Tensor) -> Tensor:
    """Project heads that come in parts `[B, n, T, D]`, in slot order, by `projection [C, H * D]`: `[B, T, C]`.

    Of many tokens, and without gradients, each part by a product of its own: nothing is copied together then, and
    attention's backward pass sees a gradient in the memory order of its output.
    """
    if len(parts) == 2 and torch.is_grad_enabled() and sum(part.numel() for part in parts) <= JOINED:
        parts = [join_heads(*parts)]
    columns = projection.split([part.shape[1] * part.shape[-1] for part in parts], dim=1)
    products = [F.linear(flat_heads(part), own) for part, own in zip(parts, columns, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]
