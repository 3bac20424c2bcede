"""The adapter of transformers' models: it edits their attention layers by the description of their family.

While heads of a model are edited, `config.saf` records the import that opens its folder, the length of the patterns
and the freezing events; `save_pretrained` writes it into config.json.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from saf.errors import UnsupportedError
from saf.frozen_state import IMPORT_LINE, SCHEMA
from saf.heads import BIAS, HeadLayout
from saf.hf.attention import NAME, config_entry, mask_for_generation, set_forward, state_of
from saf.hf.families import CONV1D, FAMILIES, NO_FAMILY, Family
from saf.hf.pretrained import patch_pretrained
from saf.models.adapter import Adapter, Receiver, Removed, Site
from saf.models.frozen_layout import LayoutMixin
from saf.ops import FrozenHeads

STOCK = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions of transformers that are known to compute softmax attention."""


class TransformersAdapter(Adapter):
    """The adapter of a causal language model of transformers. Only models of the `FAMILIES` have sites."""

    is_gpt = False

    def __init__(self, model: Any):
        self.model, config = model, getattr(model, "config", None)
        self.num_layers = getattr(config, "num_hidden_layers", None)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.vocab_size = getattr(config, "vocab_size", None)
        # Multimodal models have another configuration for their text model, and no length in their own.
        text = hasattr(config, "max_position_embeddings")
        editable = text and hasattr(model, "set_attn_implementation")
        classes = {type(module).__name__ for module in model.modules()} if editable else set()
        self.family = next((family for family in FAMILIES if family.attention in classes), NO_FAMILY)
        self._attention = [module for module in model.modules() if type(module).__name__ == self.family.attention]

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

    def sites(self) -> "list[TransformersSite]":
        return [TransformersSite(self, attention) for attention in self._attention]

    def run(self, input_ids: Tensor) -> None:
        original = self.model.config._attn_implementation
        if original == "sdpa" and any(site.soft_cap is not None for site in self.sites()):  # transformers 5.17
            raise UnsupportedError("sdpa drops this model's soft caps: call model.set_attn_implementation('eager')")
        self.use_saf_attention()  # other attention functions call no receiver of `TransformersSite.capture`
        try:
            self.model.base_model(input_ids=input_ids, use_cache=False)
        finally:
            self._use_attention(original)

    def use_saf_attention(self) -> None:
        self._use_attention(NAME)

    def _use_attention(self, name: str) -> None:
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    def attention_settings(self) -> dict[str, Any]:
        values = self.model.config.to_dict()
        # Through JSON, so that tuples are equal to the lists that `saf.load` reads back.
        return json.loads(json.dumps({name: values[name] for name in self.family.settings if name in values}))

    def record_event(self, entries: Callable[[], dict[str, Any]]) -> None:
        if entry := config_entry(self.model.config):
            entry["events"].append(entries())

    def check_attention(self) -> None:
        name = str(self.model.config._attn_implementation)
        if name not in (*STOCK, NAME) and not name.startswith("kernels-community/"):  # kernels of the hub
            raise UnsupportedError(
                f"attention must be one of {', '.join(STOCK)}: set_attn_implementation; got {name!r}"
            )
        super().check_attention()
        for attention in self._attention:
            for name in self.family.projections.values():
                cls = type(getattr(attention, name))
                path = f"{cls.__module__}.{cls.__qualname__}"
                # `TransformersSite.assign` changes projections without rows to the former class.
                if cls is not NonDynamicallyQuantizableLinear and path != self.family.projection_class:
                    raise UnsupportedError(
                        f"projections must be plain {self.family.projection_class.rpartition('.')[2]}, got {path}: "
                        "merge adapters (merge_and_unload), load weights unquantised"
                    )

    def set_attention_function(self) -> None:
        """Use `attend` while heads are edited, and the model's original attention function once none is."""
        states = [state for attention in self._attention if (state := state_of(attention)) is not None]
        original = next((state.original_function for state in states if state.original_function is not None), None)
        if not all(state.layout.ordinary for state in states):
            if original is None:  # other models may share the configuration, which names the function
                shared, own = self.model.config, copy.deepcopy(self.model.config)
                for module in self.model.modules():
                    if getattr(module, "config", None) is shared:
                        module.config = own
            for state in states:
                state.original_function = original or self.model.config._attn_implementation
            self.use_saf_attention()
            entry = config_entry(self.model.config) or {"schema": SCHEMA, "open_with": IMPORT_LINE, "events": []}
            lengths = [heads.max_length for heads in self.model.modules() if isinstance(heads, FrozenHeads)]
            entry["max_length"] = min(lengths, default=None)
            self.model.config.saf = entry
            if hasattr(type(self.model), "generate"):  # on the instance: ordinary models keep their method
                self.model.create_masks_for_generate = mask_for_generation
            patch_pretrained()
        elif original is not None:
            for state in states:
                state.original_function = None
            self._use_attention(original)
            vars(self.model).pop("create_masks_for_generate", None)
            vars(self.model.config).pop("saf", None)


