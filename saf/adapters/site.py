"""What calibration and surgery need to know of one attention layer, and of a model."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from saf.heads import HeadLayout, HeadSet
from saf.ops import FrozenHeads

Sink = Callable[[Tensor, Tensor], None]


class Site(Protocol):
    """One attention layer: its projections, by role, and its frozen heads.

    A projection is `(parameter, dimension)`: the dimension along which heads lie.
    """

    @property
    def layout(self) -> HeadLayout:
        """Order of the heads."""
        ...

    @property
    def frozen(self) -> FrozenHeads | None:
        """The frozen heads' tables."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        ...

    @property
    def removed(self) -> dict[int, dict[str, Tensor]]:
        """Rows taken out at freezing, by head, then by name; on the CPU."""
        ...

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters named `query`, `key`, `value`, `output`."""
        ...

    def check(self, layout: HeadLayout) -> None:
        """Raise UnsupportedError for a layout that this layer cannot execute."""
        ...

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Take another layout with its frozen heads, after the projections were rearranged to it."""
        ...

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name, see `live_attention`."""
        ...

    def capture(self, sink: Sink) -> torch.utils.hooks.RemovableHandle:
        """Call `sink(query, key)` with the rotated `[B, L, T, D]` and `[B, K, T, D]` of every forward pass."""
        ...


class Adapter(Protocol):
    """A model family: which models belong to it, and where their attention layers are."""

    family: str
    keep_live: int
    """Heads of every layer that cannot be frozen, whichever they are."""

    @classmethod
    def of(cls, model: nn.Module) -> "Adapter | None":
        """Return the adapter of a model of this family, None for any other model."""
        ...

    @property
    def max_length(self) -> int | None:
        """The longest input in tokens, None when the model sets no limit."""
        ...

    def sites(self) -> Sequence[Site]:
        """Return the attention layers in order."""
        ...

    def run(self, input_ids: Tensor) -> None:
        """Run the layers on `input_ids [B, T]`, without the output layer."""
        ...


def frozen_heads(adapter: Adapter) -> HeadSet:
    """Return the heads of a model that are frozen already."""
    return HeadSet((layer, head) for layer, site in enumerate(adapter.sites()) for head in site.layout.frozen)
