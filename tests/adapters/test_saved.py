"""The sidecar of frozen models of transformers: the same weights freeze alike, others raise or warn by name."""

import copy
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_model

import saf
from saf.errors import CheckpointError, SafWarning
from saf.models.adapter import adapter_for, rows_of
from tests.transformers_models import freeze, logits, make, weight_of


def test_a_sidecar_freezes_the_same_weights_alike(shape, tmp_path):
    model = make(shape)
    freeze(model)
    saf.save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = saf.load(make(shape), tmp_path)
    expected = logits(model)
    assert torch.equal(logits(fresh), expected)
    other = make(shape)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    with pytest.warns(UserWarning, match="weights differ .*layer 0"):
        saf.load(other, tmp_path)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), expected)
    rotated = make(shape)
    if shape == "gpt2":
        rotated.config.scale_attn_by_inverse_layer_idx = True
    else:
        rotated.config.rope_parameters = dict(rotated.config.rope_parameters, rope_theta=5e5)
    with pytest.warns(SafWarning, match="attention differs from the saved one"):
        saf.load(rotated, tmp_path)
    # Undoing gives back what was frozen, whatever the model had that it was loaded into.
    for one in (fresh, other):
        saf.uninstall_(one)
        assert all(map(torch.equal, one.parameters(), make(shape).parameters()))


@pytest.mark.parametrize(("family", "role"), [("qwen3", "query"), ("gpt2", "value"), ("qwen3", "output")])
def test_weights_trained_after_freezing_are_missed_by_name_until_they_are_loaded(role, family, tmp_path):
    model = make(family, tie_word_embeddings=True)
    freeze(model)
    with torch.no_grad():
        weight_of(model, 1, role)[-1, -1] += 1
    expected = logits(model)
    saf.save(model, tmp_path)
    model.save_pretrained(tmp_path / "trained")
    fresh = make(family, tie_word_embeddings=True)
    named = rows_of(adapter_for(model).sites()[1], role).name
    with pytest.warns(UserWarning, match=rf"weights differ from those saved .*\(layer 1: {named}\)"):
        saf.load(fresh, tmp_path)
    load_model(fresh, tmp_path / "trained" / "model.safetensors")
    assert torch.equal(logits(fresh), expected)


def test_saved_weights_are_compared_in_their_own_dtype(tmp_path):
    low = make("llama").bfloat16()
    freeze(low)
    saf.save(low, tmp_path / "low")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saf.load(make("llama").bfloat16().float(), tmp_path / "low")
        saf.load(make("llama"), tmp_path / "low")  # the weights that were rounded


def test_a_sidecar_of_other_heads_is_refused(tmp_path):
    model = make("qwen3")
    freeze(model)
    saf.save(model, tmp_path)
    for other in (make("llama"), make("qwen3", num_hidden_layers=2)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError):
            saf.load(other, tmp_path)
        assert all(torch.equal(other.state_dict()[name], before[name]) for name in before)


def test_a_pickled_model_attends(shape):
    model = make(shape)
    freeze(model)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))
