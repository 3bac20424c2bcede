"""The modules around a layer's projections: where its input, its output and the residual stream can be seen."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from saf.adapters import Site
from saf.errors import UnsupportedError


class LayerModules(NamedTuple):
    """The attention module that holds the output projection, the block that holds it, and the values' bias."""

    attention: nn.Module
    block: nn.Module
    value_bias: Tensor | None


def layer_modules(model: nn.Module, site: Site) -> LayerModules:
    """Find a site's modules by the parameters of its projections; raise UnsupportedError when they are not its own."""
    owners = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    value, dimension = site.projections()["value"]
    output = site.projections()["output"][0]
    if id(value) not in owners or id(output) not in owners:
        raise UnsupportedError("this attention layer keeps values or output projection in no parameter of their own")
    path = owners[id(output)].split(".")
    bias = getattr(model.get_submodule(owners[id(value)]), "bias", None)
    if len(path) < 3 or (bias is not None and bias.shape != value.shape[dimension : dimension + 1]):
        raise UnsupportedError(f"expected block.attention.projection with its own values; got {'.'.join(path)}")
    return LayerModules(model.get_submodule(".".join(path[:-1])), model.get_submodule(".".join(path[:-2])), bias)


class LayerInputs(NamedTuple):
    """What one forward pass shows of a layer: rotated `[B, heads, T, D]`, and `[B, T, channels]`."""

    query: Tensor
    key: Tensor
    normed: Tensor
    """X, the input of the projections."""
    residual: Tensor
    output: Tensor


def watch_layer(site: Site, modules: LayerModules, sink: Callable[[LayerInputs], None]) -> ExitStack:
    """Call `sink` at the end of every pass through the layer's attention; closing the result ends it."""
    seen: dict[str, Tensor] = {}

    def keep_input(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def attention_output(_module: nn.Module, _args: Any, output: Any) -> None:
        seen["output"] = (output if isinstance(output, Tensor) else output[0]).detach()
        if "query" in seen:
            sink(LayerInputs(**seen))
        seen.clear()

    stack = ExitStack()
    for module, name in ((modules.block, "residual"), (modules.attention, "normed")):
        stack.callback(module.register_forward_pre_hook(keep_input(name), with_kwargs=True).remove)
    stack.enter_context(site.capture(lambda query, key: seen.update(query=query.detach(), key=key.detach())))
    stack.callback(modules.attention.register_forward_hook(attention_output).remove)
    return stack
