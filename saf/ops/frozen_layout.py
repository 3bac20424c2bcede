"""Which heads of a layer are frozen, told by its state dict: weights of another layout are refused by name."""

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError
from saf.heads import HeadLayout
from saf.patterns import Pattern

if TYPE_CHECKING:  # heads are asked, not made, here
    from saf.ops.frozen_heads import FrozenHeads

LAYOUT = "frozen_layout"
"""The name of the tensor in a state dict, after that of the layer."""


class TellsLayout(nn.Module):
    """Tell in the state dict which heads of an attention layer are frozen and by which patterns.

    `frozen_layout [H, 2]`, int64, by original heads: 1 for frozen ones and 0 for live ones, then a digest of a fixed
    pattern. It is None, and no key of the state dict, while no head is frozen. `load_state_dict` raises CheckpointError
    for weights of this layer that tell of other heads, of none, or of other patterns, also with `strict=False`. The
    patterns themselves are not in a state dict, but for trainable ones, which are parameters: `saf.save` writes them.
    """

    frozen_layout: Tensor | None

    def __init__(self):
        super().__init__()
        self.register_buffer(LAYOUT, None)

    def tell_layout(self, layout: HeadLayout, frozen: "FrozenHeads | None", device: torch.device) -> None:
        """Tell of another layout from now on."""
        told = None
        if frozen is not None:
            told = torch.zeros(layout.num_heads, 2, dtype=torch.int64)
            for head, pattern in zip(layout.frozen, frozen.patterns, strict=True):
                told[head] = torch.tensor([1, 0 if pattern.trainable else _digest(pattern)])
            told = told.to(device)
        self.frozen_layout = told

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Compare before anything of the layer is loaded; what this model tells of itself stays."""
        own = self.frozen_layout
        self.compare_layout(state_dict, prefix, prefix + LAYOUT)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.frozen_layout = own

    def compare_layout(self, state_dict: dict[str, Any], layer: str, name: str) -> None:
        """Raise CheckpointError where weights under the prefix `layer` tell, as `name`, of another layout or of none.

        Nothing is compared without any weight of the layer.
        """
        if any(one.startswith(layer) for one in state_dict):
            _compare(layer.rstrip("."), self.frozen_layout, state_dict.get(name))


def with_layout(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights that tell the layout of `model` where they tell none, as those of earlier files do not."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[2] == LAYOUT}
    return own | weights


def _compare(layer: str, own: Tensor | None, told: Tensor | None) -> None:
    """Raise CheckpointError unless both tell of the same heads and of the same patterns."""
    if told is not None and (told.dtype != torch.int64 or told.dim() != 2 or told.shape[1] != 2):
        raise CheckpointError(
            f"{layer}.{LAYOUT} is damaged: expected int64 [heads, 2]; got {told.dtype} {list(told.shape)}"
        )
    here, there = _frozen(own), _frozen(told)
    if here.keys() != there.keys():
        raise CheckpointError(
            f"{layer}: the state dict is of a layer with frozen heads {sorted(there) or 'none'}, this one has "
            f"{sorted(here) or 'none'}; freeze the same heads first, as saf.load does, or undo with saf.uninstall_"
        )
    if other := [head for head in here if here[head] != there[head]]:
        raise CheckpointError(
            f"{layer}: heads {other} are frozen with other patterns than those of the state dict, which does not hold "
            "them; freeze with those first, as saf.load does"
        )


def _frozen(told: Tensor | None) -> dict[int, int]:
    """Return the digest of every frozen head's pattern, by head."""
    rows = [] if told is None else told.tolist()
    return {head: digest for head, (kind, digest) in enumerate(rows) if kind}


def _digest(pattern: Pattern) -> int:
    """Return 63 bits of the SHA-256 of a pattern's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(pattern.state().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest()[:8], "big") >> 1
