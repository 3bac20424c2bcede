"""Pruned heads, and frozen KV groups: a model computes and trains as if these outputs were zero, and all comes back."""

import copy

import pytest
import torch

import saf
from saf.errors import CheckpointError, InputError
from saf.frozen_state import description_of, restore_
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.surgery import finalize_, install_, prune_, uninstall_
from tests.surgery.test_install import by_hand
from tests.surgery.trained_model import LENGTH, SHAPE, make, patterns, snapshot, update
from tests.transformers_models import freeze, tokens
from tests.transformers_models import make as make_llama

GONE = HeadSet([(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)])
"""Two heads of the first layer, all of the second."""
FIXED = HeadSet([(0, 3), (2, 0)])
"""Heads to freeze, one in a layer with pruned heads."""
IDS = torch.randint(0, SHAPE.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(4))
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj")


def zeroed(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Logits of an ordinary model with the outputs of `GONE` set to zero and `FIXED` attending by their patterns."""
    dense = torch.zeros(len(GONE | FIXED), LENGTH, LENGTH, dtype=torch.float64)
    for number, head in enumerate(GONE | FIXED):
        if head in FIXED:
            dense[number] = patterns(2).dense()[FIXED.index(head)]
    return by_hand(model, ids, GONE | FIXED, dense)


def rows_of(heads, head_dim: int = 8) -> list[int]:
    return [row for head in heads for row in range(head * head_dim, (head + 1) * head_dim)]


@pytest.mark.parametrize("first", ["prune", "freeze"])
def test_pruned_and_frozen_heads_of_one_model_compute_and_train_as_if_outputs_were_zero(first):
    model, _ = make()
    twin = copy.deepcopy(model)
    verbs = {"prune": lambda: prune_(model, GONE), "freeze": lambda: install_(model, FIXED, patterns(2))}
    for verb in (first, *(verbs.keys() - {first})):
        verbs[verb]()
    attention = model.blocks[0].attention
    assert attention.layout == HeadLayout(4, 4, frozen=(3,), pruned=(1, 2))
    assert [tuple(getattr(attention, role).weight.shape) for role in ROLES] == [(8, 32), (8, 32), (16, 32), (32, 16)]
    assert (attention.o_proj.in_features, attention.q_proj.out_features) == (16, 8)
    assert all(getattr(model.blocks[1].attention, role).weight.numel() == 0 for role in ROLES)
    expected, actual = zeroed(twin, IDS), model(IDS)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    actual.backward(upstream)
    expected.backward(upstream)
    oracle = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        exact, parts = oracle[name].grad, name.split(".")
        if parts[-2] in ROLES:
            layout = model.blocks[int(parts[1])].attention.layout
            rows = rows_of(layout.live if parts[-2] in ("q_proj", "k_proj") else layout.slots)
            exact = exact[:, rows] if parts[-2] == "o_proj" else exact[rows]
        if parameter.grad is None:
            assert parameter.numel() == 0, name
        else:
            torch.testing.assert_close(parameter.grad, exact, rtol=1e-10, atol=1e-11)


def test_undoing_is_bit_exact_with_updates_between():
    model, trainer = make()
    before, parameters = snapshot(model, trainer), list(model.parameters())
    prune_(model, GONE, optimizer=trainer)
    update(model, trainer)
    install_(model, FIXED, patterns(2), optimizer=trainer)
    update(model, trainer)
    uninstall_(model, optimizer=trainer)
    after = snapshot(model, trainer)
    for layer in range(3):
        gone, fixed = (rows_of(heads.in_layer(layer)) for heads in (GONE, FIXED))
        for role in ROLES:
            retained = sorted({*range(32)} - {*gone} - ({*fixed} if role in ("q_proj", "k_proj") else set()))
            for name in (name for name in before if f"blocks.{layer}.attention.{role}" in name and before[name].dim()):
                one, other = (t.T if role == "o_proj" else t for t in (before[name], after[name]))
                assert torch.equal(one[gone], other[gone]), name
                assert not retained or not torch.equal(one[retained], other[retained]), name
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    update(model, trainer)


def test_pruned_models_are_saved_loaded_and_undone(tmp_path):
    model, trainer = make()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prune_(model, GONE, optimizer=trainer)
    install_(model, FIXED, patterns(2), optimizer=trainer)
    other = GPT(SHAPE).double()
    restore_(other, *description_of(adapter_for(model)))
    with pytest.raises(CheckpointError, match=r"has frozen heads none, this layer has .*pruned heads \[1, 2\]"):
        other.load_state_dict(original)
    other.load_state_dict(model.state_dict())
    saf.save(model.float(), tmp_path / "gpt")
    for one in (other.float(), saf.load(tmp_path / "gpt")):
        assert torch.equal(one(IDS), model(IDS))
        uninstall_(one)
        assert all(torch.equal(tensor, original[name].float()) for name, tensor in one.state_dict().items())
    llama = make_llama("qwen3")
    prune_(llama, [(0, 0), (0, 1), (1, 1)])
    saf.save(llama, tmp_path / "llama")
    again = saf.load(make_llama("qwen3"), tmp_path / "llama")
    with torch.no_grad():
        assert torch.equal(again(tokens(2)).logits, llama(tokens(2)).logits)
    uninstall_(again)
    assert all(map(torch.equal, again.parameters(), make_llama("qwen3").parameters()))
    finalize_(llama)
    with pytest.raises(InputError, match=r"the query rows of head \d are gone"):
        uninstall_(llama)


def test_what_is_measured_leaves_pruned_heads_out():
    model = GPT(SHAPE)
    prune_(model, GONE)
    statistics = saf.calibrate(model, [IDS], collect=("mean_rows",))
    gates, outputs = saf.gate_gradients(model, [IDS]), saf.head_outputs(model, [IDS], statistics)
    live = torch.tensor([[(layer, head) not in GONE for head in range(4)] for layer in range(3)])
    for scores in (saf.score(statistics), gates, outputs.change[:, :, 0]):
        assert torch.equal(scores.isfinite(), live)
    report = saf.freeze_(model, [IDS], saf.FreezeConfig(rate=0.25, max_fit_kl=99))
    assert len(report.heads) == 3
    assert not report.heads & GONE
    with pytest.raises(InputError, match="frozen or pruned already"):
        saf.freeze_(model, [IDS], saf.FreezeConfig(heads=[(0, 1)]))


# --- grouped queries, frozen


def train_(model, optimizer, updates: int = 2) -> None:
    for seed in range(updates):
        ids = tokens(seed=seed)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(optimizer, weight, group: slice) -> dict[str, torch.Tensor]:
    moments = {name: optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")}
    return {name: tensor.detach()[group].clone() for name, tensor in ({"weight": weight} | moments).items()}


def test_a_group_frozen_whole_loses_its_keys_and_gets_them_back_as_they_were():
    first_head, second_head = HeadSet([(1, 2)]), HeadSet([(1, 3)])  # of the second group
    model = make_llama("qwen3").double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    weight = model.model.layers[1].self_attn.k_proj.weight
    first, second = slice(0, 16), slice(16, None)
    train_(model, optimizer)
    freeze(model, first_head, optimizer=optimizer)
    train_(model, optimizer)
    assert weight.shape[0] == 2 * 16, "its other head reads the group's keys"
    before, other = rows(optimizer, weight, second), rows(optimizer, weight, first)
    freeze(model, second_head, optimizer=optimizer)
    assert weight.shape[0] == model.model.layers[1].self_attn.k_proj.out_features == 16
    assert all(map(torch.equal, rows(optimizer, weight, first).values(), other.values()))
    train_(model, optimizer)
    cache = model(tokens(2)).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 1, 2]
    assert [layer.values.shape[1] for layer in cache.layers] == [2, 2, 2]
    # Either head brings the keys back; neither momentum nor weight decay has moved them.
    uninstall_(model, first_head, optimizer=optimizer)
    assert all(map(torch.equal, rows(optimizer, weight, second).values(), before.values()))
    assert not torch.equal(rows(optimizer, weight, first)["weight"], other["weight"])
    train_(model, optimizer)
    moved = weight.detach().clone()
    uninstall_(model, optimizer=optimizer)
    assert torch.equal(weight, moved)
