"""What every edit of a model in place has in common."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from saf.errors import UnsupportedError

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")


def editing(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Run an edit outside inference mode, whose tensors could never be trained, and without recording gradients."""

    @wraps(function)
    def edit(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return edit


def check_unwrapped(model: nn.Module) -> None:
    """Raise UnsupportedError for a model in a data-parallel wrapper: it would average gradients of the old shapes."""
    inner: object = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"heads cannot be frozen or undone inside {type(inner).__name__}, which has hooks on the parameters as "
                "they are; pass its .module, then wrap that again"
            )
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
