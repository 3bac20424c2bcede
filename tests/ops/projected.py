"""What a layer's projection makes of all its heads, its products added up as a model adds them."""

from torch import Tensor

from saf.ops import FrozenHeads, attention_products, summed


def projected_attention(query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads, projection: Tensor) -> Tensor:
    return summed(attention_products(query, key, value, frozen, projection))
