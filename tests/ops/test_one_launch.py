"""Compiled code of few tokens launches the kernel itself."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saf.machine import cuda_graphs as cuda_graph
from saf.ops import FrozenHeads, mixed_attention, projected_attention
from saf.ops.inference import one_launch as few_tokens
from tests.ops.counted_graphs import CountedGraphs
from tests.ops.hard_patterns import hard_patterns

pytest.importorskip("triton", reason="Triton is not installed")
HALF = torch.bfloat16


def prepare(length: int = 64) -> FrozenHeads:
    return FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], length), dtype=HALF, kv_head=range(4))


def operands(length: int = 40, dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, count, length, dim, dtype=HALF) for count in (2, 2, 4)]


class Called(torch.nn.Module):
    """A layer's frozen heads as a module that can be called."""

    def __init__(self, frozen: FrozenHeads):
        super().__init__()
        self.frozen = frozen

    def forward(self, *heads):
        return mixed_attention(*heads, self.frozen)


@torch.no_grad()
def test_code_compiled_for_one_shape_launches_it_itself(monkeypatch):
    """On tensors that only say they are on CUDA: one shape has the kernel in its graph, several have the operator."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(few_tokens, "fused_obstacle", lambda device, dtype: None)
    monkeypatch.setattr(few_tokens, "_measured", lambda device: True)
    frozen, counted = prepare(few_tokens.SHORT + 100), CountedGraphs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: projected_attention(*x, frozen, weight), fullgraph=True, backend=counted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, table in frozen._buffers.items():
            frozen._buffers[name] = torch.empty_like(table, device="cuda")
        weight = torch.empty(6, 32, device="cuda", dtype=HALF)

        def inputs(length: int) -> list[torch.Tensor]:
            return [torch.empty(2, n, length, 8, device="cuda", dtype=HALF) for n in (2, 2, 4)]

        def contents(graph) -> list[bool]:
            names = [str(node.target) for node in graph.graph.nodes]
            return [any(word in name for name in names) for word in ("triton_kernel_wrapper", "saf.inference")]

        def launched(length: int, *, dynamic: bool = False, turned: int | None = None) -> list[bool]:
            heads = inputs(length)
            for x in heads if dynamic else []:
                torch._dynamo.mark_dynamic(x, 2)
            if turned is not None:
                heads[turned] = heads[turned].new_empty(2, heads[turned].shape[1], 8, length).transpose(2, 3)
            torch._dynamo.reset()
            assert compiled(*heads).shape == (2, length, 6)
            return contents(counted.graphs[-1])

        assert launched(40) == [True, False]
        assert launched(few_tokens.SHORT + 1) == [True, False]
        with cuda_graph._for_replay():
            assert launched(40) == [True, False]
            assert launched(few_tokens.SHORT + 1) == [False, True]
        assert [launched(40, turned=which) for which in range(3)] == [[False, True]] * 3
        torch._dynamo.reset()
        counted.graphs.clear()
        for _ in range(2):
            compiled(*inputs(few_tokens.SHORT + 1))
            with cuda_graph._for_replay():
                compiled(*inputs(few_tokens.SHORT + 1))
        assert [contents(graph) for graph in counted.graphs] == [[True, False], [False, True]]
        for strict in (True, False):
            exported = torch.export.export(Called(frozen), tuple(inputs(40)), strict=strict)
            assert contents(exported) == [False, True]
        monkeypatch.setattr(few_tokens, "HOST_BOUND", 0)
        assert launched(few_tokens.SHORT + 1) == [False, True]
        assert launched(40, dynamic=True) == [False, True]
