"""The whole recipe: the lowest heads with fits of their mean, none or all of them, and inputs that are too long."""

import warnings
from pathlib import Path

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from tests.freezing.small_model import LENGTH, make, tokens


def test_the_lowest_heads_are_frozen_with_fits_of_their_mean():
    model, ids = make(), tokens()
    statistics = saf.calibrate(model, [ids])
    report = saf.freeze_(model, [ids[:3], ids[3:]], saf.FreezeConfig(rate=0.25))
    assert report.heads == saf.select(saf.score(statistics), 0.25)
    assert len(report.heads) == 3
    chosen = (
        [statistics.eta_abs[layer, head] for layer, head in report.heads],
        [statistics.eta_rel[layer, head] for layer, head in report.heads],
    )
    entropy = torch.stack([statistics.row_entropy[layer, head] for layer, head in report.heads])
    fitted = saf.fit_compact(*map(torch.stack, chosen))
    torch.testing.assert_close(report.patterns.dense(), fitted.dense())
    kls = saf.fit_kl(fitted, *map(torch.stack, chosen), entropy)
    assert list(report.fit_kl.values()) == pytest.approx(kls.tolist(), abs=1e-9)
    assert max(report.fit_kl.values()) <= 0.2
    assert model(ids).shape == (6, LENGTH, 60)


def test_freezing_no_head_changes_nothing():
    model, ids = make(), tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.0))
    assert (len(report.heads), report.patterns) == (0, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids), make()(ids))


def test_with_all_heads_frozen_queries_and_keys_are_gone():
    model, ids = make(gain=1.0), tokens()
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=1.0))
    assert len(report.heads) == 12
    for block in model.blocks:
        assert block.attention.q_proj.weight.numel() == block.attention.k_proj.weight.numel() == 0
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert model.blocks[0].attention.v_proj.weight.grad.abs().sum() > 0


def test_inputs_longer_than_the_patterns_are_refused():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="calibration has 20 tokens, the model takes up to 48"):
        saf.freeze_(model, [ids[:, :20]])
    assert model(ids[:, :20]).shape[1] == 20
    with pytest.raises(InputError, match="input has 48 positions, the frozen heads' patterns cover 20"):
        model(ids)
    pruned = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saf.freeze_(pruned, [ids[:, :20]], saf.FreezeConfig(rate=0.25, operation="prune"))
    assert pruned(ids).shape[1] == 48


def test_calibration_beyond_the_context_of_a_model_of_transformers_warns():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=16)
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(3, 61, (4, 24))
    with pytest.warns(UserWarning, match="calibration has 24 tokens, the model is made for 16"):
        saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, max_fit_kl=100))


def test_batches_as_loaders_give_them_and_not_by_themselves():
    ids = tokens()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=3)
    assert saf.freeze_(make(), loader).heads == saf.freeze_(make(), [ids]).heads
    for bare in (ids, {"input_ids": ids}):
        with pytest.raises(InputError, match="a list of one; got a bare"):
            saf.freeze_(make(), bare)


def test_a_model_without_numbers_is_refused():
    with pytest.raises(InputError, match="on the meta device, which holds no numbers"):
        saf.freeze_(make().to("meta"), [tokens()])


def test_a_backend_that_cannot_run_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("saf.freezing.recipe.calibrate", None)
    with pytest.raises(UnsupportedError, match="backend 'fused' cannot run: it needs a CUDA device"):
        saf.freeze_(make(), [tokens()], saf.FreezeConfig(backend="fused"))


def test_an_optimizer_of_other_weights_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("saf.freezing.recipe.calibrate", None)
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(InputError, match="does not hold the model's attention weights"):
        saf.freeze_(make(), [tokens()], optimizer=stranger)


def test_a_tail_that_the_length_does_not_have_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("saf.freezing.recipe.calibrate", None)
    config = saf.FreezeConfig(fitter_options={"alpha_constant_after": LENGTH})
    with pytest.raises(InputError, match=rf"alpha_constant_after must lie in \[0, T/4\), T = {LENGTH}; got {LENGTH}"):
        saf.freeze_(make(), [tokens()], config)


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="calibration has|could be frozen") as caught:
        saf.freeze_(make(), [tokens()[:, :20]], saf.FreezeConfig(rate=1.0, max_fit_kl=1e-9))
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name] * 2
