"""The interface between the package and a model: an `Adapter` of the model, with a `Site` for each attention layer.

`adapter_for` returns the adapter of a model that is to be measured or edited, `language_model` that of any causal model
that is to be evaluated. `Site.assign` alone changes heads. The adapter of the project's GPT is here, that of
transformers' models in saf/hf/adapter.py.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.heads import BIAS, HeadLayout, HeadSet, roles_of
from saf.libraries import transformers_part
from saf.models.gpt import GPT, Attention, plain_weight
from saf.ops import FrozenHeads

Receiver = Callable[[Tensor, Tensor], None]
"""A function that `Site.capture` calls with the queries and keys of a pass."""
Removed = Mapping[str, Mapping[int, Mapping[str, Tensor]]]
"""Removed rows of a layer's projections, on the CPU: role -> head -> name (`weight`, an optimiser moment) -> rows."""
ON_META = "the model's weights are on the meta device, which holds no numbers; load them first"


def adapter_for(model: nn.Module) -> "Adapter":
    """Return the adapter of a model; raise UnsupportedError for an unsupported family or attention layer."""
    inner = unwrap(model)
    # Nothing of transformers can be here unless it was imported, which takes seconds.
    importable = isinstance(inner, GPT) or "transformers" in sys.modules
    adapter = language_model(inner) if importable else None
    if adapter is None or not adapter.sites():
        raise UnsupportedError(
            f"{type(inner).__name__} is not of a supported family: docs/huggingface.md lists them and how to add one, "
            "docs/guide.md has the operator for modules of your own"
        )
    adapter.check_attention()
    return adapter


def language_model(model: nn.Module) -> "Adapter":
    """Return the adapter of a model that is only to be evaluated: of an unsupported family it has no `sites`."""
    inner = unwrap(model)
    return GPTAdapter(inner) if isinstance(inner, GPT) else transformers_part("adapter")(inner)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module under `torch.compile` and data-parallel wrappers."""
    for name in ("_orig_mod", "module"):  # the wrappers nest in either order
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrap(inner)
    return model


def longest_input(model: nn.Module) -> int | None:
    """Return the longest input in tokens, by the model's positions and its patterns' length; None without a limit."""
    # A pattern has no row beyond the positions that it was calibrated on.
    limits = [heads.max_length for heads in unwrap(model).modules() if isinstance(heads, FrozenHeads)]
    return min(filter(None, [*limits, language_model(model).max_length]), default=None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode, and back to its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# --- a model


class Adapter(ABC):
    """A causal language model, which can be evaluated, and whose attention heads can be measured, frozen and pruned."""

    model: Any
    """The model itself, without wrappers."""
    num_layers: int | None
    """Number of decoder layers by the model's configuration."""
    max_length: int | None
    """The longest input in tokens; None when the model sets no limit."""
    vocab_size: int | None
    """Number of token ids; None where the configuration has no such field."""
    is_gpt: ClassVar[bool]
    """Whether it is this project's GPT: `saf.save` writes its weights, and it compiles with `fullgraph=True`."""

    @property
    def device(self) -> torch.device:
        """The device for token ids."""
        # The first parameter is the embedding's, also where a device_map spreads the layers.
        return next(self.model.parameters()).device

    def check_next_token(self) -> None:  # noqa: B027 - the project's own model always does
        """Raise UnsupportedError for a model that does not predict next tokens, such as one with a head of labels."""

    @abstractmethod
    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `targets [B, T]` after `input_ids [B, T]`, a scalar in nats per token."""

    @abstractmethod
    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of every target, `[B, T]` float32, in nats."""

    @staticmethod
    @abstractmethod
    def last_logits(model: Any, input_ids: Tensor, count: int = 1) -> Tensor:
        """Return the logits `[B, count, V]` at the last positions of `input_ids [B, T]` alone.

        A static method, as `LastToken` compiles it: the model is then a submodule of the compiled module, not an
        attribute of this adapter, and has one guard.
        """

    @abstractmethod
    def sites(self) -> "Sequence[Site]":
        """Return the attention layers in order; none of a model that can only be evaluated."""

    @abstractmethod
    def run(self, input_ids: Tensor) -> None:
        """Run the layers on `input_ids [B, T]`, without the output layer."""

    def check_attention(self) -> None:
        """Raise UnsupportedError unless every layer of a forward pass has one attention layer of its own."""
        # Statistics are [L, H] by number of layer: one attention module more or less would shift all after it.
        if (count := len(self.sites())) != self.num_layers:
            want = f"attention layers must be as many as the configuration's {self.num_layers} layers"
            raise UnsupportedError(f"{want}, got {count}: remove draft and cross-attention layers, copy shared ones")

    def check_tokens(self, ids: Sequence[Tensor]) -> None:
        """Raise InputError for a token id that the model does not know; on a GPU such an id would end the process.

        A model without numbers (on the meta device) raises InputError too, sharded weights UnsupportedError.
        """
        for site in self.sites():
            check_unsharded("query", rows_of(site, "query").parameter)
        if self.device.type == "meta":
            raise InputError(ON_META)
        low, high = min(int(each.min()) for each in ids), max(int(each.max()) for each in ids)
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            got = low if low < 0 else high
            raise InputError(f"token ids of batches must lie in [0, {self.vocab_size}); got {got}")

    def use_saf_attention(self) -> None:  # noqa: B027 - the GPT always does
        """Let all layers call `saf.ops`, also those without edited heads."""

    def attention_settings(self) -> dict[str, Any]:
        """Return the configuration's fields that affect attention, as values for JSON."""
        return {}

    def record_event(self, entries: Callable[[], dict[str, Any]]) -> None:  # noqa: B027 - a GPT's has its shape alone
        """Record a freezing event, as the values for JSON that `entries` returns, in the model's configuration."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the attention weights: that of queries and keys outside autocast."""
        return rows_of(self.sites()[0], "query").parameter.dtype

    def heads(self, *kinds: str) -> HeadSet:
        """Return the heads of some of the kinds "live", "frozen", "pruned"."""
        layouts = enumerate(site.layout for site in self.sites())
        return HeadSet((layer, head) for layer, layout in layouts for kind in kinds for head in getattr(layout, kind))


