"""Arms that are no way to train or serve: flex attention as a baseline, frozen heads that cost nothing as the bound."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from saf.bench.harness.arms import FLEX, FREE
from saf.errors import UnsupportedError
from saf.ops import BACKENDS, FrozenHeads, frozen_attention
from saf.ops.backend import Backend, Call, Tables
from saf.ops.heads import join_heads, take_heads
from saf.ops.inference.operator import two_launches
from saf.ops.layer import project_parts
from saf.ops.positions import Rows
from saf.patterns import Pattern

BLOCK = 128
"""Positions of a block of the mask, flex attention's default."""


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
    """Stand in for the model's live attention; runs as a kernel only where it is compiled."""

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
    ) -> tuple[Tensor, ...]:
        """Attend causally over the length of `blocks`, with the arguments and results of `LiveAttention`."""
        if start is not None:
            raise UnsupportedError("the flex baseline takes no padding")
        if frozen is not None and projection is not None:
            (live,) = self.forward(query, key, value[:, : query.shape[1]], None, None)
            return project_parts((live, frozen_attention(value, frozen)), projection.to(value.dtype))
        grouped = query.shape[1] != key.shape[1]
        output = flex_attention(query, key, value, block_mask=self.blocks, enable_gqa=grouped)
        assert isinstance(output, Tensor)
        return (output,)


class FreeBackend(Backend):
    """Return values unmixed: the bound of what freezing can save, in the place of a backend."""

    decodes = True
    infers = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None: nothing is computed, so nothing is in the way."""
        return None

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Say how this backend would run."""
        return "values pass through unmixed (a bound for measurements, not a model)"

    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return no tables."""
        return {}

    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return the last `rows` positions of `value [B, F, T, D]`, a view."""
        return value[:, :, value.shape[-2] - rows :]

    def can_infer(self, device: torch.device, dtype: torch.dtype, tables: Tables) -> bool:
        """Return whether a layer is called: compiled, the compiler leaves out the copies that a call needs."""
        return not torch.compiler.is_compiling()

    def infer(self, call: Call, tables: Tables) -> Tensor:
        """Return all heads of a layer, or what the call's projection makes of them, with the copies of `toeplitz`."""
        query, key = (one.to(call.value.dtype) for one in (call.query, call.key))
        slots, how = (call.live_slots, call.frozen_slots), (call.scale, call.kernel, call.projection)
        return two_launches(query, key, call.value, *slots, lambda x, out: out.copy_(x), *how)

    def forward_rows(
        self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Tensor | None
    ) -> Tensor:
        """Return live heads and the values at the rows themselves, `[B, L + F, rows.count, D]`."""
        at = torch.arange(rows.count, device=value.device) + rows.first
        own = take_heads(value.index_select(2, at), heads)
        return own if live is None else join_heads(live, own)


@contextmanager
def free_backend() -> Iterator[None]:
    """Make `FreeBackend` known as the backend "free" for the time of a measurement; "auto" never takes it."""
    before = BACKENDS.get(FREE)
    BACKENDS[FREE] = FreeBackend()
    try:
        yield
    finally:
        if before is None:
            del BACKENDS[FREE]
        else:
            BACKENDS[FREE] = before
