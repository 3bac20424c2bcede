"""How to find and edit attention in each supported model family."""

from torch import nn

from saf.adapters.gpt import GPTAdapter
from saf.adapters.llama import LlamaAdapter
from saf.adapters.site import Adapter, Site
from saf.errors import UnsupportedError

ADAPTERS: tuple[type[Adapter], ...] = (GPTAdapter, LlamaAdapter)

__all__ = ["ADAPTERS", "Adapter", "Site", "adapter_for", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module under `torch.compile` and data-parallel wrappers."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrap(inner)
    return model


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model; raise UnsupportedError for a family nobody has described."""
    inner = unwrap(model)
    for adapter in ADAPTERS:
        if (found := adapter.of(inner)) is not None:
            return found
    names = ", ".join(adapter.family for adapter in ADAPTERS)
    raise UnsupportedError(f"{type(inner).__name__} is not a supported model; families known here: {names}")
