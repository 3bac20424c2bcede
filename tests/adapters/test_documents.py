"""Documents packed into one row, which positions that start again separate: each is computed as it is alone."""

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from tests.transformers_models import HEADS, LENGTH, freeze, make, tokens

transformers = pytest.importorskip("transformers")

WHOLE_LAYER = HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)])
"""A layer without any live head among them."""
SIZES = ((1, 7, 12, 8, 12), (25, 3, 12), (40 - LENGTH, LENGTH))
"""Tokens of the documents of each row: 40 in all, more than the patterns cover."""
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def packed(sizes=SIZES):
    """Rows of tokens `[rows, 40]` and their positions."""
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in sizes])
    return tokens(len(sizes), sum(sizes[0]), seed=9), positions


def alone(model, ids, sizes=SIZES):
    """Logits of every document by itself, put back into rows."""
    rows = zip(ids, sizes, strict=True)
    return torch.stack(
        [torch.cat([model(one[None], use_cache=False).logits[0] for one in row.split(own)]) for row, own in rows]
    )


def windowless(family, **changes):
    """A model all of whose layers see whole documents."""
    window = {"sliding_window": LENGTH} if family.startswith("gemma") else {}
    return make(family, max_position_embeddings=64, **window | changes).double()


@pytest.mark.parametrize("sizes", [SIZES, ((LENGTH,), (5, LENGTH - 5), (LENGTH - 1, 1))])
def test_each_document_is_computed_as_it_is_alone_and_so_are_gradients(shape, sizes):
    model, (ids, positions) = windowless(shape).train(), packed(sizes)
    freeze(model, WHOLE_LAYER)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [parameter for parameter in model.parameters() if parameter.numel()]
    outputs = [model(ids, position_ids=positions, use_cache=False).logits, alone(model, ids, sizes)]
    torch.testing.assert_close(*outputs, **CLOSE)
    gradients = [torch.autograd.grad(each.square().sum(), weights, allow_unused=True) for each in outputs]
    for one, other in zip(*gradients, strict=True):
        if other is not None:
            # The norms of Gemma compute in float32.
            assert (one - other).norm() <= (1e-4 if shape == "gemma3" else 1e-9) * (1 + other.norm())


@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "mistral"])
def test_documents_longer_than_a_window_are_refused(shape):
    ids, positions = packed()
    model = make(shape, sliding_window=8)
    (saf.prune_ if shape == "mistral" else freeze)(model, HeadSet([(0, 1)]))
    with pytest.raises(UnsupportedError, match="sliding window"):
        model(ids, position_ids=positions, use_cache=False)
    if shape != "mistral":  # a window that no layer has refuses none
        free = windowless(shape, sliding_window=8, layer_types=["full_attention"] * 4)
        freeze(free, HEADS)
        expected = alone(free, ids)
        torch.testing.assert_close(free(ids, position_ids=positions, use_cache=False).logits, expected, **CLOSE)
    # One sequence a row is none of them.
    assert model(ids[:, :LENGTH], position_ids=torch.arange(LENGTH)[None], use_cache=False).logits.isfinite().all()


def test_a_mask_or_a_cache_with_packed_documents_raises_before_a_layer_has_attended(shape):
    model, (ids, positions) = make(shape), packed()
    freeze(model)
    reached = []
    adapter_for(model).sites()[0].attention.register_forward_hook(lambda *_: reached.append(1))
    late, gap = ([*range(20), *range(5, 25)], [*range(10), *range(14, 24)])
    for some in (positions, torch.tensor([late]), torch.tensor([gap])):
        own = ids[: len(some), : some.shape[1]]
        for options in ({"use_cache": True}, {"attention_mask": torch.ones_like(own)}):
            with pytest.raises((UnsupportedError, InputError)):
                model(own, position_ids=some, **{"use_cache": False} | options)
    boundaries = torch.tensor([0, 4, 9, 20])
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        model(ids[:1, :20], cu_seq_lens_q=boundaries, use_cache=False)
    assert not reached
    whole = torch.tensor([0, 20])
    assert model(ids[:1, :20], cu_seq_lens_q=whole, use_cache=False).logits.numel()
    restarting = torch.cat([torch.arange(4), torch.arange(5), torch.arange(11)])[None]
    if not shape.startswith("gemma"):
        assert model(ids[:1, :20], position_ids=restarting, cu_seq_lens_q=boundaries, use_cache=False).logits.numel()
