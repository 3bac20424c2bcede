"""Which heads of a layer are frozen or pruned, told by its state dict: weights of others are refused by name."""

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError
from saf.heads import KINDS, HeadLayout
from saf.patterns import Pattern

if TYPE_CHECKING:  # heads are asked, not made, here
    from saf.ops.frozen_heads import FrozenHeads

LAYOUT = "frozen_layout"
"""The name of the tensor in a state dict, after that of the layer."""


class TellsLayout(nn.Module):
    """Tell in the state dict which heads of an attention layer are frozen, by which patterns, and which are pruned.

    `frozen_layout [H, 2]`, int64, by original heads: the kind (its place in `KINDS`: 0 live, 1 frozen, 2 pruned), then
    a digest of a fixed pattern. It is None, and no key of the state dict, while all heads are live. `load_state_dict`
    raises CheckpointError for weights of this layer that tell of other heads, of none, or of other patterns, also with
    `strict=False`. The patterns themselves are not in a state dict, but for trainable ones, which are parameters:
    `saf.save` writes them.
    """

    frozen_layout: Tensor | None = None
    """No buffer: who averages a model's buffers, or casts all of them, would round the digests."""

    def tell_layout(self, layout: HeadLayout, frozen: "FrozenHeads | None") -> None:
        """Tell of another layout from now on."""
        told = None
        if not layout.ordinary:
            told = torch.zeros(layout.num_heads, 2, dtype=torch.int64)
            for number, kind in enumerate(KINDS):
                told[list(getattr(layout, kind)), 0] = number
            for head, pattern in zip(layout.frozen, () if frozen is None else frozen.patterns, strict=True):
                told[head, 1] = 0 if pattern.trainable else _digest(pattern)
        self.frozen_layout = told

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add what the layer tells of its heads."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.frozen_layout is not None:
            destination[prefix + LAYOUT] = self.frozen_layout.clone()  # averages are written into a state dict, too

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Compare before anything of the layer is loaded; what this model tells of itself stays."""
        self.compare_layout(state_dict, prefix, prefix + LAYOUT)
        weights = {name: tensor for name, tensor in state_dict.items() if name != prefix + LAYOUT}
        super()._load_from_state_dict(weights, prefix, *rest)

    def compare_layout(self, state_dict: dict[str, Any], layer: str, name: str) -> None:
        """Raise CheckpointError where weights under the prefix `layer` tell, as `name`, of another layout or of none.

        Nothing is compared without any weight of the layer.
        """
        if any(one.startswith(layer) for one in state_dict):
            compare_told(layer.rstrip("."), self.frozen_layout, state_dict.get(name))


def with_layout(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights that tell the layout of `model` where they tell none, as those of earlier files do not."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[2] == LAYOUT}
    return own | weights


def compare_told(layer: str, own: Tensor | None, told: Tensor | None) -> None:
    """Raise CheckpointError unless a layer, `own`, and weights, `told`, tell of the same heads and patterns."""
    if told is not None and (told.dtype != torch.int64 or told.dim() != 2 or told.shape[1] != 2):
        raise CheckpointError(
            f"{layer}.{LAYOUT} is damaged: expected int64 [heads, 2]; got {told.dtype} {list(told.shape)}"
        )
    here, there = _edited(own), _edited(told)
    if {head: kind for head, (kind, _) in here.items()} != {head: kind for head, (kind, _) in there.items()}:
        raise CheckpointError(
            f"{layer}: the state dict is of a layer with {_listed(there)}, this one has {_listed(here)}; freeze or "
            "prune the same heads first, as saf.load does, or undo with saf.uninstall_"
        )
    if other := [head for head in here if here[head] != there[head]]:
        raise CheckpointError(
            f"{layer}: heads {other} are frozen with other patterns than those of the state dict, which does not hold "
            "them; freeze with those first, as saf.load does"
        )


def _edited(told: Tensor | None) -> dict[int, tuple[int, int]]:
    """Return the kind, as its place in `KINDS`, and the digest of the pattern of every head that is not live."""
    rows = [] if told is None else told.tolist()
    return {head: (kind, digest) for head, (kind, digest) in enumerate(rows) if kind}


def _listed(edited: dict[int, tuple[int, int]]) -> str:
    """Return "frozen heads [0, 1]" and those of other kinds, "frozen heads none" where there are not any."""
    by_kind = {kind: [head for head, (at, _) in edited.items() if at == n] for n, kind in enumerate(KINDS)}
    return ", ".join(f"{kind} heads {heads or 'none'}" for kind, heads in by_kind.items() if heads or kind == "frozen")


def _digest(pattern: Pattern) -> int:
    """Return 63 bits of the SHA-256 of a pattern's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(pattern.state().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest()[:8], "big") >> 1
