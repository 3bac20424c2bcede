"""Calls of few tokens, once more: where the host sets the pace, what it does for a layer is settled once a layout.

Checks and launch follow from the layout of the operands. The next call of one launches at once, without the dispatcher
in between, which takes the host longer than the launch. Whatever traces, transforms or captures sees the operator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from saf.ops.operator import layout_of

MOST = 256


class Settled(NamedTuple):
    """How a layer is computed for operands of one layout.

    Attributes:
        run: given query, key, value, the tables and the projection, if any, returns what `infer_layer` does.
        tables: buffers of the layer that are read, in order, by name.
    """

    run: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Tensor | None], Tensor]
    tables: list[tuple[str, "ref[Tensor]"]]


class SettledCalls:
    """What is settled for a layer, by the layout of its operands; deep copies and pickles start with nothing."""

    def __init__(self):
        self._settled: dict[tuple[Any, ...], Settled | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave compiled kernels behind."""
        return SettledCalls, ()

    def find(self, layout: tuple[Any, ...], buffers: Mapping[str, Tensor | None]) -> tuple[Any, list[Any]] | None:
        """Return `Settled.run` and the tables it takes; None where nothing is settled for these buffers."""
        settled = self._settled.get(layout)
        if settled is None:
            return None
        tables = [buffers.get(name) for name, _ in settled.tables]
        if any(table is not known() for table, (_, known) in zip(tables, settled.tables, strict=True)):
            return None
        return settled.run, tables

    def stays(self, layout: tuple[Any, ...]) -> bool:
        """Whether calls of this layout are known to stay as they are."""
        return layout in self._settled and self._settled[layout] is None

    def keep(
        self, layout: tuple[Any, ...], run: Any, tables: Sequence[Tensor], buffers: Mapping[str, Tensor | None]
    ) -> None:
        """Remember what `run` does with those of the `buffers` that are `tables`; None: that calls stay as they are."""
        if len(self._settled) >= MOST:
            self._settled.clear()
        names = {id(buffer): name for name, buffer in buffers.items()}
        read = [(names[id(table)], ref(table)) for table in tables]
        self._settled[layout] = None if run is None else Settled(run, read)

    def clear(self) -> None:
        """Forget all: the layer has moved."""
        self._settled.clear()


def layout_of_call(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Any, ...] | None:
    """Return all that a call depends on but memory and tables; None where the operator has to be seen."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None
    transformed = torch._C._functorch.maybe_current_level()  # type: ignore[attr-defined]
    if transformed is not None or {type(query), type(key), type(value)} != {Tensor}:
        return None
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return _tuned, layout_of(query), layout_of(key), layout_of(value), *options


_tuned = 0
"""How often tuning changed what graphs launch: a settled call would not compile that, as the next one has to."""


def unsettle_all() -> None:
    """Have the next call of every layout go through the operator: what graphs launch has changed."""
    global _tuned
    _tuned += 1
