"""Which heads of a layer are frozen or pruned, kept in its state dict, so that weights of other heads are refused."""

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError
from saf.heads import EDITED, KINDS, HeadLayout
from saf.patterns import Pattern

if TYPE_CHECKING:
    from saf.ops.frozen_heads import FrozenHeads

LAYOUT = "frozen_layout"
"""The name of the tensor in a state dict, after that of the layer."""


class LayoutMixin(nn.Module):
    """Keep in the state dict which heads of an attention layer are frozen, by which patterns, and which are pruned.

    `frozen_layout [H, 2]`, int64, by original heads: the kind (its index in `KINDS`: 0 live, 1 frozen, 2 pruned), then
    a digest of a fixed pattern. It is None, and no key of the state dict, while all heads are live. `load_state_dict`
    raises CheckpointError for weights of this layer with another layout or without one, also with `strict=False`. The
    patterns themselves are not in a state dict, but for trainable ones, which are parameters: `saf.save` writes them.
    """

    frozen_layout: Tensor | None = None
    """No buffer: averaging a model's buffers, or casting all of them, would round the digests."""

    def set_layout(self, layout: HeadLayout, frozen: "FrozenHeads | None") -> None:
        """Keep this layout from now on."""
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
            destination[prefix + LAYOUT] = self.frozen_layout.clone()  # averages are written into a state dict, too

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Compare before anything of the layer is loaded, where there is any; the layout of this model stays."""
        if any(name.startswith(prefix) for name in state_dict):
            compare_layouts(prefix.rstrip("."), self.frozen_layout, state_dict.get(prefix + LAYOUT))
        weights = {name: tensor for name, tensor in state_dict.items() if name != prefix + LAYOUT}
        super()._load_from_state_dict(weights, prefix, *rest)


def compare_layouts(layer: str, own: Tensor | None, stored: Tensor | None) -> None:
    """Raise CheckpointError unless a layer's layout, `own`, is the one `stored` with its weights."""
    if stored is not None and (stored.dtype != torch.int64 or stored.shape[1:] != (2,)):
        got = f"{stored.dtype} {list(stored.shape)}"
        raise CheckpointError(f"{layer}.{LAYOUT} must be int64 [heads, 2], got {got}: the file is damaged")
    here, there = ([] if each is None else each.tolist() for each in (own, stored))
    if here != there:
        heads = _listed(there) if _listed(there) != _listed(here) else "other patterns"
        raise CheckpointError(
            f"{layer}: the state dict has {heads}, this layer has {_listed(here)}; freeze or prune the same heads "
            "first, as saf.load does, or undo with saf.uninstall_"
        )


def _listed(rows: list[list[int]]) -> str:
    """Return "frozen heads [0, 1]" and those of other kinds, "frozen heads none" where there are not any."""
    by_kind = {kind: [head for head, row in enumerate(rows) if row[0] == n] for n, kind in enumerate(KINDS)}
    edited = {kind: heads for kind, heads in by_kind.items() if kind == "frozen" or (heads and kind in EDITED)}
    return ", ".join(f"{kind} heads {heads or 'none'}" for kind, heads in edited.items())


def _digest(pattern: Pattern) -> int:
    digest = hashlib.sha256()
    for name, tensor in sorted(pattern.state().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
