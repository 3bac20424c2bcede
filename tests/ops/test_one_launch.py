"""How the launch of few tokens is reached: settled calls, and compiled code that launches it itself."""

import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from saf.errors import InputError
from saf.machine import cuda_graphs as cuda_graph
from saf.ops import FrozenHeads, mixed_attention, projected_attention
from saf.ops.inference import one_launch as few_tokens
from saf.ops.inference import settled
from saf.ops.toeplitz import backend as toeplitz
from tests.ops.counted_graphs import CountedGraphs
from tests.ops.hard_patterns import hard_patterns

pytest.importorskip("triton", reason="Triton is not installed")
HALF = torch.bfloat16


@pytest.fixture
def through_operator(monkeypatch):
    """Take the path that CUDA takes, the kernel answering with all it reads; count what goes through the operator."""
    from saf.ops.fused import launch as fused_forward

    seen = []
    original = toeplitz.inference

    def counting(*arguments):
        seen.append(tuple(arguments[2].shape))
        return original(*arguments)

    monkeypatch.setattr(few_tokens, "fused_obstacle", lambda device, dtype: None)
    monkeypatch.setattr(toeplitz, "infers", lambda device, dtype, tables: not tables["stored"])
    monkeypatch.setattr(toeplitz, "inference", counting)
    monkeypatch.setattr(fused_forward, "_plans", {})
    monkeypatch.setattr(fused_forward, "PreparedLaunch", lambda *numbers, **__: partial(_answer, numbers[2:6]))
    return seen


def _answer(numbers, query, key, value, out, log_sums, *tables) -> None:
    """Fill the output with a number that every operand and table has a share of, in its place."""
    read = [query, key, value, *tables]
    sums = [each.double().nan_to_num(neginf=-1).sum().sin().item() for each in read]
    out.fill_(sum(place * each for place, each in enumerate(sums, 1)) + log_sums.numel() + sum(numbers))


def prepare(length: int = 64) -> FrozenHeads:
    return FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], length), dtype=HALF, kv_head=range(4))


def operands(length: int = 40, dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, count, length, dim, dtype=HALF) for count in (2, 2, 4)]


@torch.no_grad()
def test_a_layout_goes_through_the_operator_once(through_operator):
    frozen, heads, weight = prepare(), operands(), torch.randn(6, 32, dtype=HALF)
    first = mixed_attention(*heads, frozen)
    for _ in range(2):
        again = mixed_attention(*heads, frozen)
        assert torch.equal(again, first)
        assert (again.shape, again.stride()) == ((2, 4, 40, 8), first.stride())
    assert not torch.equal(mixed_attention(*operands(), frozen), first)
    assert len(through_operator) == 1
    first = projected_attention(*heads, frozen, weight)
    assert torch.equal(projected_attention(*heads, frozen, weight), first)
    assert first.shape == (2, 40, 6)
    assert len(through_operator) == 2
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands()]
    for again in (operands(30), operands(dim=16), turned, [*operands()[:2], turned[2]]):
        before = len(through_operator)
        for _ in range(2):
            mixed_attention(*again, frozen)
        assert len(through_operator) == before + 1


@torch.no_grad()
def test_settled_or_not_wrong_calls_are_refused(through_operator):
    frozen, heads = prepare(), operands()
    for _ in range(2):
        mixed_attention(*heads, frozen)
    for wrong, told in (
        (operands(65), "cover 64"),
        ([heads[0].float(), *heads[1:]], "same dtype"),
        ([heads[0][:, :1], *heads[1:]], "make 1"),
    ):
        with pytest.raises(InputError, match=told):
            mixed_attention(*wrong, frozen)
    with pytest.raises(InputError, match="prepared for backend 'toeplitz'"):
        mixed_attention(*heads, frozen, backend="reference")
    assert len(through_operator) == 1


@torch.no_grad()
def test_what_traces_sees_the_operator(through_operator):
    frozen, heads = prepare(), operands()
    for _ in range(2):
        mixed_attention(*heads, frozen)
    graph = make_fx(lambda *x: mixed_attention(*x, frozen))(*heads).graph
    assert any(node.target is torch.ops.saf.inference.default for node in graph.nodes)


@torch.no_grad()
def test_transforms_and_subclasses_of_tensors_see_the_operator(through_operator):
    frozen, heads = prepare(), operands()
    for _ in range(2):
        mixed_attention(*heads, frozen)
    torch.func.functionalize(lambda *x: mixed_attention(*x, frozen))(*heads)
    mixed_attention(torch.nn.Parameter(heads[0]), *heads[1:], frozen)
    assert len(through_operator) == 3


@torch.no_grad()
def test_tables_are_those_that_the_layer_has_now(through_operator):
    one, other, heads = prepare(), prepare(), operands()
    other.bfloat16_few_alpha.add_(1)
    expected = [mixed_attention(*heads, each) for each in (one, other)]
    assert not torch.equal(*expected)
    buffers = {f"frozen.{name}": buffer for name, buffer in other.named_buffers()}
    for _ in range(2):
        assert torch.equal(torch.func.functional_call(Called(one), buffers, tuple(heads)), expected[1])
        assert torch.equal(mixed_attention(*heads, one), expected[0])
    left = weakref.ref(one.bfloat16_few_alpha)
    one.bfloat16_few_alpha = one.bfloat16_few_alpha.clone()
    assert left() is None


class Called(torch.nn.Module):
    """A layer's frozen heads as a module that can be called."""

    def __init__(self, frozen: FrozenHeads):
        super().__init__()
        self.frozen = frozen

    def forward(self, *heads):
        return mixed_attention(*heads, self.frozen)


def test_gradients_padding_and_named_kernels_are_not_settled(through_operator):
    frozen, heads = prepare(), operands()
    with torch.no_grad():
        for _ in range(2):
            mixed_attention(*heads, frozen)
            mixed_attention(*heads, frozen, start=torch.tensor([0, 3]))
            assert mixed_attention(*heads, frozen, kernel="math").any()
    assert mixed_attention(*[x.requires_grad_() for x in heads], frozen).requires_grad


@torch.no_grad()
def test_settled_anew_after_a_move_in_copies_and_after_tuning(through_operator):
    frozen, heads = prepare(), operands()

    def new(module: FrozenHeads) -> int:
        before = len(through_operator)
        for _ in range(2):
            mixed_attention(*heads, module)
        return len(through_operator) - before

    assert (new(frozen), new(frozen)) == (1, 0)
    assert new(copy.deepcopy(frozen)) == 1
    assert new(pickle.loads(pickle.dumps(frozen))) == 1
    assert new(frozen.to("cpu")) == 1
    settled.unsettle_all()
    assert (new(frozen), new(frozen)) == (1, 0)


def test_many_layouts_do_not_pile_up():
    calls = settled.SettledCalls()
    for number in range(settled.MOST + 1):
        calls.keep((number,), None, (), {})
    assert not calls.stays((0,))
    assert calls.stays((settled.MOST,))


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
