"""A call captured as a CUDA graph and replayed: one launch, whatever the host would have done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from saf.errors import UnsupportedError

Call = Callable[[], Any]
_to_be_replayed = False


def is_to_be_replayed() -> bool:
    """Whether what is called, or traced by a compiler, is for a `GraphReplay` that is being made."""
    return _to_be_replayed


@contextmanager
def _for_replay() -> Iterator[None]:
    global _to_be_replayed
    _to_be_replayed = True
    try:
        yield
    finally:
        _to_be_replayed = False


class GraphPool:
    """Memory that the graphs of one measurement share; they never run at the same time, nor is their output kept."""

    def __init__(self):
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """The pool, made at first use."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class GraphReplay:
    """A call captured as a CUDA graph: calling this replays it, with one launch."""

    def __init__(self, call: Call, *, device: torch.device, pool: GraphPool, warmup: int = 3):
        """Run `call` on a side stream, then capture it; raise UnsupportedError without CUDA.

        `outcome` is what the captured call returned: every replay writes to the same memory.
        """
        if device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device")
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _for_replay():
            for _ in range(warmup):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=stream), _for_replay():
            self.outcome = call()

    def __call__(self) -> None:
        """Replay."""
        self._graph.replay()
