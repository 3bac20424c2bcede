"""Documents packed into one row, told by positions that start again: each is computed as it is alone."""

import pytest
import torch

import saf
from saf.adapters import adapter_for
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from tests.transformers_models import HEADS, LENGTH, freeze, make, tokens

transformers = pytest.importorskip("transformers")

WHOLE_LAYER = HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)])
"""A layer without any live head among them."""
SIZES = ((1, 7, 12, 8, 12), (25, 3, 12), (40 - LENGTH, LENGTH))
"""Tokens of the documents of each row: 40 in all, more than the patterns cover."""


def packed():
    """Rows of tokens `[3, 40]` and their positions."""
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in SIZES])
    return tokens(len(SIZES), 40, seed=9), positions


def alone(model, ids):
    """Return the logits of every document by itself, put back into rows."""
    rows = zip(ids, SIZES, strict=True)
    return torch.stack(
        [torch.cat([model(one[None], use_cache=False).logits[0] for one in row.split(sizes)]) for row, sizes in rows]
    )


@pytest.fixture(params=["qwen3", "qwen2", "llama", "llama-grouped", "mistral", "gpt2", "phi3"])
def family(request):
    """Name of a family all of whose layers see whole documents."""
    return request.param


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_documents_longer_than_the_window_of_a_layer_that_stays_ordinary_are_refused(name):
    model, (ids, positions) = make(name), packed()
    freeze(model)
    reached = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: reached.append(1))
    for some, longest in ((positions, LENGTH), (torch.cat([torch.arange(10), torch.arange(30)])[None], 30)):
        with pytest.raises(UnsupportedError, match=rf"{longest} tokens exceed .* window of 8 .*a row of its own"):
            model(ids[: len(some)], position_ids=some, use_cache=False)
    assert not reached
    # One sequence a row is none of them.
    model(ids[:, :LENGTH], position_ids=torch.arange(LENGTH)[None], use_cache=False)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_window_that_no_layer_has_refuses_no_documents(name):
    model, (ids, positions) = make(name, layer_types=["full_attention"] * 4).double(), packed()
    freeze(model, WHOLE_LAYER)
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits, alone(model, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_documents_no_longer_than_that_window_are_computed_as_they_are_alone(name):
    model, (ids, positions) = make(name, sliding_window=LENGTH).double(), packed()
    freeze(model, WHOLE_LAYER)
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits, alone(model, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("operation", ["freeze", "prune"])
def test_each_document_is_computed_as_it_is_alone(family, operation):
    model, (ids, positions) = make(family, max_position_embeddings=64).double(), packed()
    if operation == "freeze":
        freeze(model, WHOLE_LAYER)
    else:
        saf.prune_(model, HEADS)
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits, alone(model, ids), rtol=1e-10, atol=1e-10)


def test_rows_of_several_documents_may_stand_beside_rows_of_one():
    model, ids = make("llama").double(), tokens(3)
    freeze(model, WHOLE_LAYER)
    rows = ((LENGTH,), (5, LENGTH - 5), (LENGTH - 1, 1))
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in rows])
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False).logits
        for got, one, sizes in zip(logits, ids, rows, strict=True):
            parts = [model(part[None], use_cache=False).logits[0] for part in one.split(sizes)]
            torch.testing.assert_close(got, torch.cat(parts), rtol=1e-10, atol=1e-10)


def test_with_a_cache_transformers_itself_takes_packed_documents_for_one_sequence(family):
    """So that passes with a cache are refused: there is no ordinary model that they would be compared with."""
    model, (ids, positions) = make(family, max_position_embeddings=64).double(), packed()
    with torch.no_grad():
        apart = alone(model, ids)
        torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, apart)
        mixed = model(ids, position_ids=positions, use_cache=True).logits
    assert (mixed - apart).abs().max() > 0.1


