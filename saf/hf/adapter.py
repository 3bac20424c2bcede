"""The adapter of transformers' models: their attention layers as sites, whatever the family.

While heads of a model are edited, its configuration names our attention function and has an entry `saf`, which
`save_pretrained` writes: the import that opens the folder, the length of the patterns, the freezing events.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from saf.errors import UnsupportedError
from saf.frozen_state import OPENS, SCHEMA
from saf.heads import BIAS, HeadLayout
from saf.hf.attention import (
    NAME,
    STOCK,
    HeadState,
    attach_state,
    choose_forward,
    detach_idle_state,
    layout_of,
    mask_for_generation,
    no_dropout,
    state_of,
)
from saf.hf.families import CONV1D, FAMILIES, Family
from saf.models.adapter import Adapter, LanguageModel, Receiver, Removed, Site
from saf.ops import FrozenHeads


def mark_of(config: Any) -> dict[str, Any] | None:
    """Return the entry of a configuration about frozen or pruned heads; None where it has none."""
    return getattr(config, "saf", None)


def unmark_(config: Any) -> None:
    """Take that entry out."""
    vars(config).pop("saf", None)


class TransformersModel(LanguageModel):
    """A causal language model with the interface of transformers: token ids in, `logits` out, and a `config`."""

    one_graph = False

    def __init__(self, model: Any):
        self.model = model

    @property
    def max_length(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    def check_next_token(self) -> None:
        if type(self.model).__name__.endswith(("Classification", "QuestionAnswering")):
            raise UnsupportedError(
                f"{type(self.model).__name__} predicts no next tokens: leave out held-out sequences, gate_taylor and "
                "perplexity, or take the model for causal language modelling"
            )

    def next_token_loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(input_ids).flatten(0, 1), targets.flatten())

    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return -F.cross_entropy(self._logits(input_ids).transpose(1, 2), targets, reduction="none")

    @staticmethod
    def last_logits(model: Any, input_ids: Tensor, count: int = 1) -> Tensor:
        return model(input_ids=input_ids, use_cache=False, logits_to_keep=count).logits

    def _logits(self, input_ids: Tensor) -> Tensor:
        """Return float32 logits `[B, T, V]`."""
        self.check_next_token()
        return self.model(input_ids=input_ids, use_cache=False).logits.float()


class TransformersAdapter(TransformersModel, Adapter):
    """The adapter of models of transformers of the families in `FAMILIES`."""

    saves_weights = False

    def __init__(self, model: Any, family: Family):
        super().__init__(model)
        self.family = family
        self._attention = [module for module in model.modules() if type(module).__name__ == family.attention]
        for attention in self._attention:
            kinds = [type(getattr(attention, name)) for name in family.projections.values()]
            kinds = [kind for kind in kinds if kind is not NonDynamicallyQuantizableLinear]
            if other := [kind for kind in kinds if f"{kind.__module__}.{kind.__qualname__}" != family.kind]:
                raise UnsupportedError(
                    f"projections must be plain {family.kind.rpartition('.')[2]}, got {other[0].__module__}."
                    f"{other[0].__name__}: merge adapters (merge_and_unload), load weights unquantised"
                )

    @classmethod
    def of(cls, model: nn.Module) -> "TransformersAdapter | None":
        """Return the adapter of a model of a known family, None for any other model."""
        # Models of several parts, as for images, have a config of their own for text.
        text = hasattr(getattr(model, "config", None), "max_position_embeddings")
        if not (text and hasattr(model, "set_attn_implementation")):
            return None
        names = {type(module).__name__ for module in model.modules()}
        return next((cls(model, family) for family in FAMILIES if family.attention in names), None)

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    def sites(self) -> "list[TransformersSite]":
        return [TransformersSite(self, attention) for attention in self._attention]

    def run(self, input_ids: Tensor) -> None:
        before = self.model.config._attn_implementation
        if before == "sdpa" and any(site.soft_cap is not None for site in self.sites()):  # transformers 5.17
            raise UnsupportedError("sdpa drops this model's soft caps: call model.set_attn_implementation('eager')")
        self.attend_through_seam()
        try:
            self.model.base_model(input_ids=input_ids, use_cache=False)
        finally:
            self._attend_by(before)

    def attend_through_seam(self) -> None:
        self._attend_by(NAME)

    def attention_settings(self) -> dict[str, Any]:
        values = self.model.config.to_dict()
        return json.loads(json.dumps({name: values[name] for name in self.family.settings if name in values}))

    def remember(self, event: dict[str, Any]) -> None:
        if (mark := mark_of(self.model.config)) is not None:
            mark["events"].append(event)

    def check_attention(self) -> None:
        if any(getattr(attention, "is_cross_attention", False) for attention in self._attention):
            raise UnsupportedError(
                f"this {type(self.model).__name__} attends to an encoder: open it as a decoder alone "
                "(add_cross_attention=False)"
            )
        name = str(self.model.config._attn_implementation)
        if name not in (*STOCK, NAME) and not name.startswith("kernels-community/"):
            raise UnsupportedError(
                f"attention must be one of {', '.join(STOCK)}: set_attn_implementation; got {name!r}"
            )
        super().check_attention()

    def check_layers(self) -> None:
        """Raise UnsupportedError where any layer computes what `edited_forward` would silently leave out."""
        for attention in self._attention:
            if rate := self.family.dropout_rate(attention):
                raise UnsupportedError(no_dropout(rate, self.family.dropout_setting))
            if rate := getattr(attention, "residual_dropout", 0):
                raise UnsupportedError(no_dropout(rate, "residual_dropout"))
            norm = getattr(attention, "q_norm", None)
            if norm is not None and not (self.family.norms and norm.weight.numel() == attention.head_dim):
                raise UnsupportedError(f"{type(attention).__name__} must have no norm of queries, or one of each head")

    def choose_function(self) -> None:
        """Attend through `attend` while heads are edited, and as before once none is.

        Other models may share the configuration, which names the function: this one gets a copy, and keeps it.
        """
        states = [state for attention in self._attention if (state := state_of(attention)) is not None]
        before = next((state.before for state in states if state.before is not None), None)
        if not all(state.layout.ordinary for state in states):
            if before is None:
                self._take_own_config()
            for state in states:
                state.before = before or self.model.config._attn_implementation
            self.attend_through_seam()
            if hasattr(type(self.model), "generate"):
                self.model.create_masks_for_generate = mask_for_generation
            self._mark()
        elif before is not None:
            for state in states:
                state.before = None
            self._attend_by(before)
            vars(self.model).pop("create_masks_for_generate", None)
            unmark_(self.model.config)

    def _take_own_config(self) -> None:
        shared, own = self.model.config, copy.deepcopy(self.model.config)
        for module in self.model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own

    def _mark(self) -> None:
        """Enter in the configuration that heads are edited, and how many positions their patterns cover."""
        from saf.hf.pretrained import watch_folders

        if mark_of(self.model.config) is None:
            self.model.config.saf = {"schema": SCHEMA, "open_with": OPENS, "events": []}
        covered = [heads.max_length for heads in self.model.modules() if isinstance(heads, FrozenHeads)]
        self.model.config.saf["max_length"] = min(covered, default=None)
        watch_folders()

    def _attend_by(self, name: str) -> None:
        """Attend by the function of this name in transformers."""
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)


class TransformersSite(Site):
    """An attention layer of transformers; while heads of it are frozen, their state is its submodule `saf`."""

    def __init__(self, adapter: TransformersAdapter, attention: Any):
        self._adapter, self._family, self.attention = adapter, adapter.family, attention
        self.scale = attention.scaling
        self.soft_cap = None if self._family.soft_cap is None else getattr(attention, self._family.soft_cap)
        self.norm_after = self._family.norm_after
        if (window := getattr(attention, "sliding_window", None)) is not None:
            self.stays_ordinary = f"layer {attention.layer_idx} attends within a sliding window of {window} tokens"

    @property
    def state(self) -> HeadState:
        return state_of(self.attention) or HeadState(layout_of(self.attention), self._family)

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        linears = {name: getattr(self.attention, module) for name, module in self._family.projections.items()}
        transposed = self._family.kind == CONV1D
        weights = {name: (linear.weight, int((name == "output") != transposed)) for name, linear in linears.items()}
        # The bias of the output belongs to no head.
        inputs = {name: linear.bias for name, linear in linears.items() if name != "output"}
        return weights | {name + BIAS: (bias, 0) for name, bias in inputs.items() if bias is not None}

    def check(self, layout: HeadLayout) -> None:
        self._adapter.check_layers()
        layer = f"layer {self.attention.layer_idx}"
        projections = [getattr(self.attention, name) for name in self._family.projections.values()]
        if any(each.weight.is_meta and hasattr(each, "_hf_hook") for each in projections):
            raise UnsupportedError(f"{layer} must not be offloaded: give attention layers devices in the device_map")
        if layout.frozen and self.stays_ordinary is not None:
            raise UnsupportedError(f"{self.stays_ordinary}; leave its heads live")
        if layout.frozen and not getattr(self.attention, "is_causal", True):
            raise UnsupportedError(f"{layer} must be causal to have frozen heads")

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        attach_state(self.attention, self._family).assign(layout, frozen, removed)
        for name in self._family.projections.values():
            linear = getattr(self.attention, name)
            if self._family.kind == CONV1D:
                linear.nx, linear.nf = linear.weight.shape
            else:
                linear.out_features, linear.in_features = linear.weight.shape
                # Quantisers of linear layers pass over this class of PyTorch; they fail at weights without entries.
                linear.__class__ = nn.Linear if linear.weight.numel() else NonDynamicallyQuantizableLinear
        choose_forward(self.attention)
        self._adapter.choose_function()
        detach_idle_state(self.attention)

    def pin(self, kernel: str) -> None:
        attach_state(self.attention, self._family).kernel = kernel
        detach_idle_state(self.attention)

    @contextmanager
    def capture(self, receiver: Receiver) -> Iterator[None]:
        receivers = attach_state(self.attention, self._family).receivers
        receivers.append(receiver)
        try:
            yield
        finally:
            receivers.remove(receiver)
            detach_idle_state(self.attention)
