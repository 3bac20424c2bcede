"""State dicts that tell which heads are frozen: at home where these are, refused by layer and heads anywhere else."""

import pytest
import torch

import saf
from saf.errors import CheckpointError
from tests.freezing.small_model import accepting, make, tokens

KEY = "blocks.1.attention.frozen_layout"


def frozen(*heads: tuple[int, int], storage="compact", **settings) -> saf.GPT:
    model = make()
    settings |= {"storage": storage, **accepting(storage=storage)}
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=heads, **settings))
    return model


@pytest.mark.parametrize("strict", [True, False])
def test_other_heads_and_patterns_are_refused_by_name(strict):
    model, ordinary, other = frozen((1, 0), (1, 2)), make(), frozen((1, 0), (1, 3))
    weights, at = model.state_dict(), r"blocks\.1\.attention: "
    assert weights[KEY].dtype == torch.int64
    assert [name for name in weights if "layout" in name] == [KEY]
    for there, here, message in (
        (model, other, at + r".* heads \[0, 2\], this layer has frozen heads \[0, 3\]"),
        (ordinary, other, at + r".* frozen heads none, this layer has frozen heads \[0, 3\]"),
        (model, ordinary, at + r".* frozen heads \[0, 2\], this layer has frozen heads none"),
        (model, frozen((1, 0), (1, 2), storage="dense"), at + "the state dict has other patterns"),
    ):
        before = {name: tensor.clone() for name, tensor in here.state_dict().items() if name.startswith("blocks.2")}
        with pytest.raises(CheckpointError, match=message):
            here.load_state_dict(there.state_dict(), strict=strict)
        assert all(torch.equal(here.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(CheckpointError, match=r"frozen_layout must be int64 \[heads, 2\].*damaged"):
        model.load_state_dict(weights | {KEY: torch.zeros(4)}, strict=strict)
    assert model.load_state_dict({"norm.weight": weights["norm.weight"]}, strict=False).unexpected_keys == []


def test_trainable_patterns_are_compared_by_their_heads_alone():
    one, other = frozen((1, 0), trainable=True), frozen((1, 0), trainable=True)
    with torch.no_grad():
        one.blocks[1].attention.frozen.patterns[0].rho.mul_(0.5)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(tokens()), one(tokens()))
