"""A call captured as a CUDA graph and replayed: one launch, whatever the host would have done."""

from collections.abc import Callable
from typing import Any

import torch

from saf.errors import UnsupportedError

Call = Callable[[], Any]


class GraphPool:
    """Hold memory that the graphs of one measurement share; they never run together, nor is their output kept."""

    def __init__(self):
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """Return the pool, made at first use."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class GraphReplay:
    """Capture a call as a CUDA graph: calling this replays it, with one launch."""

    def __init__(self, call: Call, *, device: torch.device, pool: GraphPool, warmup: int = 3):
        """Run `call` on a side stream, then capture it; raise UnsupportedError without CUDA.

        Make it inside `saf.ops.for_graphs`, so that frozen layers compute as is best in a graph.
        `outcome` is what the captured call returned: every replay writes to the same memory.
        """
        if device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device")
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=stream):
            self.outcome = call()

    def __call__(self) -> None:
        """Replay the graph."""
        self._graph.replay()
