"""The seam where queries are few: rows of a cache equal those of whole sequences, and none of the cache is moved."""

import pytest
import torch

from saf.bench.models import synthetic_patterns
from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, frozen_attention, mixed_attention
from saf.ops.heads import cached_order, even_queries
from saf.ops.positions import CachePosition
from saf.patterns import DensePattern

LENGTH, PLACES, DIM = 40, 50, 8
LAYOUTS = {
    "own values": ((0, 1, 2, 3), 2),
    "even groups": ((0, 1, 0, 1), 2),
    "uneven groups": ((0, 0, 1, 0, 1, 1), 3),
    "a whole group": ((0, 2, 2, 1, 1), 2),
    "none live": ((0, 1, 1), 3),
}
"""The value head of each slot, and how many slots are frozen."""


@pytest.fixture(params=LAYOUTS)
def layer(request, generator):
    """A layer of random inputs, queries, keys, values and frozen heads; of these one is dense."""
    slots, count = LAYOUTS[request.param]
    live, values = slots[: len(slots) - count], max(slots) + 1
    compact = synthetic_patterns(count, PLACES, generator)
    patterns = [DensePattern(compact[0].dense()), *(compact[slot] for slot in range(1, count))]
    frozen = FrozenHeads.from_patterns(patterns, dtype=torch.float64, kv_head=slots)
    shapes = (len(live), len(set(live)), values)
    query, key, value = (
        torch.randn(2, heads, LENGTH, DIM, generator=generator, dtype=torch.float64) for heads in shapes
    )
    return query, key, value, frozen


def cached(key, value, frozen, generator):
    """Keys and values in a cache of fixed size, anything finite behind the last of them."""
    filled = []
    order = cached_order(frozen.kv_head, frozen.num_frozen)
    for tensor in (key, value[:, list(order)]):
        places = torch.randn(2, tensor.shape[1], PLACES, DIM, generator=generator, dtype=torch.float64)
        places[:, :, :LENGTH] = tensor
        filled.append(places)
    return filled


@pytest.mark.parametrize("left_pad", [None, (0, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_rows_are_those_of_whole_sequences(layer, rows, left_pad, generator):
    query, key, value, frozen = layer
    left_pad = None if left_pad is None else torch.tensor(left_pad)
    whole = mixed_attention(query, key, value, frozen, left_pad=left_pad)[:, :, -rows:]
    few = query[:, :, -rows:]
    torch.testing.assert_close(
        mixed_attention(few, key, value, frozen, left_pad=left_pad), whole, rtol=1e-12, atol=1e-12
    )
    where = CachePosition.of(torch.tensor(LENGTH - rows), rows, PLACES, left_pad)
    keys, values = cached(key, value, frozen, generator)
    found = mixed_attention(few, keys, values, frozen, cache_position=where)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    alone = frozen_attention(values, frozen, cache_position=where, rows=rows)
    torch.testing.assert_close(alone, whole[:, query.shape[1] :], rtol=1e-12, atol=1e-12)


def test_gradients_of_few_rows_are_those_of_whole_sequences(generator):
    frozen = FrozenHeads.from_patterns(synthetic_patterns(2, LENGTH, generator), dtype=torch.float64)
    value = torch.randn(2, 2, LENGTH, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    outputs = frozen_attention(value, frozen, rows=3), frozen_attention(value, frozen)[:, :, -3:]
    gradients = [torch.autograd.grad(output.square().sum(), value)[0] for output in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_groups_are_made_even_by_computing_queries_twice(generator):
    query = torch.randn(1, 4, 1, DIM, generator=generator)
    same, own = even_queries(query, (0, 0, 1, 1))
    assert same is query
    assert own is None
    even, own = even_queries(query, (0, 1, 1, 1))
    assert own is not None
    assert even.shape[1] == 6
    assert torch.equal(even[:, list(own)], query)
    assert torch.equal(even[:, 1:3], query[:, :1].expand(-1, 2, -1, -1))


def test_what_places_cannot_be_given_with_is_refused(generator):
    pattern = synthetic_patterns(1, PLACES, generator)
    tensors = [torch.randn(1, heads, PLACES, DIM, generator=generator) for heads in (1, 1, 2)]
    where = CachePosition.of(torch.tensor(3), 1, PLACES)
    tensors[0] = tensors[0][:, :, :1]
    frozen = FrozenHeads.from_patterns(pattern, kv_head=(0, 1))
    query, key, value = tensors
    for operands, heads in (((query, key, value), frozen), ((query, key, value[:, :1]), None)):
        with pytest.raises(InputError, match="leave left_pad out"):
            mixed_attention(*operands, heads, cache_position=where, left_pad=torch.tensor([0]))
    fused = FrozenHeads.from_patterns(pattern, kv_head=(0, 1), backend="reference")
    fused.backend = "fused"  # which needs a GPU to be prepared for
    with pytest.raises(UnsupportedError, match="cannot go on from a cache of fixed size; use one that grows"):
        mixed_attention(*tensors, fused, cache_position=where)
