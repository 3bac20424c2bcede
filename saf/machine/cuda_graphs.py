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
        self._stream: torch.cuda.Stream | None = None

    @property
    def handle(self) -> Any:
        """Return the pool, made at first use."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of graphs that are captured with `same_stream`, made at first use."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


class GraphReplay:
    """Capture a call as a CUDA graph: calling this replays it, with one launch."""

    def __init__(
        self, call: Call, *, device: torch.device, pool: GraphPool, warmup: int = 3, same_stream: bool = False
    ):
        """Run `call` on a side stream, then capture it; raise UnsupportedError without CUDA.

        With `same_stream` that is the pool's: memory that a graph is done with serves another one of its stream alone.

        Make it inside `saf.ops.for_graphs`, so that frozen layers compute as is best in a graph.
        `outcome` is what the captured call returned: every replay writes to the same memory.
        """
        if device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device")
        stream = pool.stream(device) if same_stream else torch.cuda.Stream(device)
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
