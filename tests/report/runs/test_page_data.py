import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.evaluate.compare import compare_runs
from saf.evaluate.side_by_side import compare_all
from saf.records.run import RecordedRun
from saf.report.runs.page_data import arm_data, curve, freeze_data, gap_data, log_bins, moving_mean, rounded
from tests.report.synthetic import Shape, edit, edit_event, event_of, patterns, write_pair, write_run


@given(length=st.integers(1, 20_000), limit=st.integers(8, 512))
def test_bins_cover_every_position_once_and_widen(length, limit):
    edges = log_bins(length, limit)
    widths = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, length)
    assert len(widths) <= limit
    assert (widths >= 1).all()
    assert (np.diff(widths[:-1]) >= -1).all()


def test_a_curve_keeps_its_ends_and_drops_what_is_not_finite():
    x, y = np.arange(1.0, 5001.0), np.arange(5000.0)
    y[7] = np.nan
    made = curve(x, y, limit=512)
    assert len(made["x"]) == len(made["y"]) == 512
    assert made["x"] == sorted(made["x"])
    assert np.allclose(made["y"], np.array(made["x"]) - 1, rtol=1e-4)
    assert curve(np.arange(3.0), np.array([1.0, np.nan, 2.0])) == {"x": [0.0, 2.0], "y": [1.0, 2.0]}
    assert curve(np.empty(0), np.empty(0)) == {"x": [], "y": []}


def test_the_moving_mean_is_centred_and_ignores_nan():
    values = np.array([1.0, 2.0, 3.0, np.nan, 5.0])
    assert moving_mean(values, 3).tolist() == [1.5, 2.0, 2.5, 4.0, 5.0]
    line = np.arange(100.0)
    assert np.allclose(moving_mean(line, 11)[5:-5], line[5:-5])


def test_rounding_goes_through_lists_and_turns_nan_into_none():
    assert rounded([1.23456, [float("nan"), 0.00012345]]) == [1.235, [None, 0.0001234]]


def test_the_gap_shows_the_planted_cost(tmp_path):
    shape = Shape(updates=400, freeze_update=200)
    ordinary, frozen = (RecordedRun.open(folder) for folder in write_pair(tmp_path, shape, cost=0.02))
    gap = gap_data(ordinary, frozen, "frozen", "frozen")
    assert gap["updates"] == [201, 400]
    assert gap["window"] == round(0.042 * 400)
    assert np.mean(gap["smooth"]["y"][-50:]) == pytest.approx(0.02, rel=0.15)


def test_both_arms_are_smoothed_alike_even_when_one_starts_later(tmp_path):
    ordinary, frozen = write_pair(tmp_path, Shape(updates=600, freeze_update=300))
    path = frozen / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[300:]))
    arms = [arm_data(RecordedRun.open(folder), folder.name, "live") for folder in (ordinary, frozen)]
    assert arms[0]["window"] == arms[1]["window"] == 12
    assert arms[1]["updates"] == [301, 600]


def test_a_frozen_heads_curves_give_back_its_pattern(tmp_path):
    run = RecordedRun.open(write_run(tmp_path / "run", frozen=True))
    data = freeze_data(run, "run", "frozen")
    shape, (layer, head) = Shape(), data["frozen"][0]
    curves = data["patterns"]["curves"][f"{layer},{head}"]
    assert data["patterns"]["position"] == list(range(shape.length))
    alpha, rho, log_z = (
        torch.tensor(curves[key]["mean"] if key != "log_z" else curves[key]) for key in ("alpha", "rho", "log_z")
    )
    made = patterns(shape)
    true_alpha, true_rho, true_z = (made[key][layer, head] for key in ("alpha", "rho", "log_z"))
    i, j = 40, torch.arange(41)
    assert torch.allclose(
        alpha[j] + rho[i - j] - log_z[i], (true_alpha[j] + true_rho[i - j] - true_z[i]).float(), atol=5e-3
    )


def test_marginals_are_mean_attention_over_the_pairs_of_a_bin(tmp_path):
    shape = Shape(length=300)
    data = freeze_data(RecordedRun.open(write_run(tmp_path / "run", shape, frozen=True)), "run", "frozen")
    eta = patterns(shape)["eta_rel"][1, 2].numpy()
    edges = log_bins(300, 128)
    last = slice(edges[-2], edges[-1])
    pairs = (300 - np.arange(300))[last].sum()
    assert len(data["marginals"]["position"]) == len(edges) - 1 <= 128
    assert data["marginals"]["by_distance"][1][2][0] == pytest.approx(eta[0] / 300, rel=1e-2)
    assert data["marginals"]["by_distance"][1][2][-1] == pytest.approx(eta[last].sum() / pairs, rel=1e-2)


def test_long_patterns_are_thinned_with_their_range(tmp_path):
    data = freeze_data(
        RecordedRun.open(write_run(tmp_path / "run", Shape(layers=1, heads=4, length=600), frozen=True)),
        "run",
        "frozen",
    )
    (curves,) = data["patterns"]["curves"].values()
    assert len(data["patterns"]["position"]) <= 256
    low, mean, high = (np.array(curves["alpha"][key]) for key in ("low", "mean", "high"))
    assert ((low <= mean + 1e-3) & (mean <= high + 1e-3)).all()
    assert (high[-20:] - low[-20:] > 0.05).all()


def test_heads_frozen_before_have_no_score(tmp_path):
    folder = write_run(tmp_path / "run", frozen=True)
    scores = event_of(folder)["scores"]
    scores[0][0] = None
    edit_event(folder, scores=scores)
    data = freeze_data(RecordedRun.open(folder), "run", "frozen")
    assert data["scores"]["variance"][0][0] is None
    json.dumps(data, allow_nan=False)


def test_an_ordinary_run_has_no_head_map(tmp_path):
    assert freeze_data(RecordedRun.open(write_run(tmp_path / "run")), "run", "frozen") is None


def test_an_archived_pair_is_compared_by_its_record(tmp_path):
    ordinary, frozen = write_pair(tmp_path, Shape(updates=60, freeze_update=30))
    record = compare_runs(ordinary, frozen, out=frozen)
    for folder in (ordinary, frozen):
        (folder / "log_probs.safetensors").unlink()
    runs = [RecordedRun.open(folder) for folder in (ordinary, frozen)]
    (found,) = compare_all(runs, ["ordinary", "frozen"])
    assert found.record is not None
    assert found.record["delta_ppl_percent"] == record["delta_ppl_percent"]
    edit(frozen / "compare.json", ppl_frozen=record["ppl_frozen"] * 1.01)
    (found,) = compare_all(runs, ["ordinary", "frozen"])
    assert found.record is None
    assert "log_probs.safetensors" in found.reason
