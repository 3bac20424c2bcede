"""A point of a benchmark finds nothing that another one compiled or allocated."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

RECOMPILES = 64
"""Graphs of one function that the compiler may hold: an arm each, and some to spare."""


@contextmanager
def clean_process() -> Iterator[None]:
    """Begin a point with an empty compiler and allocator cache, and leave them so.

    Compiled forward and backward graphs are always traced here: the attention kernel that an arm pins is no part
    of the key under which the cache of such graphs would hand them to another arm.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))  # type: ignore[attr-defined]
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))  # type: ignore[attr-defined]
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
