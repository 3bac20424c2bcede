"""What a family of transformers' models says of its attention layers: all that the adapter asks, as one `Family`.

A model's own forward pass stays. It reads the number of heads off the projections' sizes, so fewer query rows flow
through to the attention function, which is ours (`saf.adapters.transformers.attention`). A family whose forward pass
takes these numbers from elsewhere tells them (`tell_sizes`) or brings a forward pass for layers with edited heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saf.heads import HeadLayout, roles_of

SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")
"""Fields of a configuration that shape the attention of most families beside the weights."""
LINEAR, CONV1D = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
"""Kinds of projections: a weight `[out, in]`, and one `[in, out]`."""


def attention_dropout(attention: Any) -> float:
    """Return the rate of dropout of attention weights of most families."""
    return attention.attention_dropout


def scaling(attention: Any) -> float | None:
    """Return what products of queries and keys are multiplied by in most families."""
    return attention.scaling


@dataclass(frozen=True, kw_only=True)
class Family:
    """Say how the attention layers of a family of models are built; what is left out is as in Llama."""

    name: str
    """What people call the family."""
    attention: str
    """The class of its attention layers."""
    projections: Mapping[str, str]
    """The layer's modules by the role of their rows, or the roles whose rows lie in one weight: `query_key_value`."""
    kind: str = LINEAR
    """The class of the projections."""
    dropout: Callable[[Any], float] = attention_dropout
    no_dropout: str = "set attention_dropout of its attention layers to 0 (layer.self_attn.attention_dropout = 0.0)"
    """How people switch that dropout off in a model that is open."""
    dropout_setting: str = "attention_dropout"
    """The field of the configuration with its rate."""
    scale: Callable[[Any], float | None] = scaling
    soft_cap: str | None = None
    """The layer's attribute with the cap of its logits."""
    settings: tuple[str, ...] = SETTINGS
    """Fields of the configuration that shape attention beside the weights."""
    forward: Callable[..., Any] | None = None
    """What a layer with edited heads runs in the place of its class's forward pass."""
    tell_sizes: Callable[[Any, HeadLayout], None] | None = None
    """Tell a layer how many heads each role has left, where its forward pass does not read that off the weights."""
    output: Callable[[Any, Tensor], Tensor] | None = None
    """What a layer makes of its heads' outputs, if more than the output projection."""
    norm_after: bool = False
    """Whether a norm of what the layer puts out comes before the residual stream."""
    particular: str = ""
    """What sets it apart for those who freeze its heads, in a line."""

    def module(self, attention: Any, role: str) -> Any:
        """Return the module of a layer that holds the rows of a role."""
        return next(getattr(attention, module) for name, module in self.projections.items() if role in roles_of(name))
