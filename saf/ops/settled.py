"""Calls of few tokens, once more: where the host sets the pace, what it does for a layer is settled once a layout.

Checks, tables and launch follow from the layout of the operands. The next call of one launches at once, without the
dispatcher in between, which takes the host longer than the launch. Compiled code and captures take the operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from saf.ops.operator import layout_of

MOST = 256

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Takes query, key, value and the projection, if any, and returns what `whole_layer.infer_layer` does."""


class SettledCalls:
    """What mixes a layer's heads, by the layout of its operands; copies and pickles start with none."""

    def __init__(self):
        self._mix: dict[tuple[Any, ...], Mix | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave compiled kernels behind."""
        return SettledCalls, ()

    def __contains__(self, layout: tuple[Any, ...]) -> bool:
        return layout in self._mix

    def get(self, layout: tuple[Any, ...]) -> Mix | None:
        """Return what mixes heads of this layout; None where nothing is settled."""
        return self._mix.get(layout)

    def keep(self, layout: tuple[Any, ...], mix: Mix | None) -> None:
        """Remember what mixes heads of a layout, or with None that its calls stay as they are."""
        if len(self._mix) >= MOST:
            self._mix.clear()
        self._mix[layout] = mix

    def clear(self) -> None:
        """Forget all: tables have moved."""
        self._mix.clear()


def layout_of_call(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Any, ...] | None:
    """Return all that a call depends on but memory; None where an operator has to be seen: it is traced or captured."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    layouts = layout_of(query), layout_of(key), layout_of(value)
    return _tuned, *layouts, type(query), type(key), type(value), *options


_tuned = 0
"""How often tuning changed what graphs launch in this process: calls settled before do not launch that once."""


def unsettle_all() -> None:
    """Settle every layout again: what graphs launch has changed."""
    global _tuned
    _tuned += 1
