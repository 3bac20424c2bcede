"""Inputs longer than the patterns of frozen heads are refused before any layer computes, wherever the heads are."""

import copy

import pytest
import torch

import saf
from saf.errors import InputError
from saf.heads import HeadSet
from saf.integrations.transformers import cache_bytes
from tests.transformers_models import LENGTH, freezable, freeze, make, tokens

transformers = pytest.importorskip("transformers")


@pytest.fixture
def late(family):
    """A model whose last layer alone has a frozen head, and the list of passes through its first layer."""
    model = make(family, max_position_embeddings=2 * LENGTH)
    freeze(model, HeadSet([(freezable(model)[-1], 1)]))
    passes = []
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    return model, passes


TOO_LONG = rf"input has {LENGTH + 1} positions, the frozen heads' patterns cover {LENGTH}"


def test_long_rows_are_refused_before_the_first_layer_padded_or_not_in_any_way_of_asking(late):
    model, passes = late
    ids = tokens(2, LENGTH + 1)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    ways = [
        lambda: model(ids),
        lambda: model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False),
        lambda: model(ids, position_ids=torch.arange(LENGTH + 1)[None], use_cache=False),
        lambda: model(inputs_embeds=model.get_input_embeddings()(ids)),
        lambda: model.base_model(ids),
    ]
    for way in ways:
        with pytest.raises(InputError, match=TOO_LONG):
            way()
    assert not passes
    model(ids[:, 1:], attention_mask=mask[:, 1:])
    assert passes


def test_cached_tokens_count_and_a_refused_pass_leaves_the_cache_as_it_was(late):
    model, passes = late
    ids, cache = tokens(2, LENGTH + 1), transformers.DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        held = cache_bytes(cache)
        passes.clear()
        with pytest.raises(InputError, match=TOO_LONG):
            model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
        assert not passes
        assert cache_bytes(cache) == held
        rest = model(ids[:, 20:-1], attention_mask=mask[:, :-1], past_key_values=cache).logits
        whole = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits
    torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-4)


def test_a_cache_of_too_many_places_and_a_long_document_are_refused_before_the_first_layer(late):
    model, passes = late
    ids, cache = tokens(1, 40), transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 1)
    with pytest.raises(InputError, match=f"has {LENGTH + 1} places, .* cover {LENGTH}: make it with max_cache_len"):
        model(ids[:, :4], past_key_values=cache)
    long = torch.cat([torch.arange(39 - LENGTH), torch.arange(LENGTH + 1)])[None]
    with pytest.raises(InputError, match=TOO_LONG):
        model(ids, position_ids=long, use_cache=False)
    assert not passes


def test_the_limit_is_copied_with_the_model_and_goes_with_its_frozen_heads():
    model, ids = make("llama", max_position_embeddings=2 * LENGTH), tokens(1, LENGTH + 1)
    hooks = dict(model.model._forward_pre_hooks)
    freeze(model, HeadSet([(2, 1), (1, 0)]))
    twin = copy.deepcopy(model)
    saf.uninstall_(model, HeadSet([(2, 1)]))
    for some in (model, twin):
        with pytest.raises(InputError, match=TOO_LONG):
            some(ids)
    saf.uninstall_(model)
    assert model.model._forward_pre_hooks == hooks
    model(ids)
    saf.prune_(model, HeadSet([(0, 1)]))
    model(ids)
    with pytest.raises(InputError, match=TOO_LONG):
        twin(ids)


def test_compiled_whole_passes_are_those_of_calls_and_long_ones_are_refused():
    model = make("llama", max_position_embeddings=2 * LENGTH)
    freeze(model, HeadSet([(2, 1)]))
    ids = tokens(1, LENGTH + 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(ids[:, 1:], use_cache=False).logits
        torch.testing.assert_close(found, model(ids[:, 1:], use_cache=False).logits)
        with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match=r"patterns cover|InputError"):
            compiled(ids, use_cache=False)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_long_rows_with_a_mask_for_each_kind_of_layer_or_of_pairs_are_refused_too(late):
    model, passes = late
    ids, positions = tokens(1, LENGTH + 1), torch.arange(LENGTH + 1)[None]
    pairs = torch.ones(1, 1, LENGTH + 1, LENGTH + 1, dtype=torch.bool).tril()
    for mask in ({"full_attention": None, "sliding_attention": None}, pairs):
        with pytest.raises(InputError, match=TOO_LONG):
            model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    assert not passes
