"""Projections whose weight is computed anew in every pass are refused: the next pass would undo an edit of it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import saf
from saf.adapters import adapter_for
from saf.errors import UnsupportedError
from tests.transformers_models import make, tokens, transformers

CONFIG = saf.FreezeConfig(heads=[(1, 0)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))


def as_buffer(linear, name):
    kept = getattr(linear, name).detach()
    delattr(linear, name)
    linear.register_buffer(name, kept)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


COMPUTED = {
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    "rows pruned": lambda linear: prune.random_structured(linear, "weight", 0.3, dim=0),
    "masked by hand": lambda linear: prune.custom_from_mask(linear, "weight", torch.ones_like(linear.weight)),
    "spectral norm": nn.utils.spectral_norm,
    "weight norm": nn.utils.weight_norm,
    "spectral norm, parametrised": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrised": lambda linear: parametrize.register_parametrization(linear, "weight", Twice()),
    "a buffer": lambda linear: as_buffer(linear, "weight"),
}
VERBS = {
    "freeze_": lambda model: saf.freeze_(model, [tokens()], CONFIG),
    "install_": lambda model: saf.install_(model, [(1, 0)], PATTERN),
    "prune_": lambda model: saf.prune_(model, [(1, 0)]),
}


def gpt():
    return saf.GPT(saf.GPTConfig(vocab_size=61, num_layers=3, num_heads=4, hidden_size=48, max_length=32))


def projection(model, name):
    return getattr(adapter_for(model).sites()[1].attention, name)


CASES = [
    *((family, "v_proj", how) for family in ("gpt", "llama") for how in COMPUTED),
    *(("llama", name, "pruned") for name in ("q_proj", "k_proj", "o_proj")),
    *(
        (family, name, how)
        for family, name in (("gpt2", "c_attn"), ("phi3", "qkv_proj"))
        for how in ("pruned", "a buffer")
    ),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("family", "name", "how"), CASES)
def test_a_weight_that_is_not_its_projections_own_is_refused_before_anything_moves(family, name, how):
    model = gpt() if family == "gpt" else make(family)
    COMPUTED[how](projection(model, name))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for verb in VERBS.values():
        with pytest.raises(UnsupportedError):
            verb(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    # Passes of calibration turn what spectral norm multiplies by.
    same = [torch.equal(tensor, before[key]) for key, tensor in after.items() if not key.endswith(("_u", "_v"))]
    assert all(same)


def test_a_computed_bias_is_refused():
    model = make("llama-biases")
    prune.l1_unstructured(projection(model, "k_proj"), "bias", 0.3)
    for verb in VERBS.values():
        with pytest.raises(UnsupportedError):
            verb(model)


def test_a_callback_refuses_it_before_training(tmp_path):
    from saf.integrations.transformers import FreezeCallback

    model = make("llama")
    prune.l1_unstructured(projection(model, "v_proj"), "weight", 0.3)
    arguments = transformers.TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True)
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[FreezeCallback(CONFIG, [tokens()])])
    with pytest.raises(UnsupportedError):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_mask_made_after_freezing_is_refused_where_heads_are_undone_or_saved(family, tmp_path):
    model = gpt() if family == "gpt" else make(family)
    saf.install_(model, [(1, 0)], PATTERN)
    linear = projection(model, "v_proj")
    prune.l1_unstructured(linear, "weight", 0.3)
    for refused in (lambda: saf.uninstall_(model), lambda: saf.save(model, tmp_path / "saved")):
        with pytest.raises(UnsupportedError):
            refused()
    assert not (tmp_path / "saved").exists()
    prune.remove(linear, "weight")
    saf.save(model, tmp_path / "saved")
    saf.uninstall_(model)
    assert not adapter_for(model).frozen_heads()


def test_a_mask_made_permanent_and_masks_elsewhere_are_no_matter():
    model = make("llama")
    linear, mlp = projection(model, "v_proj"), model.model.layers[1].mlp.up_proj
    for each in (linear, mlp):
        prune.l1_unstructured(each, "weight", 0.3)
    prune.remove(linear, "weight")
    zero = (linear.weight == 0).sum()
    saf.freeze_(model, [tokens()], CONFIG)
    assert (linear.weight == 0).sum() == zero > 0
    assert model(tokens(), use_cache=False).logits.isfinite().all()
