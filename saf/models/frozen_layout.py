"""`LayoutMixin` writes into a layer's state dict which heads are frozen, so that weights of other heads are refused."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError
from saf.heads import EDITED, KINDS, HeadLayout
from saf.ops import FrozenHeads
from saf.patterns import Pattern

# The name of the layout in a state dict, after the layer's prefix.
LAYOUT = "frozen_layout"


class LayoutMixin(nn.Module):
    """Write into the state dict which heads of an attention layer are frozen, by which patterns, and which are pruned.

    `frozen_layout [H, 2]`, int64, by original heads: the kind (its index in `KINDS`: 0 live, 1 frozen, 2 pruned), then
    a digest of a fixed pattern. It is None, and no key of the state dict, while all heads are live. `load_state_dict`
    raises CheckpointError for weights of this layer with another layout or without one, also with `strict=False`. Of
    the patterns only trainable ones, which are parameters, are in a state dict: `saf.save` writes all of them.
    """

    # Not a buffer: averaging or casting all buffers of a model would round the digests.
    frozen_layout: Tensor | None = None

    def set_layout(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Set `frozen_layout` for these heads."""
        self.frozen_layout = None
        if not layout.ordinary:
            rows = torch.zeros(layout.num_heads, 2, dtype=torch.int64)
            for number, kind in enumerate(KINDS):
                rows[list(getattr(layout, kind)), 0] = number
            for head, pattern in zip(layout.frozen, () if frozen is None else frozen.patterns, strict=True):
                rows[head, 1] = 0 if pattern.trainable else _digest(pattern)
            self.frozen_layout = rows

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.frozen_layout is not None:
            # A copy, because code that averages models writes into a state dict's tensors.
            destination[prefix + LAYOUT] = self.frozen_layout.clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Compare layouts before any weight of the layer is loaded; this model keeps its own."""
        if any(name.startswith(prefix) for name in state_dict):  # a state dict of other layers says nothing of this one
            compare_layouts(prefix.rstrip("."), self.frozen_layout, state_dict.get(prefix + LAYOUT))
        weights = {name: tensor for name, tensor in state_dict.items() if name != prefix + LAYOUT}
        super()._load_from_state_dict(weights, prefix, *rest)


def compare_layouts(layer: str, current: Tensor | None, stored: Tensor | None) -> None:
    """Raise CheckpointError unless a layer's `current` layout is the one `stored` with its weights."""
    if stored is not None and (stored.dtype != torch.int64 or stored.shape[1:] != (2,)):
        got = f"{stored.dtype} {list(stored.shape)}"
        raise CheckpointError(f"{layer}.{LAYOUT} must be int64 [heads, 2], got {got}: the file is damaged")
    here, there = ([] if each is None else each.tolist() for each in (current, stored))
    if here != there:
        heads = _describe(there) if _describe(there) != _describe(here) else "other patterns"
        raise CheckpointError(
            f"{layer}: the state dict has {heads}, this layer has {_describe(here)}; freeze or prune the same heads "
            "first, as saf.load does, or undo with saf.uninstall_"
        )


def _describe(rows: list[list[int]]) -> str:
    """Return "frozen heads [0, 1]", or "frozen heads none", and other edited heads the same way."""
    described = []
    for number, kind in enumerate(KINDS):
        heads = [head for head, row in enumerate(rows) if row[0] == number]
        if kind == "frozen" or (heads and kind in EDITED):
            described.append(f"{kind} heads {heads or 'none'}")
    return ", ".join(described)


def _digest(pattern: Pattern) -> int:
    """Return 63 bits of a hash of a pattern's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(pattern.state().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1  # the 64th bit is int64's sign
