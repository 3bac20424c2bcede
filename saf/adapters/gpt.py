"""The project's own decoder."""

import torch
from torch import Tensor, nn

from saf.adapters.site import Sink
from saf.heads import HeadLayout
from saf.models import GPT
from saf.models.attention import Attention
from saf.ops import FrozenHeads


class GPTSite:
    """An attention layer of `saf.models.GPT`."""

    def __init__(self, attention: Attention):
        self.attention = attention

    @property
    def layout(self) -> HeadLayout:
        """Order of the heads."""
        return self.attention.layout

    @property
    def frozen(self) -> FrozenHeads | None:
        """The frozen heads' tables."""
        return self.attention.frozen

    @property
    def removed(self) -> dict[int, dict[str, Tensor]]:
        """Rows taken out at freezing."""
        return self.attention.removed

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.attention.head_dim

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters by role with the dimension along which heads lie."""
        return {role: (weight, int(role == "output")) for role, weight in self.attention.weights().items()}

    def check(self, layout: HeadLayout) -> None:
        """Every layout can be executed."""

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Take another layout with its frozen heads."""
        self.attention.layout, self.attention.frozen = layout, frozen
        for linear in self.attention.children():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = linear.weight.shape

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name."""
        self.attention.live.kernel = kernel

    def capture(self, sink: Sink) -> torch.utils.hooks.RemovableHandle:
        """Call `sink(query, key)` on every forward pass that has live heads here."""
        return self.attention.live.register_forward_pre_hook(lambda _, inputs: sink(inputs[0], inputs[1]))


class GPTAdapter:
    """`saf.models.GPT`."""

    family = "gpt (this project's decoder)"
    keep_live = 0

    def __init__(self, model: GPT):
        self.model = model

    @classmethod
    def of(cls, model: nn.Module) -> "GPTAdapter | None":
        """Return the adapter when the model is the project's decoder."""
        return cls(model) if isinstance(model, GPT) else None

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self.model.config.max_length

    def sites(self) -> list[GPTSite]:
        """Return the attention layers in order."""
        return [GPTSite(attention) for attention in self.model.attention_layers()]

    def run(self, input_ids: Tensor) -> None:
        """Run the layers without the output layer."""
        self.model.hidden(input_ids)
