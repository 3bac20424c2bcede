"""What the project asks of a model, answered for each family: `adapter` says what, a file a family answers.

Nothing else tests the class of a model. A new family of transformers is a `Family`, one entry of `FAMILIES`.
"""

from torch import nn

from saf.adapters.adapter import Adapter, LanguageModel, Removed, Rows, Site, find_rows, rows_of
from saf.adapters.gpt import GPTAdapter
from saf.adapters.transformers.adapter import FAMILIES, TransformersAdapter
from saf.adapters.transformers.model import TransformersModel
from saf.errors import UnsupportedError

ADAPTERS: tuple[type[Adapter], ...] = (GPTAdapter, TransformersAdapter)
HOW_TO_ADD = 'docs/huggingface.md, "How to add a family"'
"""Where it is said how a family is added."""

__all__ = [
    "ADAPTERS",
    "FAMILIES",
    "Adapter",
    "LanguageModel",
    "Removed",
    "Rows",
    "Site",
    "adapter_for",
    "find_rows",
    "language_model",
    "longest_input",
    "rows_of",
    "unwrap",
]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module under `torch.compile` and data-parallel wrappers."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrap(inner)
    return model


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model; raise UnsupportedError for a family, or attention, that nobody has described."""
    inner = unwrap(model)
    if (found := _known(inner)) is None:
        names = ", ".join(adapter.family for adapter in ADAPTERS)
        raise UnsupportedError(
            f"{type(inner).__name__} is not a supported model; families known here: {names}. "
            f"{HOW_TO_ADD} of the project's repository, tells how one more is added"
        )
    found.check_attention()
    return found


def language_model(model: nn.Module) -> LanguageModel:
    """Return what evaluates a model: its adapter, or any other causal model in the manner of transformers."""
    inner = unwrap(model)
    return _known(inner) or TransformersModel(inner)


def longest_input(model: nn.Module) -> int | None:
    """Return the most tokens that a model takes: its positions, or fewer that its patterns cover; None for no limit."""
    known = _known(unwrap(model))
    limits = [site.frozen.max_length for site in known.sites() if site.frozen is not None] if known else []
    positions = language_model(model).max_length
    return min([*limits, *([] if positions is None else [positions])], default=None)


def _known(model: nn.Module) -> Adapter | None:
    """Return the adapter of an unwrapped model; None for a family that no adapter knows."""
    return next((found for adapter in ADAPTERS if (found := adapter.of(model)) is not None), None)
