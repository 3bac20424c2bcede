"""What the rest of the package asks of a model: `adapter_for` returns its `Adapter`, which has a `Site` a layer.

Nothing else tests the class of a model. Only `Site.assign` and `Site.pin` change it; all else reads. The adapter of the
project's GPT is here, that of models of transformers in saf/hf/adapter.py.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.errors import UnsupportedError
from saf.heads import BIAS, HeadLayout, HeadSet, role_of, roles_of
from saf.models.by_layer import CompiledByLayer
from saf.models.gpt import GPT, Attention
from saf.ops import FrozenHeads

Receiver = Callable[[Tensor, Tensor], None]
"""A function that `Site.capture` calls with the queries and keys of a pass."""
Removed = Mapping[str, Mapping[int, Mapping[str, Tensor]]]
"""Rows taken out of a layer, on the CPU: by role, by head (`HeadLayout.rows`), by name: `weight`, moments."""
ON_META = "the model's weights are on the meta device, which holds no numbers; load them first"


def adapter_for(model: nn.Module) -> "Adapter":
    """Return the adapter of a model; raise UnsupportedError for a family, or attention, that is not known."""
    inner = unwrap(model)
    if (adapter := _find(inner)) is None:
        name = type(inner).__name__
        raise UnsupportedError(
            f"{name} is not of a supported family (`saf doctor` lists them); docs/huggingface.md says how to add one"
        )
    adapter.check_attention()
    return adapter


def language_model(model: nn.Module) -> "LanguageModel":
    """Return the adapter of a model, or one for any causal model with the interface of transformers."""
    inner = unwrap(model)
    if (adapter := _find(inner)) is not None:
        return adapter
    from saf.hf.adapter import TransformersModel

    return TransformersModel(inner)


def _find(model: nn.Module) -> "Adapter | None":
    if isinstance(model, GPT):
        return GPTAdapter(model)
    if "transformers" not in sys.modules:  # it may not be installed, and imported takes seconds
        return None
    from saf.hf.adapter import TransformersAdapter

    return TransformersAdapter.of(model)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module under `torch.compile` and data-parallel wrappers."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrap(inner)
    return model


def longest_input(model: nn.Module) -> int | None:
    """Return the most tokens that a model takes: its positions, or fewer that its patterns cover; None for no limit."""
    limits = [heads.max_length for heads in unwrap(model).modules() if isinstance(heads, FrozenHeads)]
    return min(filter(None, [*limits, language_model(model).max_length]), default=None)


# --- a model


class LanguageModel(ABC):
    """A causal language model that can be evaluated, whether or not its attention is known."""

    model: Any
    """The model itself, without wrappers."""
    one_graph: ClassVar[bool]
    """Whether the model is written to compile as one graph."""

    @property
    def device(self) -> torch.device:
        """Where the model takes token ids."""
        return next(self.model.parameters()).device

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """The longest input in tokens; None when the model sets no limit."""

    @property
    def vocab_size(self) -> int | None:
        """How many token ids the model knows; None when its configuration has no such entry."""
        return getattr(self.model.config, "vocab_size", None)

    def check_next_token(self) -> None:  # noqa: B027 - the project's own model always does
        """Raise UnsupportedError for a model that does not predict next tokens, such as one with a head of labels."""

    @abstractmethod
    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` given `input_ids [B, T]`, in nats per token, with its gradient."""

    @abstractmethod
    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return log p of every target, `[B, T]` float32, in nats."""

    def compiled_by_layer(self, *, activation_checkpointing: bool = False) -> CompiledByLayer:
        """Return a callable that computes the training loss, decoder layers compiled one by one."""
        raise UnsupportedError("compile='layers' is for the project's own GPT; use compile='on' or 'off'")

    @staticmethod
    @abstractmethod
    def last_logits(model: Any, input_ids: Tensor, count: int = 1) -> Tensor:
        """Return the logits `[B, count, V]` at the last positions of `input_ids [B, T]`; others are not computed.

        It takes the model, which a compiled module then reads as its own submodule, checked in one guard.
        """


class Adapter(LanguageModel):
    """A language model whose attention layers are known."""

    saves_weights: ClassVar[bool]
    """Whether `saf.save` writes the weights, too; else their own library saves them."""

    @abstractmethod
    def sites(self) -> "Sequence[Site]":
        """Return the attention layers in order."""

    @abstractmethod
    def run(self, input_ids: Tensor) -> None:
        """Run the layers on `input_ids [B, T]`, without the output layer."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many layers a forward pass runs, by the model's configuration."""

    def check_attention(self) -> None:
        """Raise UnsupportedError unless every layer of a forward pass has one attention layer of its own."""
        if (count := len(self.sites())) != self.num_layers:
            want = f"attention layers must be as many as the configuration's {self.num_layers} layers"
            raise UnsupportedError(f"{want}, got {count}: remove draft layers, copy shared ones")

    def attend_through_seam(self) -> None:
        """Let every layer attend through `saf.ops`, ordinary ones too; nothing where all always do."""

    def attention_settings(self) -> dict[str, Any]:
        """Return settings that shape attention and are not saved with the weights, as values for JSON."""
        return {}

    def remember(self, event: dict[str, Any]) -> None:
        """Keep a freezing event, as values for JSON, with the model; nothing here."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the attention weights: that of queries and keys outside autocast."""
        return rows_of(self.sites()[0], "query").parameter.dtype

    def heads(self, *kinds: str) -> HeadSet:
        """Return the heads of some of the kinds "live", "frozen", "pruned"."""
        layouts = [site.layout for site in self.sites()]
        return HeadSet((n, head) for n, one in enumerate(layouts) for kind in kinds for head in getattr(one, kind))


