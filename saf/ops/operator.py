"""Registering operators that cost the host little to call."""

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator `name` ("saf::..."), for every device, and return the operator.

    The schema is read off the annotations. The function must neither change its arguments nor return one of them.
    It does what `torch.library.custom_op` does without its checks in every call, which take the host longer than all
    else that an operator of one launch does.
    """

    def register(function: Callable[..., Any]) -> Any:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", function)
        namespace, short = name.split("::")
        return getattr(getattr(torch.ops, namespace), short).default

    return register
