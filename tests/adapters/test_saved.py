"""Frozen models of transformers, saved and loaded: the same weights alike, others told by name."""

import copy
import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_model

import saf
from saf.adapters import adapter_for, rows_of
from saf.errors import CheckpointError, InputError, SafWarning
from saf.heads import HeadSet, role_of
from saf.records.files import read_json
from tests.transformers_models import freeze, make, tokens, weight_of


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
        names = ", ".join(sorted({role_of(name) for name in adapter_for(other).sites()[0].projections()}))
        with pytest.warns(UserWarning, match=f"weights differ .*layer 0: {names}; .*load the state"):
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
    if family == "gpt2":
        other.config.scale_attn_by_inverse_layer_idx, told = True, "scale_attn_by_inverse_layer_idx"
    else:
        other.config.rope_parameters = dict(other.config.rope_parameters, rope_theta=5e5)
        told = "rope_parameters: .*500000"
    with pytest.warns(SafWarning, match=f"attend otherwise .*{told}"):
        saf.load(other, tmp_path)


def test_what_was_final_when_it_was_saved_cannot_be_undone(family, tmp_path):
    model = make(family)
    freeze(model)
    saf.finalize_(model)
    saf.save(model, tmp_path)
    with pytest.raises(InputError, match="were not kept"):
        saf.uninstall_(saf.load(make(family), tmp_path))


@pytest.mark.parametrize("role", ["query", "value", "output"])
def test_weights_trained_after_freezing_are_missed_by_name_until_they_are_loaded(role, family, tmp_path):
    model, ids = make(family, tie_word_embeddings=True), tokens(2, seed=6)
    freeze(model)
    weight = weight_of(model, 1, role)
    with torch.no_grad():
        weight[-1, -1] += 1
        expected = model(ids, use_cache=False).logits
    saf.save(model, tmp_path)
    model.save_pretrained(tmp_path / "trained")
    fresh = make(family, tie_word_embeddings=True)
    named = rows_of(adapter_for(model).sites()[1], role).name
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
    attention = adapter_for(model).sites()[0].attention
    path = next(re.escape(name) for name, module in model.named_modules() if module is attention)
    with pytest.raises(CheckpointError, match=rf"{path}: .* heads \[1, 2\], this one has frozen heads \[0, 2\]"):
        other.load_state_dict(model.state_dict(), strict=strict)
    with pytest.raises(CheckpointError, match=rf"{path}: .* heads none, this one has frozen heads \[1, 2\]"):
        model.load_state_dict(ordinary.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=path):
        ordinary.load_state_dict(model.state_dict(), strict=strict)
    copy.deepcopy(model).load_state_dict(model.state_dict())
    saf.uninstall_(model)
    assert model.state_dict().keys() == ordinary.state_dict().keys()
    assert not attention._load_state_dict_pre_hooks
    ordinary.load_state_dict(model.state_dict())
