"""Averaging a model's weights, buffers and state dicts: which heads are frozen, and how, is no number to average."""

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import saf
from tests.freezing.small_model import make, tokens

FREEZE = saf.FreezeConfig(count=3, max_fit_kl=99)


def by_torch(model):
    averaged = AveragedModel(model, use_buffers=True)

    def average() -> Any:
        averaged.update_parameters(model)
        return averaged.module

    return average


WAYS = {
    "stochastic weight averaging": by_torch,
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
