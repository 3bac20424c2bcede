"""Few tokens on a CUDA device: one launch, called, compiled and in a graph, with the numbers of the other way."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from saf.bench.record import kernels_of
from saf.machine import GraphPool, GraphReplay
from saf.ops import FrozenHeads, attention_products, for_graphs, mixed_attention, summed
from saf.ops.fused import SHORT
from tests.ops.hard_patterns import hard_patterns

pytestmark = pytest.mark.gpu


def projected_attention(*operands) -> torch.Tensor:
    return summed(attention_products(*operands))


CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "dim"), [(1, 64), (129, 64), (512, 64), (1000, 64), (1100, 64), (900, 128), (70, 96)]
)
def test_one_launch_with_the_numbers_of_the_reference(length, dim, dtype):
    generator = torch.Generator("cuda").manual_seed(length)
    inputs = [torch.randn(1, length, n, dim, device="cuda", generator=generator).to(dtype) for n in (2, 2, 4)]
    inputs = [x.transpose(1, 2) for x in inputs]
    patterns = hard_patterns(["decay", "ripple"], 1200, "cuda")

    @torch.no_grad()
    def mix(backend: str, kind: torch.dtype) -> torch.Tensor:
        options = {"backend": backend, "dtype": kind, "device": "cuda", "kv_head": range(4)}
        frozen = FrozenHeads.from_patterns(patterns, **options)
        operands = [x.to(kind) for x in inputs]
        if backend == "toeplitz":
            mixed_attention(*operands, frozen)  # the first call compiles
            names = [each["name"] for each in kernels_of(lambda: mixed_attention(*operands, frozen), CUDA)]
            assert names == ["fused_forward_kernel"]
        return mixed_attention(*operands, frozen).double()

    exact = mix("reference", torch.float64)
    actual = mix("toeplitz", dtype), mix("reference", dtype), exact.to(dtype).double()
    error, sdpa, rounding = ((x - exact).norm() / exact.norm() for x in actual)
    assert error <= 2 * sdpa + rounding


@torch.no_grad()
def test_where_only_the_host_is_slow_calls_take_one_launch_and_graphs_two():
    length = SHORT + 100
    inputs = [torch.randn(1, length, n, 64, device="cuda").bfloat16().transpose(1, 2) for n in (2, 2, 4)]
    patterns = hard_patterns(["decay", "ripple"], length, "cuda")
    frozen = FrozenHeads.from_patterns(patterns, dtype=torch.bfloat16, device="cuda", kv_head=range(4))
    weight = torch.randn(96, 256, device="cuda").bfloat16() / 16
    run = {
        "mixed": lambda: mixed_attention(*inputs, frozen),
        "projected": lambda: projected_attention(*inputs, frozen, weight),
        "compiled": torch.compile(lambda: projected_attention(*inputs, frozen, weight), fullgraph=True),
    }
    for name, call in run.items():
        first, second = call(), call()
        assert torch.equal(first, second)
        kernels = [each["name"] for each in kernels_of(call, CUDA)]
        assert any("fused_forward" in each for each in kernels), name
        assert not any("toeplitz" in each for each in kernels), name
        with for_graphs(frozen):
            replay = GraphReplay(call, device=CUDA, pool=GraphPool())
        replay()
        kernels = [each["name"] for each in kernels_of(replay, CUDA)]
        assert any("toeplitz" in each for each in kernels), name
        assert not any("fused_forward" in each for each in kernels), name
        actual = replay.outcome
        assert (actual - first).float().norm() <= 1e-2 * first.float().norm(), name


@torch.no_grad()
def test_one_compiled_graph_serves_few_tokens_and_many():
    patterns = hard_patterns(["decay", "ripple"], 5000, "cuda")
    frozen = FrozenHeads.from_patterns(patterns, dtype=torch.bfloat16, device="cuda", kv_head=range(4))
    counted = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: mixed_attention(*x, frozen), fullgraph=True, backend=counted)
    for length in (300, 1500, 5000):
        inputs = [torch.randn(1, n, length, 64, device="cuda").bfloat16() for n in (2, 2, 4)]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2, min=2, max=5000)
        actual, expected = compiled(*inputs), mixed_attention(*inputs, frozen)  # few tokens called take one launch
        assert (actual - expected).float().norm() <= 1e-2 * expected.float().norm()
    assert len(counted.graphs) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("length", "dim", "kv_head"),
    [(129, 64, range(4)), (512, 64, (0, 0, 1, 1)), (600, 80, (0, 1, 0, 1)), (70, 128, range(4))],
)
def test_code_compiled_for_one_shape_launches_it_itself(length, dim, kv_head):
    counts = (2, len(set(kv_head[:2])), max(kv_head) + 1)
    patterns = hard_patterns(["decay", "ripple"], 1200, "cuda")
    frozen = FrozenHeads.from_patterns(patterns, dtype=torch.bfloat16, device="cuda", kv_head=kv_head)
    weight = torch.randn(96, 4 * dim, device="cuda").bfloat16() / 16

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        parts = (hidden * 1).split([count * dim for count in counts], dim=-1)
        return projected_attention(*(x.unflatten(-1, (-1, dim)).transpose(1, 2) for x in parts), frozen, weight)

    counted = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counted, dynamic=False)
    hidden = torch.randn(2, length, sum(counts) * dim, device="cuda").bfloat16()
    for each in (hidden, torch.randn_like(hidden)):
        actual, expected = compiled(each), layer(each)
        assert (actual - expected).float().norm() <= 1e-2 * expected.float().norm()
    (graph,) = counted.graphs
    assert any("fused_visible" in str(node.target) for node in graph.graph.nodes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(hidden)
    assert not [event.name for event in profile.events() if event.name.startswith("saf::")]
    names = [each["name"] for each in kernels_of(lambda: compiled(hidden), CUDA)]
    assert sum("fused_forward_kernel" in name for name in names) == 1
    assert not any("toeplitz" in name for name in names)
