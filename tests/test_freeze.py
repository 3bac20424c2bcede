"""The whole recipe: the lowest heads with fits of their mean, none or all of them, and inputs that are too long."""

from pathlib import Path

import pytest
import torch

import saf
from saf.errors import InputError
from tests.freezing import LENGTH, make, tokens


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


def test_settings_of_another_type_are_refused():
    with pytest.raises(InputError, match=r"must be a saf\.FreezeConfig.*got \{'rate': 0\.5\}"):
        saf.freeze_(make(), [tokens()], {"rate": 0.5})


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="calibration has|could be frozen") as caught:
        saf.freeze_(make(), [tokens()[:, :20]], saf.FreezeConfig(rate=1.0, max_fit_kl=1e-9))
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name] * 2
