"""Llama-like models of transformers: separate projections, rotary positions, grouped queries or not, biases or not.

Their own forward pass stays, but of layers without live heads. It reads the number of heads off the projections' sizes,
so fewer query rows flow through to the attention function, which is ours (`saf.adapters.llama_attention`).
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from saf.adapters.adapter import Adapter, Removed, Sink
from saf.adapters.llama_attention import (
    NAME,
    attach_state,
    check_generated_length,
    choose_forward,
    detach_idle_state,
    forward_without_queries,
    layout_of,
    no_dropout,
    register,
    replaced_forward,
    state_of,
)
from saf.adapters.transformers_folder import mark_, mark_of, save_with_heads, unmark_
from saf.adapters.transformers_model import TransformersModel
from saf.errors import UnsupportedError
from saf.heads import BIAS, HeadLayout
from saf.ops import FrozenHeads

ATTENTION = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Attention classes whose forward pass is known to fit."""
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")
"""Fields of a configuration that shape attention beside the weights."""
GENERATED_LENGTH = "_validate_generated_length"
"""What `generate` calls once it knows how long its output may become, before the first token."""
SAVE = "save_pretrained"
"""What writes the model's folder, also for a `Trainer` and for `push_to_hub`."""


class LlamaSite:
    """Show an attention layer as a site; while heads of it are frozen, their state is a submodule of it, `saf`."""

    def __init__(self, adapter: "LlamaAdapter", attention: Any):
        self._adapter = adapter
        self.attention = attention

    @property
    def layout(self) -> HeadLayout:
        """Return the order of the heads."""
        return layout_of(self.attention)

    @property
    def frozen(self) -> FrozenHeads | None:
        """Return what executes the frozen heads."""
        state = state_of(self.attention)
        return None if state is None else state.frozen

    @property
    def removed(self) -> Removed:
        """Return the rows kept for undoing."""
        state = state_of(self.attention)
        return {} if state is None else state.removed

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.attention.head_dim

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters by role with the dimension along which heads lie."""
        linears = {role: getattr(self.attention, name) for role, name in ROLES.items()}
        weights = {role: (linear.weight, int(role == "output")) for role, linear in linears.items()}
        # That of the output belongs to no head.
        inputs = {role: linear.bias for role, linear in linears.items() if role != "output"}
        return weights | {role + BIAS: (bias, 0) for role, bias in inputs.items() if bias is not None}

    def check(self, layout: HeadLayout) -> None:
        """Raise UnsupportedError for attention dropout, for attention that is not plainly causal, for replaced code."""
        self._adapter.check_dropout()
        if layout.frozen and getattr(self.attention, "sliding_window", None) is not None:
            raise UnsupportedError(
                f"layer {self.attention.layer_idx} attends within a sliding window, which frozen heads do not know; "
                "leave its heads out with exclude, and keep inputs within the window"
            )
        if not layout.num_live and replaced_forward(self.attention) not in (None, forward_without_queries):
            raise UnsupportedError(
                f"the forward pass of layer {self.attention.layer_idx} was replaced (as accelerate's hooks do), and a "
                "layer without live heads needs its own; leave one of its heads live with max_per_layer or exclude"
            )

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout; the model attends through our function while any layer has frozen heads."""
        attach_state(self.attention).take(layout, frozen, removed, self.attention.q_proj.weight.device)
        for name in ROLES.values():
            linear = getattr(self.attention, name)
            linear.out_features, linear.in_features = linear.weight.shape
        choose_forward(self.attention)
        self._adapter.choose_function()
        detach_idle_state(self.attention)

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name, where the model attends through our function."""
        attach_state(self.attention).kernel = kernel
        detach_idle_state(self.attention)

    @contextmanager
    def capture(self, sink: Sink) -> Iterator[None]:
        """Call `sink(query, key)` in every pass of `LlamaAdapter.run`, or of a model that has frozen heads."""
        sinks = attach_state(self.attention).sinks
        handle = RemovableHandle(sinks)
        sinks[handle.id] = sink
        try:
            yield
        finally:
            handle.remove()
            detach_idle_state(self.attention)


class LlamaAdapter(TransformersModel, Adapter):
    """Answer for Llama, Mistral, Qwen2 and Qwen3 of transformers."""

    family = "llama-like (Llama, Mistral, Qwen2 and Qwen3 of transformers)"
    saves_weights = False

    def __init__(self, model: Any):
        super().__init__(model)
        self._attention = [module for module in model.modules() if type(module).__name__ in ATTENTION]
        for attention in self._attention:
            linears = [getattr(attention, name) for name in ROLES.values()]
            if strange := [type(linear) for linear in linears if type(linear) is not nn.Linear]:
                raise UnsupportedError(
                    f"projections must be plain nn.Linear, got {strange[0].__module__}.{strange[0].__name__}; "
                    "merge adapters into the weights "
                    "(merge_and_unload of peft), and load weights unquantised"
                )

    @classmethod
    def of(cls, model: nn.Module) -> "LlamaAdapter | None":
        """Return the adapter when the model is one of transformers with attention of a known class."""
        # Models of several parts, as for images, have a config of their own for text.
        text = hasattr(getattr(model, "config", None), "max_position_embeddings")
        known = text and hasattr(model, "set_attn_implementation")
        return cls(model) if known and any(type(m).__name__ in ATTENTION for m in model.modules()) else None

    def sites(self) -> list[LlamaSite]:
        """Return the attention layers in order."""
        return [LlamaSite(self, attention) for attention in self._attention]

    def run(self, input_ids: Tensor) -> None:
        """Run the layers through our function, without the output layer."""
        before = self.model.config._attn_implementation
        self.attend_through_seam()
        try:
            self.model.base_model(input_ids=input_ids, use_cache=False)
        finally:
            self._attend_by(before)

    def attend_through_seam(self) -> None:
        """Let every layer attend through our function, ordinary ones too."""
        self._attend_by(NAME)

    def attention_settings(self) -> dict[str, Any]:
        """Return those of `SETTINGS` that the configuration has, as plain values for JSON."""
        values = self.model.config.to_dict()
        return json.loads(json.dumps({name: values[name] for name in SETTINGS if name in values}))

    def check_dropout(self) -> None:
        """Raise UnsupportedError where a layer has attention dropout: all of them attend through our function then."""
        if rates := [rate for attention in self._attention if (rate := attention.attention_dropout)]:
            raise UnsupportedError(no_dropout(rates[0]))

    def choose_function(self) -> None:
        """Let the model attend through our function while heads are edited, and as before once none is.

        Other models may share its configuration, which names the function: it gets one of its own, and keeps it.
        """
        states = [state for attention in self._attention if (state := state_of(attention)) is not None]
        before = next((state.before for state in states if state.before is not None), None)
        if not all(state.layout.ordinary for state in states):
            if before is None:
                self._take_own_config()
            for state in states:
                state.before = before or self.model.config._attn_implementation
            self.attend_through_seam()
            if hasattr(type(self.model), GENERATED_LENGTH):
                setattr(self.model, GENERATED_LENGTH, partial(check_generated_length, self.model))
            if hasattr(type(self.model), SAVE):
                setattr(self.model, SAVE, partial(save_with_heads, self))
                mark_(self.model.config)
        elif before is not None:
            for state in states:
                state.before = None
            self._attend_by(before)
            for name in (GENERATED_LENGTH, SAVE):
                vars(self.model).pop(name, None)
            unmark_(self.model.config)

    def remember(self, event: dict[str, Any]) -> None:
        """Keep what is known of an event with the configuration, for the model card."""
        if (marked := mark_of(self.model.config)) is not None:
            marked["events"].append(event)

    def _take_own_config(self) -> None:
        shared, own = self.model.config, copy.deepcopy(self.model.config)
        for module in self.model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own

    def _attend_by(self, name: str) -> None:
        """Let the model attend through the function of this name in transformers."""
        if name == NAME:
            register()
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)
