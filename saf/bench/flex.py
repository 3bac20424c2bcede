"""PyTorch's flex attention as a baseline for live heads."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from saf.errors import UnsupportedError
from saf.ops import FrozenHeads, frozen_attention
from saf.ops.layer import project_parts

FLEX = "flex"
BLOCK = 128


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Return the causal block mask of `length` positions.

    PyTorch's own builder would fill a matrix of length x length first. Blocks on the diagonal are masked, blocks
    below it are whole.
    """
    count = -(-length // BLOCK)
    row = torch.arange(count, dtype=torch.int32, device=device)
    diagonal = row[:, None].expand(count, count).contiguous()[None, None]
    below = row[None].expand(count, count).contiguous()[None, None]
    return BlockMask.from_kv_blocks(
        torch.ones_like(row)[None, None],
        diagonal,
        row[None, None].clone(),
        below,
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
        seq_lengths=(length, length),
    )


class FlexAttention(nn.Module):
    """Stands in for the model's live attention; runs as a kernel only where it is compiled."""

    def __init__(self, blocks: BlockMask):
        super().__init__()
        self.kernel = FLEX
        self.blocks = blocks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        start: Tensor | None,
        frozen: FrozenHeads | None,
        projection: Tensor | None = None,
    ) -> Tensor:
        """Attend causally over the length of `blocks`, with the arguments and results of `LiveAttention`."""
        if start is not None:
            raise UnsupportedError("the flex baseline takes no padding")
        if frozen is not None and projection is not None:
            live = self.forward(query, key, value[:, : query.shape[1]], None, None)
            return project_parts((live, frozen_attention(value, frozen)), projection.to(value.dtype))
        grouped = query.shape[1] != key.shape[1]
        output = flex_attention(query, key, value, block_mask=self.blocks, enable_gqa=grouped)
        assert isinstance(output, Tensor)
        return output
