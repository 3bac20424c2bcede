"""What the rest of the project asks of a model: `LanguageModel`, `Adapter` with its `Site`s, and nothing of its class.

An adapter only looks: making one, asking it and measuring through it leave the model as it was. `Site.assign` and
`Site.pin` alone change a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from saf.errors import UnsupportedError
from saf.heads import BIAS, HeadLayout, HeadSet, role_of, roles_of
from saf.models.by_layer import CompiledByLayer
from saf.ops import FrozenHeads

Sink = Callable[[Tensor, Tensor], None]
ON_META = "the model's weights are on the meta device, which holds no numbers; load them first"
Removed = Mapping[str, Mapping[int, Mapping[str, Tensor]]]
"""Rows taken out of a layer, on the CPU: by role, by whose they are (`HeadLayout.rows`), by name: `weight`, moments."""


class Site(Protocol):
    """Say what a site is: one attention layer with its projections, by role, and its frozen heads."""

    attention: Any
    """The layer's module."""

    @property
    def layout(self) -> HeadLayout:
        """Return the order of the heads."""
        ...

    @property
    def frozen(self) -> FrozenHeads | None:
        """Return what executes the frozen heads; None where there are none."""
        ...

    @property
    def removed(self) -> Removed:
        """Return the rows kept for undoing."""
        ...

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        ...

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters named `query`, `key`, `value`, `output`, each with the dimension along which heads lie.

        A bias whose entries belong to heads follows as `query_bias`, `key_bias`, `value_bias`. A fused projection is
        named by the roles whose rows it holds one after another: `query_key_value`, `query_key_value_bias`. `rows_of`
        finds the rows of a role in either.
        """
        ...

    @property
    def scale(self) -> float | None:
        """Return what products of queries and keys are multiplied by; None for `head_dim ** -0.5`."""
        ...

    @property
    def soft_cap(self) -> float | None:
        """Return c of `c * tanh(logit / c)`, which softmax takes in the place of scaled logits; None without a cap."""
        ...

    @property
    def stays_ordinary(self) -> str | None:
        """Return why no head of this layer can be measured and frozen; None where they can."""
        ...

    @property
    def norm_after(self) -> bool:
        """Return whether a norm of what the layer puts out comes before the residual stream."""
        ...

    def check(self, layout: HeadLayout) -> None:
        """Raise UnsupportedError for a layout that this layer cannot execute."""
        ...

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout, its frozen heads and rows for undoing, once the projections are rearranged to it."""
        ...

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name, see `live_attention`."""
        ...

    def capture(self, sink: Sink) -> AbstractContextManager[None]:
        """Call `sink(query, key)` with the rotated `[B, L, T, D]` and `[B, K, T, D]` of every pass while it is open."""
        ...


class Rows(NamedTuple):
    """Say where a role's rows lie: `count` of them from `first` on, along a dimension of a parameter, with its name."""

    name: str
    parameter: Tensor
    dimension: int
    first: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor of the parameter's shape (itself, its gradient), as a view."""
        return tensor.narrow(self.dimension, self.first, self.count)


def find_rows(site: Site, role: str) -> Rows | None:
    """Return where the rows of a role (`query`, `query_bias`, …) lie; None where the layer has no such parameter."""
    for name, (parameter, dimension) in site.projections().items():
        if name.endswith(BIAS) == role.endswith(BIAS) and role_of(role) in roles_of(name):
            roles = [each for each, _ in site.layout.rows_in(name)]
            before = roles_of(name)[: roles_of(name).index(role_of(role))]
            first, count = (sum(map(roles.count, some)) * site.head_dim for some in (before, [role_of(role)]))
            return Rows(name, parameter, dimension, first, count)
    return None


def rows_of(site: Site, role: str) -> Rows:
    """Return where the rows of a role lie, of a role that the layer has."""
    found = find_rows(site, role)
    assert found is not None, role
    return found


