"""Grouped queries: a KV group whose heads are all frozen has no keys, and gets them back as they were."""

import torch

import saf
from saf.heads import HeadSet
from tests.transformers_models import freeze, make, tokens

FIRST, SECOND = HeadSet([(1, 2)]), HeadSet([(1, 3)])
"""The two heads of the second group of layer 1."""
CHANNELS = 16


def train(model, optimizer, updates: int = 2) -> None:
    for update in range(updates):
        ids = tokens(seed=update)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(optimizer, weight, group: slice) -> dict[str, torch.Tensor]:
    moments = {name: optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")}
    return {name: tensor.detach()[group].clone() for name, tensor in ({"weight": weight} | moments).items()}


def test_a_group_frozen_whole_loses_its_keys_and_gets_them_back_as_they_were():
    model = make("qwen3").double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    weight = model.model.layers[1].self_attn.k_proj.weight
    first, second = slice(0, CHANNELS), slice(CHANNELS, None)
    train(model, optimizer)
    freeze(model, FIRST, optimizer=optimizer)
    train(model, optimizer)
    assert weight.shape[0] == 2 * CHANNELS, "its other head reads the group's keys"
    before, other = rows(optimizer, weight, second), rows(optimizer, weight, first)
    freeze(model, SECOND, optimizer=optimizer)
    assert weight.shape[0] == model.model.layers[1].self_attn.k_proj.out_features == CHANNELS
    assert all(map(torch.equal, rows(optimizer, weight, first).values(), other.values()))
    train(model, optimizer)
    cache = model(tokens(2)).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 1, 2]
    assert [layer.values.shape[1] for layer in cache.layers] == [2, 2, 2]
    # Either head brings the keys back; neither momentum nor weight decay has moved them.
    saf.uninstall_(model, FIRST, optimizer=optimizer)
    assert all(map(torch.equal, rows(optimizer, weight, second).values(), before.values()))
    assert not torch.equal(rows(optimizer, weight, first)["weight"], other["weight"])
    train(model, optimizer)
    moved = weight.detach().clone()
    saf.uninstall_(model, optimizer=optimizer)
    assert torch.equal(weight, moved)
