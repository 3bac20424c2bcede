"""What one forward pass shows of an attention layer, through hooks on the modules around its projections.

That is the layer's input, its rotated queries and keys, its output, and the residual stream that it is added to.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.adapters import Site, find_rows, rows_of
from saf.errors import UnsupportedError


class Modules(NamedTuple):
    """Hold the attention module with the output projection, and the decoder layer around it."""

    attention: nn.Module
    layer: nn.Module


def modules_of(model: nn.Module, site: Site) -> Modules:
    """Find a site's modules by the parameters of its projections; raise UnsupportedError when they are not its own."""
    owners = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    value, output = (rows_of(site, role).parameter for role in ("value", "output"))
    if id(value) not in owners or id(output) not in owners:
        raise UnsupportedError("this attention layer keeps values or output projection in no parameter of their own")
    path = owners[id(output)].split(".")
    if len(path) < 3:
        raise UnsupportedError(f"expected layer.attention.projection with its own values; got {'.'.join(path)}")
    return Modules(model.get_submodule(".".join(path[:-1])), model.get_submodule(".".join(path[:-2])))


class Seen(NamedTuple):
    """Hold what one forward pass shows of a layer: rotated `[B, heads, T, D]`, and `[B, T, channels]`."""

    query: Tensor
    key: Tensor
    normed: Tensor
    """X, the input of the projections."""
    residual: Tensor
    output: Tensor


def watch(site: Site, modules: Modules, sink: Callable[[Seen], None]) -> ExitStack:
    """Call `sink` at the end of every pass through the layer's attention; closing the result ends it."""
    seen: dict[str, Tensor] = {}

    def keep_input(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def attention_output(_module: nn.Module, _args: Any, output: Any) -> None:
        seen["output"] = (output if isinstance(output, Tensor) else output[0]).detach()
        if "query" in seen:
            sink(Seen(**seen))
        seen.clear()

    stack = ExitStack()
    for module, name in ((modules.layer, "residual"), (modules.attention, "normed")):
        stack.callback(module.register_forward_pre_hook(keep_input(name), with_kwargs=True).remove)
    stack.enter_context(site.capture(lambda query, key: seen.update(query=query.detach(), key=key.detach())))
    stack.callback(modules.attention.register_forward_hook(attention_output).remove)
    return stack


def values_of(site: Site, normed: Tensor, wide: torch.dtype) -> Tensor:
    """Return the values `[..., H_kv, T, D]` of the projections' input `[..., T, channels]`, computed in `wide`."""
    rows, bias = rows_of(site, "value"), find_rows(site, "value_bias")
    weight = rows.of(rows.parameter).movedim(rows.dimension, 0)
    values = normed.to(wide) @ weight.to(wide).T
    if bias is not None:
        values = values + bias.of(bias.parameter).to(wide)
    return values.unflatten(-1, (-1, site.head_dim)).transpose(-3, -2)
