"""Llama-like models of transformers: separate projections without biases, rotary positions, grouped queries or not.

Their own forward pass stays. It reads the number of heads off the projections' sizes, so fewer query rows flow through
to the attention function, which is ours (`saf.adapters.llama_attention`).
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters.llama_attention import NAME, HeadState, check_function, register
from saf.adapters.site import Sink
from saf.errors import UnsupportedError
from saf.heads import HeadLayout
from saf.ops import FrozenHeads

ATTENTION = ("LlamaAttention", "MistralAttention", "Qwen3Attention")
"""Attention classes whose forward pass is known to fit."""
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


class LlamaSite:
    """An attention layer; its heads' state is a submodule, `saf`."""

    def __init__(self, adapter: "LlamaAdapter", attention: Any):
        self._adapter = adapter
        self.attention = attention
        if not hasattr(attention, "saf"):
            config = attention.config
            attention.saf = HeadState(HeadLayout(config.num_attention_heads, config.num_key_value_heads))
            attention.register_forward_pre_hook(check_function)
        self._state: HeadState = attention.saf

    @property
    def layout(self) -> HeadLayout:
        """Order of the heads."""
        return self._state.layout

    @property
    def frozen(self) -> FrozenHeads | None:
        """The frozen heads' tables."""
        return self._state.frozen

    @property
    def removed(self) -> dict[int, dict[str, Tensor]]:
        """Rows taken out at freezing."""
        return self._state.removed

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.attention.head_dim

    def projections(self) -> dict[str, tuple[Tensor, int]]:
        """Return parameters by role with the dimension along which heads lie."""
        return {role: (getattr(self.attention, name).weight, int(role == "output")) for role, name in ROLES.items()}

    def check(self, layout: HeadLayout) -> None:
        """Raise UnsupportedError for a layout without live heads, and for attention that is not plainly causal."""
        if not layout.num_live:
            raise UnsupportedError(
                f"layer {self.attention.layer_idx}: {self._adapter.family} need a live head in every layer; freeze "
                f"{layout.num_heads - 1} of {layout.num_heads} at most"
            )
        if getattr(self.attention, "sliding_window", None) is not None:
            raise UnsupportedError(
                f"layer {self.attention.layer_idx} attends within a sliding window, which frozen heads do not know; "
                "leave its heads out with exclude, and keep inputs within the window"
            )

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None) -> None:
        """Take another layout with its frozen heads; the model attends through our function while it has any."""
        self._state.take(layout, frozen, self.attention.q_proj.weight.device)
        for name in ROLES.values():
            linear = getattr(self.attention, name)
            linear.out_features, linear.in_features = linear.weight.shape
        self._adapter.settle()

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name, where the model attends through our function."""
        self._state.kernel = kernel

    def capture(self, sink: Sink) -> torch.utils.hooks.RemovableHandle:
        """Call `sink(query, key)` in every pass of `LlamaAdapter.run`, or of a model that has frozen heads."""
        handle = torch.utils.hooks.RemovableHandle(self._state.sinks)
        self._state.sinks[handle.id] = sink
        return handle


class LlamaAdapter:
    """Llama, Mistral and Qwen3 of transformers."""

    family = "llama-like (Llama, Mistral and Qwen3 of transformers)"
    keep_live = 1

    def __init__(self, model: Any):
        self.model = model
        self._attention = [module for module in model.modules() if type(module).__name__ in ATTENTION]
        register()
        for attention in self._attention:
            linears = [getattr(attention, name) for name in ROLES.values()]
            if strange := [type(linear) for linear in linears if type(linear) is not nn.Linear]:
                raise UnsupportedError(
                    f"projections must be plain nn.Linear, got {strange[0].__module__}.{strange[0].__name__}; "
                    "merge adapters into the weights "
                    "(merge_and_unload of peft), and load weights unquantised"
                )
            if any(linear.bias is not None for linear in linears):
                raise UnsupportedError("projections with biases are not supported; this model has attention_bias=True")

    @classmethod
    def of(cls, model: nn.Module) -> "LlamaAdapter | None":
        """Return the adapter when the model is one of transformers with attention of a known class."""
        # Models of several parts, as for images, have a config of their own for text.
        text = hasattr(getattr(model, "config", None), "max_position_embeddings")
        known = text and hasattr(model, "set_attn_implementation")
        return cls(model) if known and any(type(m).__name__ in ATTENTION for m in model.modules()) else None

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self.model.config.max_position_embeddings

    def sites(self) -> list[LlamaSite]:
        """Return the attention layers in order."""
        return [LlamaSite(self, attention) for attention in self._attention]

    def run(self, input_ids: Tensor) -> None:
        """Run the layers without the output layer."""
        with self._attending(NAME):
            self.model.base_model(input_ids=input_ids, use_cache=False)

    def settle(self) -> None:
        """Let the model attend through our function while heads are frozen, and as before once none is."""
        states: list[HeadState] = [attention.saf for attention in self._attention if hasattr(attention, "saf")]
        before = states[0].before
        if any(state.frozen is not None for state in states):
            current = self.model.config._attn_implementation
            for state in states:
                state.before = state.before or current
            self.attend(NAME)
        elif before is not None:
            for state in states:
                state.before = None
            self.attend(before)

    def attend(self, name: str) -> None:
        """Let the model attend through the function of this name in transformers."""
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    @contextmanager
    def _attending(self, name: str):
        before = self.model.config._attn_implementation
        self.attend(name)
        try:
            yield
        finally:
            self.attend(before)