def test_gradients_are_those_of_the_documents_alone(family):
    model, (ids, positions) = make(family).double(), packed()
    freeze(model, WHOLE_LAYER)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
    wanted = torch.autograd.grad(alone(model, ids).square().sum(), weights, allow_unused=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    came = torch.autograd.grad(
        model(ids, position_ids=positions, use_cache=False).logits.square().sum(), weights, allow_unused=True
    )
    for one, other in zip(came, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_window_as_long_as_the_documents_is_none_and_a_shorter_one_is_refused():
    ids, positions = packed()
    model = make("mistral").double()
    freeze(model, WHOLE_LAYER)
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        model.config.sliding_window = LENGTH
        for layer in model.model.layers:
            layer.self_attn.sliding_window = LENGTH
        torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, expected)
        model.config.sliding_window = LENGTH - 1
        with pytest.raises(UnsupportedError, match="exceed the sliding window"):
            model(ids, position_ids=positions, use_cache=False)


def begun(sizes, *more):
    """Where documents begin and end, as flash attention is told of it."""
    return torch.tensor([0, *sizes, *more], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_beginnings(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, **_):
    """Attend as flash attention of transformers does to flattened documents, `[1, H, T, D]`, materialised."""
    document = torch.bucketize(torch.arange(query.shape[2]), cu_seq_lens_q, right=True)
    seen = (document[:, None] == document).tril()
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    weights = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def test_beginnings_whose_tail_repeats_or_counts_padding_are_taken_or_refused_as_flash_attention_reads_them():
    model, ids, size = make("qwen3").double(), tokens(1, 24), 17
    transformers.AttentionInterface.register("by_beginnings", by_beginnings)
    transformers.AttentionMaskInterface.register("by_beginnings", lambda **_: None)
    with torch.no_grad():
        whole, first = model(ids, use_cache=False).logits, model(ids[:, :size], use_cache=False).logits
        model.set_attn_implementation("by_beginnings")
        repeated, counted = (
            model(ids, cu_seq_lens_q=told, use_cache=False).logits for told in (begun([24], 0, 0), begun([size], 7))
        )
        torch.testing.assert_close(repeated, whole, rtol=1e-10, atol=1e-10)  # what has no token is no document
        torch.testing.assert_close(counted[:, :size], first, rtol=1e-10, atol=1e-10)
        assert (counted - whole)[:, size:].abs().max() > 0.1  # padding that is counted is one more
        model.set_attn_implementation("sdpa")
        freeze(model, WHOLE_LAYER)
        alone, padded = model(ids, use_cache=False).logits, torch.ones(1, 24, dtype=torch.long)
        for told in (begun([24]), begun([24], 0, 0)):
            assert torch.equal(model(ids, cu_seq_lens_q=told, use_cache=False).logits, alone)
        padded[:, size:] = 0
        for told in ({}, {"attention_mask": padded}):
            with pytest.raises(
                UnsupportedError, match=r"of 2 documents, padding among them .*attention_mask .*leave it"
            ):
                model(ids, cu_seq_lens_q=begun([size], 7, 0), use_cache=False, **told)
        masked = model(ids, attention_mask=padded, use_cache=False).logits[:, :size]
        told = torch.cat([torch.arange(size), torch.zeros(7, dtype=torch.long)])[None]  # padding as TRL gives it
        apart = model(ids, position_ids=told, cu_seq_lens_q=begun([size], 7), use_cache=False).logits[:, :size]
        short = model(ids[:, :size], use_cache=False).logits
        torch.testing.assert_close(masked, short, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(apart, short, rtol=1e-10, atol=1e-10)


def test_what_cannot_work_raises_before_anything_is_computed(family):
    model, (ids, positions) = make(family), packed()
    freeze(model)
    reached = []
    adapter_for(model).sites()[0].attention.register_forward_hook(lambda *_: reached.append(1))
    late, gap = ([*range(20), *range(5, 25)], [*range(10), *range(14, 24)])
    for some in (positions, torch.tensor([late]), torch.tensor([gap])):
        own = ids[: len(some), : some.shape[1]]
        for options in ({"use_cache": True}, {"attention_mask": torch.ones_like(own)}):
            with pytest.raises(UnsupportedError, match="start again within a row, or leave places out"):
                model(own, position_ids=some, **{"use_cache": False} | options)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q tells of 3 documents"):
        model(ids[:1, :20], cu_seq_lens_q=torch.tensor([0, 4, 9, 20]), use_cache=False)
    long = torch.cat([torch.arange(LENGTH + 1), torch.arange(39 - LENGTH)])[None]
    if family != "gpt2":  # which has no position beyond
        with pytest.raises(InputError, match=f"{LENGTH}"):
            model(ids, position_ids=long, use_cache=False)
    assert not reached