# --- a layer


class Site(ABC):
    """One attention layer: its projections by role, and its frozen heads."""

    attention: Any
    """The layer's module."""
    head_dim: int
    """Channels of a head."""
    scale: float | None = None
    """Scale of the logits; None for `head_dim ** -0.5`."""
    soft_cap: float | None = None
    """c of the capped logit, `c * tanh(logit / c)`; None without a cap."""
    unsupported_reason: str | None = None
    """Why heads of this layer can be neither measured nor frozen; None where they can."""
    post_norm: bool = False
    """Whether the layer's output passes a norm before it is added to the residual stream."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """The module with the attributes `layout`, `frozen` and `removed`."""

    @property
    def layout(self) -> HeadLayout:
        return self.state.layout

    @property
    def frozen(self) -> FrozenHeads | None:
        return self.state.frozen

    @property
    def removed(self) -> Removed:
        return self.state.removed

    @abstractmethod
    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return the projections' parameters by role, each with the dimension of its heads' rows.

        Roles are `query`, `key`, `value` and `output`; biases of the first three are `query_bias` and so on. A fused
        projection is named after its roles in order: `query_key_value`, `query_key_value_bias`.
        """

    def check(self, layout: HeadLayout) -> None:  # noqa: B027 - most layers execute every layout
        """Raise UnsupportedError for a layout that this layer cannot execute."""

    @abstractmethod
    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Store a layout, its frozen heads and the removed rows, after the projections were rearranged to it."""

    @abstractmethod
    def pin(self, kernel: str) -> None:
        """Set the SDPA kernel of live heads by name, see `live_attention`."""

    @abstractmethod
    def capture(self, receiver: Receiver) -> AbstractContextManager[None]:
        """In this context each pass calls `receiver` with rotated queries `[B, L, T, D]` and keys `[B, K, T, D]`."""


class Rows(NamedTuple):
    """The rows of a role in a parameter: `count` of them from index `first` on, along one dimension."""

    name: str
    parameter: Tensor
    dimension: int
    first: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the rows in a tensor of the parameter's shape, such as its gradient."""
        return tensor.narrow(self.dimension, self.first, self.count)


