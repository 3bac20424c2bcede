"""Live and frozen heads in one operator: the same numbers, only without gradients, in one graph."""

import pytest
import torch

from saf.ops import FrozenHeads, side_by_side, split_attention, toeplitz
from saf.pattern import CompactPattern

LENGTH = 70


@pytest.fixture
def frozen():
    pattern = CompactPattern.from_parameters(torch.randn(2, LENGTH), torch.randn(2, LENGTH))
    return FrozenHeads.from_patterns(pattern, backend="toeplitz", kv_head=range(5))


@pytest.fixture
def heads():
    return [torch.randn(2, count, LENGTH, 16) for count in (3, 3, 5)]


@pytest.fixture
def calls(monkeypatch):
    """Take the path that CUDA takes, and count its calls."""
    counted = []
    original = toeplitz.side_by_side

    def counting(*arguments):
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(toeplitz, "overlaps", lambda device, dtype: True)
    monkeypatch.setattr(toeplitz, "side_by_side", counting)
    return counted


def test_the_same_numbers(frozen, heads, calls):
    apart = split_attention(*heads, frozen)
    assert not calls
    with torch.no_grad():
        together = split_attention(*heads, frozen)
    assert len(calls) == 1
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_a_projection_takes_the_frozen_heads_columns(frozen, heads, calls):
    weight = torch.randn(7, 5 * 16)
    live, mixed = split_attention(*heads, frozen)
    assert mixed is not None
    expected = torch.nn.functional.linear(mixed.transpose(1, 2).flatten(2), weight[:, 3 * 16 :])
    with torch.no_grad():
        found = split_attention(*heads, frozen, projection=weight)
    assert len(calls) == 1
    torch.testing.assert_close(found, (live, expected))


def test_queries_and_keys_that_autocast_left_wider_take_the_values_dtype(heads, calls):
    pattern = CompactPattern.from_parameters(torch.randn(2, LENGTH), torch.randn(2, LENGTH))
    frozen = FrozenHeads.from_patterns(pattern, backend="toeplitz", dtype=torch.bfloat16, kv_head=range(5))
    query, key, value = heads
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        split_attention(query, key, value.bfloat16(), frozen)
    assert {x.dtype for x in calls[0][:4]} == {torch.bfloat16}


def test_not_with_padding_nor_shorter_queries(frozen, heads, calls):
    query, key, value = heads
    with torch.no_grad():
        split_attention(query, key, value, frozen, start=torch.tensor([0, 3]))
        split_attention(query[:, :, -5:], key, value, frozen)
    assert not calls


def test_compiles_into_one_graph(frozen, heads, monkeypatch):
    monkeypatch.setattr(toeplitz, "overlaps", lambda device, dtype: True)
    compiled = torch.compile(lambda *tensors: split_attention(*tensors, frozen), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*heads), split_attention(*heads, frozen))


def test_the_operator_is_registered_as_it_behaves(frozen, heads):
    query, key, value = heads
    tables = frozen.tables(torch.float32)
    scales = tables["table"], tables["key_scale"], tables["row_scale"]
    arguments = (query, key, value[:, :3], value[:, 3:], *scales, None, "auto", None)
    torch.library.opcheck(side_by_side.side_by_side, arguments, test_utils=("test_schema", "test_faketensor"))


def test_results_already_in_order_of_positions_are_left_alone():
    ordered = torch.randn(2, 7, 3, 8).transpose(1, 2)
    assert side_by_side._by_position(ordered) is ordered
    for heads in (ordered.contiguous(), torch.randn(2, 3, 1, 8), torch.randn(2, 3, 7, 16)[..., :8]):
        result = side_by_side._by_position(heads)
        assert torch.equal(result, heads)
        assert result.transpose(1, 2).is_contiguous()
