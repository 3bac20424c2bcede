"""The project's own decoder."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.adapters.adapter import Adapter, Removed, Sink
from saf.heads import HeadLayout
from saf.models import GPT
from saf.models.attention import Attention
from saf.models.by_layer import CompiledByLayer
from saf.ops import FrozenHeads


class GPTSite:
    """Show an attention layer of `saf.models.GPT` as a site."""

    def __init__(self, attention: Attention):
        self.attention = attention

    @property
    def layout(self) -> HeadLayout:
        """Return the order of the heads."""
        return self.attention.layout

    @property
    def frozen(self) -> FrozenHeads | None:
        """Return the frozen heads' tables."""
        return self.attention.frozen

    @property
    def removed(self) -> Removed:
        """Return the rows kept for undoing."""
        return self.attention.removed

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.attention.head_dim

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters by role with the dimension along which heads lie."""
        return {role: (weight, int(role == "output")) for role, weight in self.attention.weights().items()}

    @property
    def scale(self) -> None:
        """Return None: queries are scaled by the square root of their channels."""
        return None

    @property
    def soft_cap(self) -> None:
        """Return None: logits have no cap."""
        return None

    @property
    def stays_ordinary(self) -> None:
        """Return None: every layer is plainly causal."""
        return None

    @property
    def norm_after(self) -> bool:
        """Return False: the output is added as it is."""
        return False

    def check(self, layout: HeadLayout) -> None:
        """Accept every layout: all of them can be executed."""

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout, its frozen heads and rows for undoing."""
        self.attention.layout, self.attention.frozen, self.attention.removed = layout, frozen, dict(removed)
        self.attention.set_layout(layout, frozen)
        for linear in self.attention.children():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = linear.weight.shape

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name."""
        self.attention.live.kernel = kernel

    @contextmanager
    def capture(self, sink: Sink) -> Iterator[None]:
        """Call `sink(query, key)` on every forward pass that has live heads here, while it is open."""
        handle = self.attention.live.register_forward_pre_hook(lambda _, inputs: sink(inputs[0], inputs[1]))
        try:
            yield
        finally:
            handle.remove()


class GPTAdapter(Adapter):
    """Answer for `saf.models.GPT`."""

    family = "gpt (this project's decoder)"
    saves_weights = True
    one_graph = True

    def __init__(self, model: GPT):
        self.model: GPT = model

    @classmethod
    def of(cls, model: nn.Module) -> "GPTAdapter | None":
        """Return the adapter when the model is the project's decoder."""
        return cls(model) if isinstance(model, GPT) else None

    @property
    def device(self) -> torch.device:
        """Return the device of the embedding."""
        return self.model.embed.weight.device

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self.model.config.num_layers

    @property
    def max_length(self) -> int:
        """Return the longest input in tokens."""
        return self.model.config.max_length

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        return self.model.config.vocab_size

    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` given `input_ids [B, T]`."""
        return self.model(input_ids, targets)

    def compiled_by_layer(self, *, activation_checkpointing: bool = False) -> CompiledByLayer:
        """Return what computes the training loss, one program for all layers of one layout of heads."""
        return CompiledByLayer(self.model, activation_checkpointing=activation_checkpointing)

    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return log p of every target, `[B, T]` float32, in nats."""
        return self.model.token_log_probs(input_ids, targets)

    @staticmethod
    def last_logits(model: GPT, input_ids: Tensor, count: int = 1) -> Tensor:
        """Return the logits `[B, count, V]` at the last positions of `input_ids [B, T]`."""
        return F.linear(model.hidden(input_ids)[:, -count:], model.embed.weight)

    def sites(self) -> list[GPTSite]:
        """Return the attention layers in order."""
        return [GPTSite(attention) for attention in self.model.attention_layers()]

    def run(self, input_ids: Tensor) -> None:
        """Run the layers without the output layer."""
        self.model.hidden(input_ids)

    def attention_settings(self) -> dict[str, Any]:
        """Return nothing: the configuration is saved with the weights."""
        return {}
