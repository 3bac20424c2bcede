"""What a freezing event leaves behind: its report, certificates of fits, and a model that loads again."""

from dataclasses import replace

import pytest
import torch

import saf
from saf.errors import CheckpointError
from saf.models import GPT
from saf.records.events import read_events
from tests.freezing.small_model import LENGTH, SHAPE, make, tokens


def test_the_report_prints_and_saves(tmp_path):
    model, ids = make(), tokens()
    report = saf.freeze_(model, [ids])
    assert "3 of 12 heads frozen by variance" in str(report)
    assert repr(report) == "<FreezeReport: 3 of 12 heads frozen by variance; print() shows the table>"
    assert set(report.seconds) == {"capture", "statistics", "score", "select", "fit", "install"}
    report.save(tmp_path, update=7)
    (event,) = read_events(tmp_path)
    tensors = event.tensors()
    assert (event.kind, event.number, event.update) == ("freeze", 1, 7)
    assert event.heads == report.heads.to_list()
    assert tensors["alpha"].shape == (3, LENGTH)
    assert tensors["eta_abs"].shape == (3, 4, LENGTH)


def test_a_later_event_tells_how_many_more_and_in_all(tmp_path):
    model, ids = make(), tokens()
    first = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, max_fit_kl=100))
    more = tuple((layer, head) for layer in range(3) for head in range(4) if (layer, head) not in first.heads)[:2]
    named = saf.freeze_(model, [ids], saf.FreezeConfig(heads=more, max_fit_kl=100))
    last = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, max_fit_kl=100))
    assert "2 more of 12 heads frozen as named, 5 in all" in str(named)
    assert "3 more of 12 heads frozen by variance, 8 in all" in str(last)
    assert sum(block.attention.layout.num_frozen for block in model.blocks) == 8
    assert [report.to_dict()["frozen_in_all"] for report in (first, named, last)] == [3, 5, 8]
    pruned = saf.freeze_(model, [ids], saf.FreezeConfig(count=1, operation="prune"))
    assert pruned.summary == "1 of 12 heads pruned by variance, 8 frozen and 1 pruned in all"
    again = saf.freeze_(model, [ids], saf.FreezeConfig(count=2, operation="prune"))
    assert again.summary == "2 more of 12 heads pruned by variance, 8 frozen and 3 pruned in all"


def floored_mean(found, head) -> torch.Tensor:
    floored = found.take("mean", [head])[0].double().clamp(min=1e-9).tril()
    return floored / floored.sum(-1, keepdim=True)


def test_the_certificate_of_every_fit_is_recorded(tmp_path):
    model, ids = make(), tokens()
    found = saf.calibrate(model, [ids], collect=("mean",))
    config = saf.FreezeConfig(rate=0.5, max_fit_kl=9, fitter_options={"max_sweeps": 2, "tolerance": 0.068})
    words = "fits stopped before their marginals agreed within 0.068"
    with pytest.warns(UserWarning, match=words):
        kls = sorted(saf.freeze_(make(), [ids], config).fit_kl.values())
    with pytest.warns(UserWarning, match=words):
        report = saf.freeze_(model, [ids], replace(config, rate=0.25, max_fit_kl=(kls[2] + kls[3]) / 2))
    assert report.heads
    assert report.rejected
    report.save(tmp_path)
    saved = read_events(tmp_path)[0].values["certificates"]
    records = {tuple(record["head"]): record for record in saved}
    assert set(records) == set(report.heads) | set(report.rejected)
    for number, head in enumerate(report.heads):
        goal, fitted, record = floored_mean(found, head), report.patterns[number].dense(), records[head]
        # Both marginals of whole matrices; a floored entry has too little weight to count in a relative error.
        by_key, goal_by_key = fitted.sum(0), goal.sum(0)
        by_distance, goal_by_distance = (
            torch.stack([each.diagonal(-d).sum() for d in range(LENGTH)]) for each in (fitted, goal)
        )
        both = {"abs": (by_key, goal_by_key), "rel": (by_distance, goal_by_distance)}
        for name, (one, other) in both.items():
            error = (one / other - 1)[other >= 1e-7 * torch.arange(LENGTH, 0, -1)].abs().max().item()
            assert record[f"max_relative_{name}"] == pytest.approx(error, rel=1e-3)
        l1 = sum(float((one - other).abs().sum()) for one, other in both.values()) / LENGTH
        assert record["l1"] == pytest.approx(l1, rel=1e-3)
        assert record["gap"] == record["radius"] * record["l1"]
        assert record["sweeps"] == 2
        worst = max(record["max_relative_abs"], record["max_relative_rel"], record["l1"])
        assert record["converged"] == (worst <= 0.068 == record["tolerance"])
    assert {record["converged"] for record in saved} == {False, True}


@pytest.mark.parametrize("options", [{"storage": "dense"}, {"pattern": "structured_random"}])
def test_what_is_not_fitted_has_no_certificate(options):
    assert saf.freeze_(make(), [tokens()], saf.FreezeConfig(**options)).to_dict()["certificates"] == []


def test_save_then_load_is_the_identity(tmp_path):
    model, ids = make(), tokens()
    saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.5))
    saf.save(model, tmp_path)
    loaded = saf.load(tmp_path)
    assert torch.equal(loaded(ids), model(ids))
    saf.uninstall_(loaded)
    assert torch.equal(loaded(ids), make()(ids))
    filled = saf.load(GPT(SHAPE), tmp_path)
    assert torch.equal(filled(ids), model(ids))
    (tmp_path / "saf.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"saf.json is not valid JSON"):
        saf.load(tmp_path)
