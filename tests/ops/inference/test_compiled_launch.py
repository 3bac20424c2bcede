"""Compiled code of few tokens launches the kernel itself; on tensors that only say they are on CUDA."""

from contextlib import suppress

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from saf.ops import FrozenHeads, for_graphs, mixed_attention
from saf.ops.inference import one_launch
from tests.ops.counted_graphs import CountedGraphs
from tests.ops.hard_patterns import hard_patterns
from tests.ops.projected import projected_attention

pytest.importorskip("triton", reason="Triton is not installed")
HALF = torch.bfloat16
LENGTH = one_launch.SHORT + 100
VISIBLE, OPERATOR = "saf.fused_visible", "saf.inference"
"""The operator that a compiler looks into, and the one that decides in the call."""


@pytest.fixture
def frozen(monkeypatch):
    """Frozen heads whose tables pretend to be on CUDA, in a mode where all tensors can."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(one_launch, "fused_obstacle", lambda device, dtype: None)
    monkeypatch.setattr(one_launch, "_measured", lambda device: True)
    heads = FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], LENGTH), dtype=HALF, kv_head=range(4))
    torch._dynamo.reset()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        for name, table in heads._buffers.items():
            heads._buffers[name] = torch.empty_like(table, device="cuda")
        yield heads


def operands(length: int) -> list[torch.Tensor]:
    return [torch.empty(2, n, length, 8, device="cuda", dtype=HALF) for n in (2, 2, 4)]


def compiled_layer(frozen: FrozenHeads, backend):
    weight = torch.empty(6, 32, device="cuda", dtype=HALF)
    return torch.compile(lambda *x: projected_attention(*x, frozen, weight), fullgraph=True, backend=backend)


def operators(graph) -> list[str]:
    """Return which of the two operators a graph has."""
    names = [str(node.target) for node in graph.graph.nodes]
    return [word for word in (VISIBLE, OPERATOR) if any(word in name for name in names)]


def test_one_shape_of_few_tokens_has_the_kernel_and_others_the_operator(frozen, monkeypatch):
    counted = CountedGraphs()
    layer = compiled_layer(frozen, counted)

    def found(length: int, *, dynamic: bool = False, turned: int | None = None) -> list[str]:
        heads = operands(length)
        for x in heads if dynamic else []:
            torch._dynamo.mark_dynamic(x, 2)
        if turned is not None:
            heads[turned] = heads[turned].new_empty(2, heads[turned].shape[1], 8, length).transpose(2, 3)
        torch._dynamo.reset()
        assert layer(*heads).shape == (2, length, 6)
        return operators(counted.graphs[-1])

    assert found(40) == found(LENGTH) == [VISIBLE]
    with for_graphs(frozen):
        assert found(40) == [VISIBLE]
        assert found(LENGTH) == [OPERATOR]
    assert [found(40, turned=which) for which in range(3)] == [[OPERATOR]] * 3
    assert found(40, dynamic=True) == [OPERATOR]
    monkeypatch.setattr(one_launch, "HOST_BOUND", 0)
    assert found(LENGTH) == [OPERATOR]


def test_code_for_calls_is_compiled_once_more_for_graphs_and_both_are_kept(frozen):
    counted = CountedGraphs()
    layer = compiled_layer(frozen, counted)
    for _ in range(2):
        layer(*operands(LENGTH))
        with for_graphs(frozen):
            layer(*operands(LENGTH))
    assert [operators(graph) for graph in counted.graphs] == [[VISIBLE], [OPERATOR]]


def test_the_compiler_looks_into_the_operator(frozen):
    graphs = []

    def keep(graph, examples):
        graphs.append(graph)
        return graph

    layer = compiled_layer(frozen, aot_autograd(fw_compiler=keep, inference_compiler=keep))
    with suppress(RuntimeError):  # the graph cannot run here
        layer(*operands(40))
    names = [str(node.target) for node in graphs[-1].graph.nodes]
    assert sum("triton_kernel_wrapper" in name for name in names) == 1
    assert not any("saf." in name for name in names)


class Called(torch.nn.Module):
    """A layer's frozen heads as a module that can be called."""

    def __init__(self, frozen: FrozenHeads):
        super().__init__()
        self.frozen = frozen

    def forward(self, *heads):
        return mixed_attention(*heads, self.frozen)


@pytest.mark.parametrize(("strict", "kept"), [(True, VISIBLE), (False, OPERATOR)])
def test_exported_programs_keep_an_operator(frozen, strict, kept):
    exported = torch.export.export(Called(frozen), tuple(operands(40)), strict=strict)
    assert operators(exported) == [kept]
    assert not any("triton_kernel_wrapper" in str(node.target) for node in exported.graph.nodes)
