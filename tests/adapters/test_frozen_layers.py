"""Layers of transformers without live heads: no queries, keys or scores, and a cache of values alone."""

import copy

import pytest
import torch

import saf
from saf.heads import HeadSet, role_of
from saf.models.adapter import adapter_for
from tests.adapters.test_families import by_hand
from tests.transformers_models import LENGTH, freeze, make, tokens, weight_of

WHOLE = HeadSet([(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
"""The first layer, by which a cache counts its tokens, and the last; one head between them."""
EVERY = HeadSet((layer, head) for layer in range(3) for head in range(4))


@pytest.mark.parametrize("heads", [WHOLE, EVERY], ids=["two", "all"])
def test_they_mix_values_by_their_patterns(shape, heads):
    model = make(shape).double()
    untouched, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    patterns = freeze(model, heads)
    ids = tokens(2, LENGTH - 5, seed=2)
    assert weight_of(model, 0, "query").shape == weight_of(model, 0, "key").shape == (0, 48)
    with torch.no_grad():
        stock = untouched(ids, use_cache=False).logits
        expected = by_hand(untouched, patterns, ids)
        twin = copy.deepcopy(model)
        saf.uninstall_(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(model(ids, use_cache=False).logits, stock)
        torch.testing.assert_close(twin(ids, use_cache=False).logits, expected, rtol=1e-10, atol=1e-10)


def test_a_cache_holds_their_values_alone_and_changes_nothing(shape):
    model, ids = make(shape).double(), tokens(2, 12, seed=3)
    freeze(model, WHOLE)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache, steps = None, []
        for part in (ids[:, :5], ids[:, 5:8], *ids[:, 8:].split(1, 1)):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-10, atol=1e-10)
    first, values = cache.layers[0], adapter_for(model).sites()[0].layout.num_kv_heads
    assert first.keys.shape[1:3] == (values, 12)
    assert first.values.numel() == 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    beside = model.generate(padded, attention_mask=(padded > 0).long(), **options)
    assert torch.equal(whole, beside[:, 4:])


@pytest.mark.parametrize("shape", ["qwen3", "gpt2", "gemma2"])
def test_they_train_and_come_back_as_they_were(shape):
    model, ids = make(shape).double().train(), tokens(4, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)

    def update():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    weights = {role: weight for role, (weight, _) in adapter_for(model).sites()[0].projections().items()}
    before = {role: [weight.clone(), optimizer.state[weight]["exp_avg"].clone()] for role, weight in weights.items()}
    freeze(model, WHOLE, optimizer=optimizer)
    for _ in range(2):
        update()
    saf.uninstall_(model, optimizer=optimizer)
    for role, weight in weights.items():
        now = [weight, optimizer.state[weight]["exp_avg"]]
        assert all(map(torch.equal, now, before[role])) is (role_of(role) in ("query", "key")), role
    update()


def test_dropout_after_the_output_projection_stays():
    model, outputs = make("gpt2", resid_pdrop=1.0).double(), []
    freeze(model, WHOLE)
    model.transformer.h[0].attn.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    for training in (True, False):
        model.train(training)(tokens(), use_cache=False)
    assert [bool(output.any()) for output in outputs] == [False, True]
