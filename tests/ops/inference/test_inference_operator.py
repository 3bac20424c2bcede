"""A whole layer in one operator: the numbers of the other way, without gradients, in one graph."""

import math

import pytest
import torch

from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, mixed_attention, split_attention
from saf.ops.backends import toeplitz
from saf.patterns import CompactPattern, DensePattern
from saf.surgery import install_
from tests.ops.counted_graphs import CountedGraphs
from tests.ops.projected import projected_attention

LENGTH = 70


def prepare(dtype: torch.dtype = torch.float32, kv_head=range(5)) -> FrozenHeads:
    pattern = CompactPattern.from_parameters(torch.randn(2, LENGTH), torch.randn(2, LENGTH))
    return FrozenHeads.from_patterns(pattern, backend="toeplitz", dtype=dtype, kv_head=kv_head)


@pytest.fixture
def frozen():
    return prepare()


@pytest.fixture
def heads():
    return [torch.randn(2, count, LENGTH, 16) for count in (3, 3, 5)]


@pytest.fixture
def calls(monkeypatch):
    """Take the path that CUDA takes, and count its calls."""
    counted = []
    original = toeplitz.inference

    def counting(*arguments):
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(toeplitz.Toeplitz, "can_infer", lambda self, device, dtype, tables: not tables["stored"])
    monkeypatch.setattr(toeplitz, "inference", counting)
    return counted


def test_the_same_numbers_in_slot_order(frozen, heads, calls):
    apart = mixed_attention(*heads, frozen)
    assert not calls
    with torch.no_grad():
        together = mixed_attention(*heads, frozen)
    assert len(calls) == 1
    torch.testing.assert_close(together, apart, rtol=0, atol=0)
    assert together.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kv_head", [(0, 0, 1, 0, 1), (0, 1, 1, 1, 0), (1, 0, 1, 0, 0)])
def test_grouped_queries(kv_head, heads, calls):
    query, key, value = heads
    key, value, frozen = key[:, :2], value[:, :2], prepare(kv_head=kv_head)
    apart = mixed_attention(query, key, value, frozen)
    with torch.no_grad():
        torch.testing.assert_close(mixed_attention(query, key, value, frozen), apart)
    assert len(calls) == 1


def test_all_heads_are_projected_by_their_columns(frozen, heads, calls):
    weight = torch.randn(7, 5 * 16)
    joined = mixed_attention(*heads, frozen)
    expected = torch.nn.functional.linear(joined.transpose(1, 2).flatten(2), weight)
    torch.testing.assert_close(projected_attention(*heads, frozen, weight), expected)
    assert not calls
    with torch.no_grad():
        found = projected_attention(*heads, frozen, weight)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)


def test_queries_and_keys_that_autocast_left_wider_take_the_values_dtype(heads, calls):
    query, key, value = heads
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        projected_attention(query, key, value.bfloat16(), prepare(torch.bfloat16), torch.randn(7, 5 * 16))
    *operands, projection = *calls[0][:3], calls[0][-2]
    assert {x.dtype for x in (*operands, projection)} == {torch.bfloat16}


def test_not_with_padding_nor_shorter_queries_nor_stored_patterns(frozen, heads, calls):
    query, key, value = heads
    dense = DensePattern(CompactPattern.from_parameters(*torch.randn(2, 2, LENGTH)).dense())
    with torch.no_grad():
        mixed_attention(query, key, value, frozen, start=torch.tensor([0, 3]))
        mixed_attention(query[:, :, -5:], key, value, frozen)
        mixed_attention(query, key, value, FrozenHeads.from_patterns(dense, backend="toeplitz", kv_head=range(5)))
        split_attention(*heads, frozen)
    assert not calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "reference"}, "prepared for backend 'toeplitz'"),
        ({"kernel": "fast"}, "unknown attention kernel 'fast'"),
    ],
)
def test_wrong_calls_are_refused_as_with_gradients(frozen, heads, calls, change, message):
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(InputError, match=message):
            mixed_attention(*heads, frozen, **change)
    assert not calls


def test_compiles_into_one_graph_for_every_length(heads, monkeypatch):
    monkeypatch.setattr(toeplitz.Toeplitz, "can_infer", lambda *_: True)
    frozen, counted = prepare(), CountedGraphs()
    compiled = torch.compile(lambda *tensors: mixed_attention(*tensors, frozen), fullgraph=True, backend=counted)
    with torch.no_grad():
        for length in (LENGTH, 40, 7):
            part = [x[:, :, :length].contiguous() for x in heads]
            for x in part:
                torch._dynamo.mark_dynamic(x, 2, min=2, max=LENGTH)
            torch.testing.assert_close(compiled(*part), mixed_attention(*part, frozen))
    assert len(counted.graphs) == 1


def test_a_scale_that_the_compiler_leaves_open_is_checked_too(frozen, heads):
    """The second number makes it one: models of two sizes in one process."""
    compiled = torch.compile(
        lambda scale: mixed_attention(*heads, frozen, scale=scale), fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        for scale in (0.1, 0.2, 0.3):
            assert torch.equal(compiled(scale), mixed_attention(*heads, frozen, scale=scale))
    for wrong in (math.inf, -math.inf, math.nan):
        with pytest.raises(InputError, match="scale"):
            mixed_attention(*heads, frozen, scale=wrong)


def test_not_where_autocast_would_compute_in_another_dtype(frozen, heads, calls):
    weight = torch.randn(7, 5 * 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = projected_attention(*heads, frozen, weight)
        with torch.no_grad():
            found = projected_attention(*heads, frozen, weight)
    assert not calls
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("grad", [True, False])
def test_operands_of_other_dimensions_are_refused(frozen, heads, grad):
    with torch.set_grad_enabled(grad), pytest.raises(InputError, match=r"70 \+ 2"):
        projected_attention(heads[0][0], *heads[1:], frozen, torch.randn(7, 5 * 16))


def test_a_compiled_model_takes_it(monkeypatch):
    monkeypatch.setattr(toeplitz.Toeplitz, "can_infer", lambda *_: True)
    model = GPT(GPTConfig(vocab_size=64, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH))
    patterns = CompactPattern.from_parameters(torch.randn(3, LENGTH), torch.randn(3, LENGTH))
    install_(model, HeadSet([(0, 1), (0, 3), (1, 0)]), patterns)
    tokens = torch.randint(0, 64, (2, 40))
    counted = CountedGraphs()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend=counted)(tokens)
    (graph,) = counted.graphs
    assert sum("inference" in str(node.target) for node in graph.graph.nodes) == 2
    torch.testing.assert_close(found, model(tokens).detach())
