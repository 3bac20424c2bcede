"""Averaging a model's weights, buffers and state dicts: which heads are frozen, and how, is no number to average."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import saf
from tests.freezing.small_model import make, tokens
from tests.transformers_models import make as make_hf
from tests.transformers_models import tokens as hf_tokens

FREEZE = saf.FreezeConfig(count=3, max_fit_kl=99)


def by_torch(model, **options):
    averaged = AveragedModel(model, use_buffers=True, **options)

    def average() -> Any:
        averaged.update_parameters(model)
        return averaged.module

    return average


def by_hand(model):
    """An average over state dicts, as some training loops keep it."""
    averaged = copy.deepcopy(model)

    def average():
        with torch.no_grad():
            pairs = zip(averaged.state_dict().values(), model.state_dict().values(), strict=True)
            for mean, new in pairs:
                mean.copy_(0.9 * mean + 0.1 * new)
        return averaged

    return average


WAYS = {
    "stochastic weight averaging": by_torch,
    "exponential": lambda model: by_torch(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "a function": lambda model: by_torch(model, avg_fn=lambda mean, new, count: mean + (new - mean) / (count + 1)),
    "a state dict": by_hand,
    "a cast of all there is": lambda model: lambda: model.type(torch.float32),
}


def moved(model):
    """Train, in effect."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * (-1) ** number)


@pytest.mark.parametrize("way", WAYS)
def test_averaged_weights_are_saved_with_their_heads_and_open_again(way, tmp_path):
    model = make()
    report = saf.freeze_(model, [tokens()], FREEZE)
    average = WAYS[way](model)
    weights = []
    for _ in range(3):
        moved(model)
        averaged = average()
        weights.append(model.state_dict()["norm.weight"].clone())
    saf.save(averaged, tmp_path / "saved")
    again = saf.load(tmp_path / "saved")
    assert torch.equal(again(tokens()), averaged(tokens()))
    if way == "stochastic weight averaging":
        torch.testing.assert_close(again.state_dict()["norm.weight"], torch.stack(weights).mean(0))
    saf.uninstall_(again, report.heads)
    model.load_state_dict(averaged.state_dict())


def test_so_are_those_of_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    importlib.import_module("saf.integrations.transformers")  # which lets from_pretrained open such folders
    model = make_hf("llama")
    saf.freeze_(model, [hf_tokens()], FREEZE)
    average = by_torch(model)
    for _ in range(2):
        moved(model)
        averaged = average()
    averaged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(hf_tokens()).logits, averaged(hf_tokens()).logits)
