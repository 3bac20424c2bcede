"""Models that cannot be edited as they are, and are told why: extra layers, shares of weights, no numbers."""

import copy

import pytest
import torch
from torch import distributed

import saf
from saf.errors import InputError, UnsupportedError
from tests.transformers_models import make, tokens

CONFIG = saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))


def gpt():
    return saf.GPT(saf.GPTConfig(vocab_size=61, num_layers=3, num_heads=4, hidden_size=48, max_length=32))


VERBS = {
    "calibrate": lambda model: saf.calibrate(model, [tokens()]),
    "freeze_": lambda model: saf.freeze_(model, [tokens()], CONFIG),
    "install_": lambda model: saf.install_(model, [(0, 1)], PATTERN),
    "prune_": lambda model: saf.prune_(model, [(0, 1)]),
}


@pytest.mark.parametrize("family", ["gpt", "llama", "gpt2"])
@pytest.mark.parametrize("place", ["beside", "last"])
def test_a_draft_layer_is_named_by_every_verb(family, place):
    model = gpt() if family == "gpt" else make(family)
    layers = model.blocks if family == "gpt" else model.transformer.h if family == "gpt2" else model.model.layers
    if place == "beside":
        model.draft = copy.deepcopy(layers[-1])
    else:
        layers.append(copy.deepcopy(layers[-1]))
    for verb in VERBS.values():
        with pytest.raises(UnsupportedError, match="3 layers, got 4"):
            verb(model)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("verb", VERBS)
def test_weights_without_numbers_are_named(family, verb):
    model = (gpt() if family == "gpt" else make(family)).to("meta")
    with pytest.raises(InputError, match="on the meta device, which holds no numbers"):
        VERBS[verb](model)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_shares_of_weights_are_named_by_every_verb(family, tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = gpt() if family == "gpt" else make(family)
        for layer in model.blocks if family == "gpt" else model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        for verb in (*VERBS.values(), lambda model: saf.save(model, tmp_path / "saved")):
            with pytest.raises(UnsupportedError, match="before fully_shard"):
                verb(model)
        assert not (tmp_path / "saved").exists()
    finally:
        distributed.destroy_process_group()
