"""Models of transformers whose family is known: their attention layers as sites, whatever the family.

What differs between families is in their `Family`, a file each; `FAMILIES` lists them.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from saf.adapters.adapter import Adapter, Removed, Sink
from saf.adapters.transformers.attention import (
    NAME,
    attach_state,
    check_function,
    choose_forward,
    detach_idle_state,
    is_stock,
    layout_of,
    no_dropout,
    register,
    replaced_forward,
    state_of,
)
from saf.adapters.transformers.entrance import watch_entrance
from saf.adapters.transformers.family import CONV1D, Family
from saf.adapters.transformers.folder import (
    UPLOAD,
    mark_,
    mark_of,
    save_with_heads,
    tell_of_undoing_,
    unmark_,
    watch_owners,
)
from saf.adapters.transformers.gemma import GEMMA2, GEMMA3
from saf.adapters.transformers.generation import GENERATED, watch_generation
from saf.adapters.transformers.gpt2 import GPT2
from saf.adapters.transformers.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from saf.adapters.transformers.model import TransformersModel
from saf.adapters.transformers.phi3 import PHI3
from saf.errors import UnsupportedError
from saf.heads import BIAS, HeadLayout
from saf.ops import FrozenHeads

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, GEMMA2, GEMMA3)
"""Families whose attention layers are known."""
EAGER = "eager"
"""The attention function of transformers that does all that the models' code asks of it."""
SAVE = "save_pretrained"
"""What writes the model's folder, also for a `Trainer` and for `push_to_hub`."""


class TransformersSite:
    """Show an attention layer as a site; while heads of it are frozen, their state is a submodule of it, `saf`."""

    def __init__(self, adapter: "TransformersAdapter", attention: Any):
        self._adapter, self._family = adapter, adapter.known
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
        linears = {name: getattr(self.attention, module) for name, module in self._family.projections.items()}
        transposed = self._family.kind == CONV1D
        weights = {name: (linear.weight, int((name == "output") != transposed)) for name, linear in linears.items()}
        # That of the output belongs to no head.
        inputs = {name: linear.bias for name, linear in linears.items() if name != "output"}
        return weights | {name + BIAS: (bias, 0) for name, bias in inputs.items() if bias is not None}

    @property
    def scale(self) -> float | None:
        """Return what products of queries and keys are multiplied by."""
        return self._family.scale(self.attention)

    @property
    def soft_cap(self) -> float | None:
        """Return the cap of the logits, None where the layer has none."""
        return None if self._family.soft_cap is None else getattr(self.attention, self._family.soft_cap)

    @property
    def stays_ordinary(self) -> str | None:
        """Return that the layer attends within a window of its own, None where it does not."""
        window = getattr(self.attention, "sliding_window", None)
        return (
            None
            if window is None
            else (
                f"layer {self.attention.layer_idx} attends within a sliding window of {window} positions, which frozen "
                "heads do not know"
            )
        )

    @property
    def norm_after(self) -> bool:
        """Return whether a norm of what the layer puts out comes before the residual stream."""
        return self._family.norm_after

    def check(self, layout: HeadLayout) -> None:
        """Raise UnsupportedError for attention dropout, quantised or offloaded weights, acausal attention, other code.

        Hooks of accelerate that move inputs between devices stay around the layer's forward pass.
        """
        self._adapter.check_dropout()
        if self.layout.ordinary or not layout.ordinary:  # what was chosen since goes with the last edited head
            self._adapter.check_function()
        projections = [getattr(self.attention, name) for name in self._family.projections.values()]
        if any(each.weight.is_meta and hasattr(each, "_hf_hook") for each in projections):
            raise UnsupportedError(
                f"the weights of layer {self.attention.layer_idx} are offloaded, in memory during its passes alone, "
                "where rows of heads cannot be moved; give attention layers devices in the device_map"
            )
        if layout.frozen and self.stays_ordinary is not None:
            raise UnsupportedError(f"{self.stays_ordinary}; leave its heads live")
        if layout.frozen and not getattr(self.attention, "is_causal", True):
            raise UnsupportedError(
                f"layer {self.attention.layer_idx} attends to later tokens too; frozen heads are causal"
            )
        own = replaced_forward(self.attention) or type(self.attention).forward
        if not layout.ordinary and own is not self._family.forward and not is_stock(own):
            raise UnsupportedError(
                f"the forward pass of layer {self.attention.layer_idx} was replaced, and a layer with edited heads "
                "needs that of transformers; put it back"
            )

    def assign(self, layout: HeadLayout, frozen: FrozenHeads | None, removed: Removed) -> None:
        """Take another layout; the model attends through our function while any layer has frozen heads."""
        self._adapter.forget(self.attention, set(layout.live) - set(self.layout.live))
        attach_state(self.attention, self._family).take(layout, frozen, removed)
        for name in self._family.projections.values():
            linear = getattr(self.attention, name)
            if self._family.kind == CONV1D:
                linear.nx, linear.nf = linear.weight.shape
            else:
                linear.out_features, linear.in_features = linear.weight.shape
                # What quantises linear layers passes over this class of PyTorch; it fails at weights without entries.
                linear.__class__ = nn.Linear if linear.weight.numel() else NonDynamicallyQuantizableLinear
        if self._family.tell_sizes is not None:
            self._family.tell_sizes(self.attention, layout)
        choose_forward(self.attention, self._family)
        self._adapter.choose_function()
        detach_idle_state(self.attention)

    def pin(self, kernel: str) -> None:
        """Let live heads run on an SDPA kernel by name, where the model attends through our function."""
        attach_state(self.attention, self._family).kernel = kernel
        detach_idle_state(self.attention)

    @contextmanager
    def capture(self, sink: Sink) -> Iterator[None]:
        """Call `sink(query, key)` in every pass of `TransformersAdapter.run`, or of a model that has frozen heads."""
        sinks = attach_state(self.attention, self._family).sinks
        handle = RemovableHandle(sinks)
        sinks[handle.id] = sink
        try:
            yield
        finally:
            handle.remove()
            detach_idle_state(self.attention)


