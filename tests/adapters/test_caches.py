"""Caches, padding and length limits, with every family: nothing of what frozen heads compute changes."""

import copy

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.integrations.transformers import cache_bytes
from saf.models.adapter import adapter_for, rows_of
from tests.transformers_models import HEADS, LENGTH, freezable, freeze, make, tokens

transformers = pytest.importorskip("transformers")

GREEDY = {"do_sample": False, "eos_token_id": None}


def test_generation_with_left_padding_or_in_parts_equals_passes_without_a_cache(shape):
    model, ids = make(shape), tokens(2, 9, seed=4)
    freeze(model)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = (padded > 0).long()
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **GREEDY)
    for options in ({}, {"prefill_chunk_size": 4}):
        found = model.generate(padded, attention_mask=mask, max_new_tokens=4, pad_token_id=0, **GREEDY, **options)
        assert torch.equal(found[:, 5:], cached)
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)


def test_right_padding_changes_nothing_before_it(shape):
    model = make(shape).double()
    freeze(model, HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)]))
    ids = torch.cat([tokens(2, 9, seed=4), torch.zeros(2, 5, dtype=torch.long)], 1)
    mask = (ids > 0).long()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():
        alone = model(ids[:, :9], use_cache=False).logits
        longer = model(ids, attention_mask=torch.nn.functional.pad(mask, (0, 3), value=1)).logits
    torch.testing.assert_close(logits[:, :9], alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(longer[:, :9], alone, rtol=1e-10, atol=1e-10)  # it covers tokens to come
    logits[:, :9].sum().backward()
    assert all(rows_of(site, "value").parameter.grad.isfinite().all() for site in adapter_for(model).sites())
    mask[0, 4] = 0
    with pytest.raises(InputError, match="at the ends"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(InputError, match="on the left"):
        model.generate(ids[:, :11], attention_mask=(ids[:, :11] > 0).long(), max_new_tokens=4, **GREEDY)


def test_a_fixed_cache_serves_frozen_heads_and_the_model_once_they_are_unfrozen(shape):
    model, ids = make(shape), tokens(2, 8, seed=3)
    options = {"max_new_tokens": 4, "disable_compile": True, "attention_mask": torch.ones_like(ids), **GREEDY}
    fixed = options | {"cache_implementation": "static"}
    before, function = model.generate(ids, **fixed), model.config._attn_implementation
    freeze(model)
    if shape.startswith("gemma"):
        with pytest.raises(UnsupportedError, match="sliding window"):
            model.generate(ids, **fixed)
    else:
        assert torch.equal(model.generate(ids, **fixed), model.generate(ids, **options))
    saf.uninstall_(model)
    assert model.config._attn_implementation == function
    assert torch.equal(model.generate(ids, **fixed), before)


def test_prompts_in_parts_equal_whole_ones_beside_a_layer_without_live_heads(shape):
    model = make(shape)
    size = adapter_for(model).sites()[0].layout.num_heads
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=[(0, head) for head in range(size)], max_fit_kl=100.0))
    ids, cache = tokens(2, 9, seed=3), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :5], past_key_values=cache)
        with pytest.raises(InputError, match="cached tokens too, 6, got 1"):
            model(ids[:, 5:6], past_key_values=copy.deepcopy(cache), attention_mask=torch.ones(2, 1))
        rest = model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gemma3"])
def test_inputs_longer_than_the_patterns_are_refused_before_the_first_layer(shape):
    """A cache stays as it was, also of layers before the first frozen head."""
    model = make(shape, max_position_embeddings=2 * LENGTH)
    freeze(model, HeadSet([(freezable(model)[-1], 1)]))
    ids, cache = tokens(2, LENGTH + 1), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        size, fixed = cache_bytes(cache), transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 1)
        document = torch.cat([torch.arange(7), torch.arange(LENGTH + 1)])[None]
        for refused in (
            lambda: model(ids, use_cache=False),
            lambda: model(inputs_embeds=model.get_input_embeddings()(ids)),
            lambda: model.base_model(ids),
            lambda: model(ids[:, 20:], past_key_values=cache),
            lambda: model(tokens(1, LENGTH + 8), position_ids=document, use_cache=False),
        ):
            with pytest.raises(InputError, match=f"cover {LENGTH}"):
                refused()
        with pytest.raises((InputError, UnsupportedError)):
            model(ids[:, :4], past_key_values=fixed)
        assert cache_bytes(cache) == size
        rest = model(ids[:, 20:-1], past_key_values=cache).logits
        whole = model(ids[:, :-1], use_cache=False).logits
        torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-4)
        twin = copy.deepcopy(model)
        saf.uninstall_(model)
        assert model(ids).logits.isfinite().all()
        with pytest.raises(InputError, match=f"cover {LENGTH}"):
            twin(ids)