# --- a layer


class Site(ABC):
    """One attention layer: its projections by role, and its frozen heads."""

    attention: Any
    """The layer's module."""
    scale: float | None = None
    """Factor of the products of queries and keys; None for `head_dim ** -0.5`."""
    soft_cap: float | None = None
    """c of `c * tanh(logit / c)`, which softmax reads in place of scaled logits; None without a cap."""
    stays_ordinary: str | None = None
    """Why no head of this layer can be measured and frozen; None where they can."""
    norm_after: bool = False
    """Whether a norm follows the layer before its output is added to the residual stream."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """The module that holds the order of the heads, `layout`, `frozen`, and the rows `removed`, for undoing."""

    @property
    def layout(self) -> HeadLayout:
        return self.state.layout

    @property
    def frozen(self) -> FrozenHeads | None:
        return self.state.frozen

    @property
    def removed(self) -> Removed:
        return self.state.removed

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @abstractmethod
    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters `query`, `key`, `value`, `output`, each with the dimension along which heads lie.

        A bias whose entries belong to heads follows as `query_bias`, `key_bias`, `value_bias`. A fused projection has
        the names of the roles whose rows it holds one after another: `query_key_value`, `query_key_value_bias`.
        `rows_of` finds the rows of a role in either.
        """

    def check(self, layout: HeadLayout) -> None:  # noqa: B027 - most layers execute every layout
        """Raise UnsupportedError for a layout that this layer cannot execute."""

    @abstractmethod
    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout, its frozen heads and rows for undoing, once the projections are rearranged to it."""

    @abstractmethod
    def pin(self, kernel: str) -> None:
        """Run live heads on an SDPA kernel by name, see `live_attention`."""

    @abstractmethod
    def capture(self, receiver: Receiver) -> AbstractContextManager[None]:
        """Call `receiver` with rotated queries `[B, L, T, D]` and keys `[B, K, T, D]` of each pass while it is open."""


class Rows(NamedTuple):
    """Where a role's rows lie: `count` of them from `first` on, along a dimension of a named parameter."""

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
    """Return where the rows of a role lie that every layer has."""
    rows = find_rows(site, role)
    assert rows is not None, role
    return rows


# --- checks of a layer's weights


def hooked_module(attention: nn.Module) -> str | None:
    """Return the name of a projection with hooks, whose heads edits would reorder; None without any."""
    for name, module in attention.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if name and module._parameters and any(hooks):
            return name
    return None


def check_plain_weights(site: Site) -> None:
    """Raise UnsupportedError for projections whose weights are no plain parameters of their own modules.

    Quantised and sharded weights have no rows to move; weights that a pass computes, as pruning masks and norms of
    `torch.nn.utils` do, would come back in the old order of heads.
    """
    own = {id(parameter) for module in site.attention.modules() for parameter in module._parameters.values()}
    for role, (weight, _) in site.projections().items():
        check_unsharded(role, weight)
        if type(weight) is not nn.Parameter or id(weight) not in own:
            raise UnsupportedError(
                f"weights of a layer's {role} must be a parameter of its own, got {type(weight).__name__}: freeze and "
                "save before weights are quantised, after pruning masks and norms are made permanent"
            )


def check_unsharded(role: str, weight: Tensor) -> None:
    """Raise UnsupportedError for a weight of which each process holds a share (fully_shard, tensor parallelism)."""
    if type(weight).__name__ == "DTensor":
        raise UnsupportedError(
            f"weights of a layer's {role} must be whole, got shares (DTensor); gather the model first "
            "(docs/parallel.md, Events), or do this before fully_shard"
        )


# --- the project's GPT


class GPTAdapter(Adapter):
    """The adapter of `saf.models.GPT`."""

    saves_weights = True
    one_graph = True

    def __init__(self, model: GPT):
        self.model: GPT = model

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids, targets)

    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.token_log_probs(input_ids, targets)

    def compiled_by_layer(self, *, activation_checkpointing: bool = False) -> CompiledByLayer:
        return CompiledByLayer(self.model, activation_checkpointing=activation_checkpointing)

    @staticmethod
    def last_logits(model: GPT, input_ids: Tensor, count: int = 1) -> Tensor:
        return F.linear(model.hidden(input_ids)[:, -count:], model.embed.weight)

    def sites(self) -> "list[GPTSite]":
        return [GPTSite(attention) for attention in self.model.attention_layers()]

    def run(self, input_ids: Tensor) -> None:
        self.model.hidden(input_ids)


class GPTSite(Site):
    """An attention layer of `saf.models.GPT`."""

    def __init__(self, attention: Attention):
        self.attention = attention

    @property
    def state(self) -> Attention:
        return self.attention

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        return {role: (weight, int(role == "output")) for role, weight in self.attention.weights().items()}

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        self.attention.layout, self.attention.frozen, self.attention.removed = layout, frozen, dict(removed)
        self.attention.set_layout(layout, frozen)
        for linear in self.attention.children():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = linear.weight.shape

    def pin(self, kernel: str) -> None:
        self.attention.live.kernel = kernel

    @contextmanager
    def capture(self, receiver: Receiver) -> Iterator[None]:
        handle = self.attention.live.register_forward_pre_hook(lambda _, inputs: receiver(inputs[0], inputs[1]))
        try:
            yield
        finally:
            handle.remove()