def hooked(attention: nn.Module) -> str | None:
    """Return the name of a module with weights, within an attention layer, that has hooks; None where none has.

    Such hooks see heads in slot order, which an edit changes.
    """
    for name, module in attention.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if name and module._parameters and any(hooks):
            return name
    return None


class LanguageModel(ABC):
    """Answer for a causal language model that can be evaluated, whether or not its attention is known."""

    model: Any
    """The model itself, without wrappers."""
    one_graph: ClassVar[bool]
    """Whether the model is written to compile as one graph."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return where the model takes token ids."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Return the longest input in tokens; None when the model sets no limit."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Return how many token ids the model knows; None when it does not tell."""

    def check_next_token(self) -> None:  # noqa: B027 - a model of the project's always does
        """Raise UnsupportedError for a model that does not predict next tokens, such as one with a head of labels."""

    @abstractmethod
    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` given `input_ids [B, T]`, in nats per token, with its gradient."""

    @abstractmethod
    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return log p of every target, `[B, T]` float32, in nats."""

    def compiled_by_layer(self, *, activation_checkpointing: bool = False) -> CompiledByLayer:
        """Return what computes the training loss of the model as it is now, its decoder layers compiled by themselves.

        Raises UnsupportedError for a family whose layers are another library's.
        """
        raise UnsupportedError("compile='layers' is for the project's own GPT; use compile='on' or 'off'")

    @staticmethod
    @abstractmethod
    def last_logits(model: Any, input_ids: Tensor, count: int = 1) -> Tensor:
        """Return the logits `[B, count, V]` at the last positions of `input_ids [B, T]`; others have none computed.

        It takes the model, so that a compiled module that holds the model reads it as its own submodule: a compiler
        checks those in one go before every call, what is reached through another object one by one.
        """


class Adapter(LanguageModel):
    """Answer for a model whose attention is known: whether it is of the family, and where its attention layers are."""

    family: ClassVar[str]
    saves_weights: ClassVar[bool]
    """Whether `saf.save` writes the weights beside the frozen heads; else their own library keeps them."""

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module) -> "Adapter | None":
        """Return the adapter of a model of this family, None for any other model."""

    @abstractmethod
    def sites(self) -> Sequence[Site]:
        """Return the attention layers in order."""

    @abstractmethod
    def run(self, input_ids: Tensor) -> None:
        """Run the layers on `input_ids [B, T]`, without the output layer."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Return how many layers a forward pass runs, by the model's configuration."""

    def check_attention(self) -> None:
        """Raise UnsupportedError unless every layer of a forward pass has one attention layer of its own."""
        if (count := len(self.sites())) != self.num_layers:
            raise UnsupportedError(
                f"attention layers must be as many as the configuration's {self.num_layers} layers, got {count}: take "
                "draft and multi-token-prediction layers out, and give a layer that is used twice a copy of its own"
            )

    def attend_through_seam(self) -> None:
        """Let every layer attend through `saf.ops`, ordinary ones too; nothing where all always do."""

    @abstractmethod
    def attention_settings(self) -> dict[str, Any]:
        """Return what shapes attention beside the saved weights, as values for JSON; nothing where all is saved."""

    def remember(self, event: dict[str, Any]) -> None:
        """Keep what is known of a freezing event, as values for JSON, with the model; nothing here."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the attention weights: that of queries and keys outside autocast."""
        return rows_of(self.sites()[0], "query").parameter.dtype

    def heads(self, *kinds: str) -> HeadSet:
        """Return the heads of some of the kinds in `KINDS`."""
        return HeadSet(
            (layer, head)
            for layer, site in enumerate(self.sites())
            for kind in kinds
            for head in getattr(site.layout, kind)
        )

    def frozen_heads(self) -> HeadSet:
        """Return the heads that are frozen already."""
        return self.heads("frozen")

    def live_heads(self) -> HeadSet:
        """Return the heads that compute ordinary attention."""
        return self.heads("live")