class TransformersAdapter(TransformersModel, Adapter):
    """Answer for models of transformers of the families in `FAMILIES`."""

    family = f"{', '.join(family.name for family in FAMILIES)} of transformers"
    saves_weights = False

    def __init__(self, model: Any, known: Family):
        super().__init__(model)
        self.known = known
        self._attention = [module for module in model.modules() if type(module).__name__ == known.attention]
        for attention in self._attention:
            linears = [type(getattr(attention, name)) for name in known.projections.values()]
            linears = [nn.Linear if kind is NonDynamicallyQuantizableLinear else kind for kind in linears]
            if strange := [kind for kind in linears if f"{kind.__module__}.{kind.__qualname__}" != known.kind]:
                wanted = "Conv1D" if known.kind == CONV1D else "nn.Linear"
                raise UnsupportedError(
                    f"projections must be plain {wanted}, got {strange[0].__module__}.{strange[0].__name__}; "
                    "merge adapters into the weights (merge_and_unload of peft), since freezing takes rows of heads "
                    "out of these alone, and load weights unquantised"
                )

    @classmethod
    def of(cls, model: nn.Module) -> "TransformersAdapter | None":
        """Return the adapter when the model is one of transformers with attention of a known class."""
        # Models of several parts, as for images, have a config of their own for text.
        text = hasattr(getattr(model, "config", None), "max_position_embeddings")
        if not (text and hasattr(model, "set_attn_implementation")):
            return None
        names = {type(module).__name__ for module in model.modules()}
        return next((cls(model, family) for family in FAMILIES if family.attention in names), None)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self.model.config.num_hidden_layers

    def check_attention(self) -> None:
        """Raise UnsupportedError for layers that attend to an encoder's output, and where a layer has none of its own.

        Such models can be evaluated.
        """
        if any(getattr(attention, "is_cross_attention", False) for attention in self._attention):
            raise UnsupportedError(
                f"this {type(self.model).__name__} has cross-attention to an encoder's output, whose heads can be "
                "neither measured nor frozen: open or build it as a decoder alone (from_pretrained(..., "
                "add_cross_attention=False))"
            )
        super().check_attention()

    def sites(self) -> list[TransformersSite]:
        """Return the attention layers in order."""
        return [TransformersSite(self, attention) for attention in self._attention]

    def run(self, input_ids: Tensor) -> None:
        """Run the layers through our function, without the output layer.

        Raises UnsupportedError for dropped caps, and as `check_function`.
        """
        self.check_function()
        if self.drops_caps:
            raise UnsupportedError(
                "this model's attention logits have a soft cap, which its attention function, 'sdpa', leaves out; call "
                f"model.set_attn_implementation({EAGER!r}), or open it with attn_implementation={EAGER!r}"
            )
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
        """Return those of the family's settings that the configuration has, as plain values for JSON."""
        values = self.model.config.to_dict()
        return json.loads(json.dumps({name: values[name] for name in self.known.settings if name in values}))

    def check_dropout(self) -> None:
        """Raise UnsupportedError where a layer has attention dropout: all of them attend through our function then."""
        if rates := [rate for attention in self._attention if (rate := self.known.dropout(attention))]:
            raise UnsupportedError(no_dropout(rates[0], self.known))

    def check_function(self) -> None:
        """Raise UnsupportedError where layers attend by a function that may compute something else than softmax."""
        for attention in self._attention:
            check_function(attention)

    @property
    def drops_caps(self) -> bool:
        """Return whether ordinary layers attend without their soft caps, as transformers 5.17 lets SDPA do."""
        capped = any(site.soft_cap is not None for site in self.sites())
        return capped and self.model.config._attn_implementation == "sdpa"

    def apply_caps(self) -> None:
        """Let ordinary layers attend with their soft caps where they would not."""
        if self.drops_caps:
            self._attend_by(EAGER)

    def choose_function(self) -> None:
        """Let the model attend through our function while heads are edited, and as before once none is.

        Other models may share its configuration, which names the function: it gets one of its own, and keeps it.
        """
        states = [state for attention in self._attention if (state := state_of(attention)) is not None]
        self._watch_entrances()
        everywhere = tuple(layout_of(attention) for attention in self._attention)
        for state in states:
            state.everywhere = everywhere
        before = next((state.before for state in states if state.before is not None), None)
        if not all(state.layout.ordinary for state in states):
            if before is None:
                self._take_own_config()
            for state in states:
                state.before = before or (EAGER if self.drops_caps else self.model.config._attn_implementation)
            self.attend_through_seam()
            watch_generation(self.model)
            for part in self._saved():
                setattr(
                    part, SAVE, partial(save_with_heads, self if part is self.model else type(self)(part, self.known))
                )
                mark_(part.config)
                # Of a decoder alone, a model with an output layer may be around it.
                watch_owners(part, part is self.model and part.base_model is part)
        elif before is not None:
            for state in states:
                state.before = None
            self._attend_by(before)
            for part in self._saved():
                for name in (*GENERATED, SAVE, UPLOAD):
                    vars(part).pop(name, None)
                unmark_(part.config)
                watch_owners(part, False)

    def _watch_entrances(self) -> None:
        """Let the decoder refuse what is longer than the patterns of some layer, before any of them computes."""
        for part in self._saved():
            if part.base_model is part:
                watch_entrance(part)

    def remember(self, event: dict[str, Any]) -> None:
        """Keep what is known of an event with the configuration, for the model card."""
        if (marked := mark_of(self.model.config)) is not None:
            marked["events"].append(event)
            marked.pop("cost", None)  # of the heads before

    def forget(self, attention: nn.Module, heads: set[int]) -> None:
        """Keep with the configuration that heads of a layer were undone."""
        tell_of_undoing_(self.model.config, self._attention.index(attention), heads)

    def _saved(self) -> list[Any]:
        """Return the model and its parts that people may save by themselves, as the model under an adapter of peft."""
        return [module for module in self.model.modules() if hasattr(type(module), SAVE)]

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
