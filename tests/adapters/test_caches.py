"""Models of transformers, made small here: caches and padding change nothing of what frozen heads compute."""

import copy

import pytest
import torch

import saf
from saf.adapters import adapter_for, rows_of
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet

transformers = pytest.importorskip("transformers")

from tests.transformers_models import HEADS, LENGTH, freeze, make, tokens  # noqa: E402


def test_generation_with_a_cache_equals_passes_without_one(family):
    model = make(family)
    freeze(model)
    ids = tokens(2, 8, seed=3)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)


def test_left_padding_changes_nothing(family):
    model = make(family)
    freeze(model)
    ids = tokens(1, 9, seed=4)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (padded > 0).long()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    beside = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(alone, beside[:, 5:])


def test_right_padding_changes_nothing_before_it(family):
    model = make(family).double()
    freeze(model, HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)]))
    ids = torch.cat([tokens(3, 9, seed=4), torch.zeros(3, 5, dtype=torch.long)], 1)
    ids[2] = ids[2].roll(2)
    mask = (ids > 0).long()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
    with torch.no_grad():
        alone = model(ids[:, :9], use_cache=False).logits
        right = model(ids[:2], attention_mask=mask[:2], use_cache=False).logits[:, :9]
        both = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(right, alone[:2], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(both[:2, :9], alone[:2], rtol=1e-10, atol=1e-10)
        # Elsewhere in the row: rotations are computed in float32.
        torch.testing.assert_close(
            both[2, 2:11], model(ids[2:, 2:11], position_ids=torch.arange(2, 11)[None]).logits[0], rtol=1e-5, atol=1e-5
        )
    predicted = both[:, :-1][mask[:, 1:].bool() & mask[:, :-1].bool()]
    wanted = ids[:, 1:][mask[:, 1:].bool() & mask[:, :-1].bool()]
    expected = torch.nn.functional.cross_entropy(torch.cat([predicted, both[2, 1:2]]), torch.cat([wanted, ids[2, 2:3]]))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    loss.backward()
    sites = adapter_for(model).sites()
    assert all(rows_of(site, "value").parameter.grad.isfinite().all() for site in sites)
    mask[0, 4] = 0
    with pytest.raises(InputError, match="at the ends of each row only"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(InputError, match="to go on after a prompt, pad on the left"):
        model.generate(ids[:2, :11], attention_mask=(ids[:2, :11] > 0).long(), max_new_tokens=4, eos_token_id=None)


def test_a_prompt_in_parts_of_which_one_is_padding_alone_for_a_row_is_continued_as_it_is_whole(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    freeze(model)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options), whole)


def test_generation_beyond_the_calibrated_length_is_refused_before_its_first_token(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    freeze(model)
    passes = []
    model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    whole = model.generate(ids, max_new_tokens=LENGTH - 7, **options)
    assert whole.shape[1] == LENGTH + 1, "the last token is not read any more"
    passes.clear()
    for ask in ({"max_new_tokens": LENGTH - 6}, {"max_length": LENGTH + 2}):
        with pytest.raises(
            InputError, match=f"may reach {LENGTH + 2} tokens, .* patterns cover {LENGTH}: lower max_new"
        ):
            model.generate(ids, **ask, **options)
    assert not passes
    twin = copy.deepcopy(model)
    saf.uninstall_(model)
    if family != "gpt2":  # which has no position beyond
        assert model.generate(ids, max_new_tokens=LENGTH - 6, **options).shape[1] == LENGTH + 2
    with pytest.raises(InputError, match="may reach"):
        twin.generate(ids, max_new_tokens=LENGTH - 6, **options)


def test_a_cache_of_fixed_size_serves_frozen_heads_and_the_model_once_they_are_unfrozen(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    options |= {"attention_mask": torch.ones_like(ids), "cache_implementation": "static"}
    before, function = model.generate(ids, **options), model.config._attn_implementation
    freeze(model)
    if family.startswith("gemma"):
        for chunks in ({}, {"prefill_chunk_size": 3}):
            with pytest.raises(UnsupportedError, match="sliding window take a cache that grows"):
                model.generate(ids, **options | chunks)
    else:
        growing = model.generate(ids, **options | {"cache_implementation": None})
        assert torch.equal(model.generate(ids, **options), growing)
    saf.uninstall_(model)
    assert model.config._attn_implementation == function
    assert torch.equal(model.generate(ids, **options), before)


def test_prompts_in_parts_equal_whole_ones_with_compact_patterns_and_a_layer_without_live_heads(family):
    """Continuing a growing cache by several tokens, of two rows."""
    model = make(family)
    size = adapter_for(model).sites()[0].layout.num_heads
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=[(0, head) for head in range(size)], max_fit_kl=100.0))
    ids = tokens(2, 9, seed=3)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :5], past_key_values=cache)
        with pytest.raises(InputError, match=r"tells of 1 tokens, and with those of the cache there are 6"):
            model(ids[:, 5:6], past_key_values=copy.deepcopy(cache), attention_mask=torch.ones(2, 1))
        rest = model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1e-4, atol=1e-4)