class TransformersSite(Site):
    """An attention layer of transformers; while heads of it are edited, its submodule `saf` has their state."""

    def __init__(self, adapter: TransformersAdapter, attention: Any):
        self._adapter, self._family = adapter, adapter.family
        self.attention, self.head_dim = attention, attention.head_dim
        self.scale = attention.scaling  # Gemma's is query_pre_attn_scalar ** -0.5
        self.soft_cap = None if self._family.soft_cap is None else getattr(attention, self._family.soft_cap)
        self.post_norm = self._family.post_norm
        if (window := getattr(attention, "sliding_window", None)) is not None:
            self.unsupported_reason = f"layer {attention.layer_idx} attends within a sliding window of {window} tokens"

    @property
    def state(self) -> "HeadState":
        return state_of(self.attention) or HeadState(self.attention, self._family)

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        linears = {name: getattr(self.attention, module) for name, module in self._family.projections.items()}
        transposed = self._family.projection_class == CONV1D
        # Heads own rows of nn.Linear's weight [out, in], and columns of the output's; Conv1D has them the other way.
        weights = {name: (linear.weight, int((name == "output") != transposed)) for name, linear in linears.items()}
        # Entries of the output's bias belong to no head.
        inputs = {name: linear.bias for name, linear in linears.items() if name != "output"}
        return weights | {name + BIAS: (bias, 0) for name, bias in inputs.items() if bias is not None}

    def check(self, layout: HeadLayout) -> None:
        dropout, layer = self._family.dropout, f"layer {self.attention.layer_idx}"
        # Pruned heads too: the edited forward pass has no dropout for live heads either.
        if rate := getattr(self._adapter.model.config, dropout):
            raise UnsupportedError(
                f"with frozen heads dropout of attention must be 0, got {rate:g}: open the model with {dropout}=0"
            )
        projections = [getattr(self.attention, name) for name in self._family.projections.values()]
        if any(each.weight.is_meta and hasattr(each, "_hf_hook") for each in projections):
            raise UnsupportedError(f"{layer} must not be offloaded: give attention layers devices in the device_map")
        if layout.frozen and self.unsupported_reason is not None:
            raise UnsupportedError(f"{self.unsupported_reason}; leave its heads live")
        if layout.frozen and not getattr(self.attention, "is_causal", True):
            raise UnsupportedError(f"{layer} must be causal to have frozen heads")

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        attach_state(self.attention, self._family).assign(layout, frozen, removed)
        for name in self._family.projections.values():
            linear = getattr(self.attention, name)
            if self._family.projection_class == CONV1D:
                linear.nx, linear.nf = linear.weight.shape
            else:
                linear.out_features, linear.in_features = linear.weight.shape
                # Quantisers fail on empty weights, and skip this subclass of nn.Linear.
                linear.__class__ = nn.Linear if linear.weight.numel() else NonDynamicallyQuantizableLinear
        set_forward(self.attention)
        self._adapter.set_attention_function()
        detach_idle_state(self.attention)  # last: the state holds the name of the original attention function

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


# --- the state of a layer


class HeadState(LayoutMixin):
    """The submodule `saf` of an attention layer: which heads are frozen or pruned, and the patterns of frozen ones."""

    def __init__(self, attention: Any, family: Family):
        super().__init__()
        heads = attention.config.num_attention_heads
        self.layout = HeadLayout(heads, getattr(attention.config, "num_key_value_heads", heads))
        self.family = family
        self.frozen: FrozenHeads | None = None
        self.removed: Removed = {}
        self.receivers: list[Receiver] = []
        self.kernel = "auto"
        """Name of the SDPA kernel for live heads, see `mixed_attention`."""
        self.original_function: str | None = None
        """Name of the attention function that the model had before heads were edited."""
        self.fingerprint = ""
        """Kind of each head and digest of its pattern. A cache records it, and is refused by a layer with another."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Patch transformers in a process that unpickles a model, so that the model can be saved there."""
        super().__setstate__(state)
        patch_pretrained()

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Store a new layout, its frozen heads, and the removed rows that `uninstall_` puts back."""
        self.layout, self.frozen, self.removed = layout, frozen, dict(removed)
        self.set_layout(layout, frozen)
        self.fingerprint = "" if self.frozen_layout is None else str(self.frozen_layout.tolist())


def attach_state(attention: Any, family: Family) -> HeadState:
    """Return a layer's submodule `saf`, adding it where it is missing."""
    if (state := state_of(attention)) is None:
        state = attention.saf = HeadState(attention, family)
    return state


def detach_idle_state(attention: Any) -> None:
    """Remove a layer's submodule `saf` once it has no edited head, receiver or pinned kernel."""
    state = state_of(attention)
    if state is not None and state.layout.ordinary and not state.receivers and state.kernel == "auto":
        del attention.saf