def find_rows(site: Site, role: str) -> Rows | None:
    """Return the rows of a role (`query`, `query_bias`, …); None where the layer has no such parameter."""
    wanted = role.removesuffix(BIAS)
    for name, (parameter, dimension) in site.projections().items():
        if name.endswith(BIAS) == role.endswith(BIAS) and wanted in roles_of(name):
            sizes = {each: len(site.layout.rows[each]) * site.head_dim for each in roles_of(name)}
            # A fused projection has all rows of one role before those of the next.
            first = sum(sizes[each] for each in roles_of(name)[: roles_of(name).index(wanted)])
            return Rows(name, parameter, dimension, first, sizes[wanted])
    return None


def rows_of(site: Site, role: str) -> Rows:
    """Return the rows of a role that every layer has."""
    rows = find_rows(site, role)
    assert rows is not None, role
    return rows


def check_unsharded(role: str, weight: Tensor) -> None:
    """Raise UnsupportedError for a weight that is sharded over processes (fully_shard, tensor parallelism)."""
    if type(weight).__name__ == "DTensor":
        raise UnsupportedError(
            f"weights of a layer's {role} must be whole, got shares (DTensor); gather the model first "
            "(docs/parallel.md, Events), or do this before fully_shard"
        )


# --- the project's GPT


class GPTAdapter(Adapter):
    """The adapter of `saf.models.GPT`."""

    is_gpt = True

    def __init__(self, model: GPT):
        self.model: GPT = model
        self.num_layers, self.max_length = model.config.num_layers, model.config.max_length
        self.vocab_size = model.config.vocab_size

    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids, targets)

    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.token_log_probs(input_ids, targets)

    @staticmethod
    def last_logits(model: GPT, input_ids: Tensor, count: int = 1) -> Tensor:
        # Cut before the output layer, whose logits of 4,096 positions would take 0.8 GB a sequence in float32.
        return F.linear(model.hidden(input_ids)[:, -count:], model.embed.weight)

    def sites(self) -> "list[GPTSite]":
        return [GPTSite(attention) for attention in self.model.attention_layers()]

    def run(self, input_ids: Tensor) -> None:
        self.model.hidden(input_ids)


class GPTSite(Site):
    """An attention layer of `saf.models.GPT`."""

    def __init__(self, attention: Attention):
        self.attention, self.head_dim = attention, attention.head_dim

    @property
    def state(self) -> Attention:
        return self.attention

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        own = self.attention
        linears = {"query": own.q_proj, "key": own.k_proj, "value": own.v_proj, "output": own.o_proj}
        return {role: (plain_weight(linear), int(role == "output")) for role, linear in linears.items()}

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        self.attention.layout, self.attention.frozen, self.attention.removed = layout, frozen, dict(removed)
        self.attention.set_layout(layout, frozen)
        for linear in self.attention.children():
            if isinstance(linear, nn.Linear):  # read by its repr and by quantisers
                linear.out_features, linear.in_features = linear.weight.shape

    def pin(self, kernel: str) -> None:
        self.attention.live.kernel = kernel

    @contextmanager
    def capture(self, receiver: Receiver) -> Iterator[None]:
        # A hook of `live`, not of the projections: scores are computed from rotated queries and keys.
        handle = self.attention.live.register_forward_pre_hook(lambda _, inputs: receiver(inputs[0], inputs[1]))
        try:
            yield
        finally:
            handle.remove()
