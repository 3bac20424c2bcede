"""The seam where queries are few: rows of a cache equal those of whole sequences, and none of the cache is moved."""

import pytest
import torch

from saf.bench.models import synthetic_patterns
from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, frozen_attention, mixed_attention
from saf.ops.heads import cached_order, even_queries
from saf.ops.layer import _checked
from saf.ops.positions import Places
from saf.ops.ways import WAYS, way_of
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


@pytest.mark.parametrize("start", [None, (0, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_rows_are_those_of_whole_sequences(layer, rows, start, generator):
    query, key, value, frozen = layer
    start = None if start is None else torch.tensor(start)
    whole = mixed_attention(query, key, value, frozen, start=start)[:, :, -rows:]
    few = query[:, :, -rows:]
    torch.testing.assert_close(mixed_attention(few, key, value, frozen, start=start), whole, rtol=1e-12, atol=1e-12)
    places = Places.of(torch.tensor(LENGTH - rows), rows, PLACES, start)
    keys, values = cached(key, value, frozen, generator)
    found = mixed_attention(few, keys, values, frozen, places=places)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    alone = frozen_attention(values, frozen, places=places, rows=rows)
    torch.testing.assert_close(alone, whole[:, query.shape[1] :], rtol=1e-12, atol=1e-12)


def test_gradients_of_few_rows_are_those_of_whole_sequences(generator):
    frozen = FrozenHeads.from_patterns(synthetic_patterns(2, LENGTH, generator), dtype=torch.float64)
    value = torch.randn(2, 2, LENGTH, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    outputs = frozen_attention(value, frozen, rows=3), frozen_attention(value, frozen)[:, :, -3:]
    gradients = [torch.autograd.grad(output.square().sum(), value)[0] for output in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_few_rows_go_their_own_way(layer):
    query, key, value, frozen = layer
    names = [way_of(_checked(query[:, :, -rows:], key, value, frozen)).name for rows in (1, 10, 11)]
    assert names[:2] == ["few rows"] * 2
    assert names[2] in {way.name for way in WAYS} - {"few rows"}, "so many that the whole product is cheaper"
    padded = _checked(query[:, :, -11:], key, value, frozen, start=torch.tensor([0, 3]))
    assert way_of(padded).name == "few rows", "padded values would be moved for a whole product"


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
    places = Places.of(torch.tensor(3), 1, PLACES)
    tensors[0] = tensors[0][:, :, :1]
    frozen = FrozenHeads.from_patterns(pattern, kv_head=(0, 1))
    query, key, value = tensors
    for operands, heads in (((query, key, value), frozen), ((query, key, value[:, :1]), None)):
        with pytest.raises(InputError, match="leave start out"):
            mixed_attention(*operands, heads, places=places, start=torch.tensor([0]))
    fused = FrozenHeads.from_patterns(pattern, kv_head=(0, 1), backend="reference")
    fused.backend = "fused"  # which needs a GPU to be prepared for
    with pytest.raises(UnsupportedError, match="cannot go on from a cache of fixed size; use one that grows"):
        mixed_attention(*tensors, fused, places=places)
