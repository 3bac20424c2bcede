"""Frozen models of transformers, saved and loaded: the same weights alike, others told by name."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_model

import saf
from saf.errors import CheckpointError, InputError, SafWarning
from saf.heads import HeadSet
from saf.records.files import read_json
from tests.transformers_models import freeze, make, tokens


def test_a_sidecar_freezes_the_same_weights_alike(family, tmp_path):
    model = make(family)
    freeze(model)
    saf.save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = saf.load(make(family), tmp_path)
    ids = tokens(2, seed=6)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(fresh(ids, use_cache=False).logits, expected)
        # Other weights are noticed, and those of the frozen model fit.
        other = make(family)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        with pytest.warns(UserWarning, match="weights differ .*layer 0: key, output, query, value; .*load the state"):
            saf.load(other, tmp_path)
        assert not torch.allclose(other(ids, use_cache=False).logits, expected, atol=1e-2)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(ids, use_cache=False).logits, expected)
    # Undoing gives back what was frozen, whatever the model had that it was loaded into.
    for one in (fresh, other):
        saf.uninstall_(one)
        assert all(map(torch.equal, one.parameters(), make(family).parameters()))


def test_another_rotation_is_told(family, tmp_path):
    model = make(family)
    freeze(model)
    saf.save(model, tmp_path)
    other = make(family)
    other.config.rope_parameters = dict(other.config.rope_parameters, rope_theta=5e5)
    with pytest.warns(SafWarning, match=r"attend otherwise .*rope_parameters: .*500000"):
        saf.load(other, tmp_path)


def test_what_was_final_when_it_was_saved_cannot_be_undone(family, tmp_path):
    model = make(family)
    freeze(model)
    saf.finalize_(model)
    saf.save(model, tmp_path)
    with pytest.raises(InputError, match="were not kept"):
        saf.uninstall_(saf.load(make(family), tmp_path))


@pytest.mark.parametrize("role", ["q", "k", "v", "o"])
def test_weights_trained_after_freezing_are_missed_by_name_until_they_are_loaded(role, family, tmp_path):
    model, ids = make(family, tie_word_embeddings=True), tokens(2, seed=6)
    freeze(model)
    weight = getattr(model.model.layers[1].self_attn, f"{role}_proj").weight
    with torch.no_grad():
        weight.view(-1)[-1] += 1
        expected = model(ids, use_cache=False).logits
    saf.save(model, tmp_path)
    model.save_pretrained(tmp_path / "trained")
    fresh = make(family, tie_word_embeddings=True)
    named = {"q": "query", "k": "key", "v": "value", "o": "output"}[role]
    with pytest.warns(UserWarning, match=rf"weights differ from those saved .*\(layer 1: {named}\)"):
        saf.load(fresh, tmp_path)
    load_model(fresh, tmp_path / "trained" / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(fresh(ids, use_cache=False).logits, expected)


def test_saved_weights_are_compared_in_their_own_dtype_and_files_without_sums_still_load(tmp_path):
    low = make("llama").bfloat16()
    freeze(low)
    saf.save(low, tmp_path / "low")
    high = make("llama")
    freeze(high)
    with torch.no_grad():
        high.model.layers[1].self_attn.v_proj.weight.mul_(2)
    saf.save(high, tmp_path / "high")
    earlier = tmp_path / "high" / "saf.json"
    state = read_json(earlier)
    for layer in state["layers"]:
        del layer["weights"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saf.load(make("llama").bfloat16().float(), tmp_path / "low")
        saf.load(make("llama"), tmp_path / "low")  # the weights that were rounded
        saf.load(make("llama").bfloat16(), tmp_path / "high")
        earlier.write_text(json.dumps(state))
        saf.load(make("llama"), tmp_path / "high")


def test_a_sidecar_of_other_heads_is_refused(tmp_path):
    model = make("qwen3")
    freeze(model)
    saf.save(model, tmp_path)
    for other in (make("llama-grouped"), make("llama"), make("qwen3", num_hidden_layers=2)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError, match="frozen heads"):
            saf.load(other, tmp_path)
        assert all(torch.equal(other.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_other_heads_are_refused_by_layer_and_heads(family, strict):
    model, other, ordinary = make(family), make(family), make(family)
    freeze(model)
    freeze(other, HeadSet([(0, 0), (0, 2), (1, 0), (1, 1), (2, 3)]))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn: .* heads \[1, 2\], this one has frozen heads \[0, 2\]"
    ):
        other.load_state_dict(model.state_dict(), strict=strict)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn: .* heads none, this one has frozen heads \[1, 2\]"
    ):
        model.load_state_dict(ordinary.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn"):
        ordinary.load_state_dict(model.state_dict(), strict=strict)
    copy.deepcopy(model).load_state_dict(model.state_dict())
    saf.uninstall_(model)
    assert model.state_dict().keys() == ordinary.state_dict().keys()
    assert not model.model.layers[0].self_attn._load_state_dict_pre_hooks
    ordinary.load_state_dict(model.state_dict())
