"""Every analysis from the command line, on two real, tiny runs."""

import json

import pytest
import torch

from saf.cli.analyze import matrix
from saf.files import read_json
from saf.patterns import PATTERNS

COMMON = ("--device", "cpu", "--sequences", 4)


@pytest.fixture(scope="module")
def measured(arms, tmp_path_factory):
    """One-head costs and profiles of the ordinary run's midpoint, as files."""
    from saf.cli import main

    folder, checkpoint = tmp_path_factory.mktemp("analyze"), str(arms[0] / "checkpoints" / "step-12")
    common = [checkpoint, *map(str, COMMON), "--json"]
    files = {"one-head": ["--windows", "3", "--heldout-sequences", "2", "--max-fit-kl", "10"], "profiles": []}
    for name, words in files.items():
        assert main(["analyze", name, *common, *words, "--out", str(folder / f"{name}.json")]) == 0
    return folder


def test_one_head(saf, arms, measured):
    record = read_json(measured / "one-head.json")
    assert record["schema"] == "saf.analysis/one-head/1"
    assert matrix(record["nll_change"]).shape == (2, 4)
    assert len(record["eligible"]) == 8
    assert {"variance", "residual_cosine", "gate_taylor"} <= record["quality"].keys() == record["scores"].keys()
    assert "qk_gradient" not in record["scores"]
    change = matrix(record["nll_change"])
    lowest = matrix(record["scores"]["variance"]).flatten().argsort()[:2]
    expected = 100 * torch.expm1(change.flatten()[lowest]).mean().item()
    assert record["quality"]["variance"]["mean_cost"]["0.25"] == pytest.approx(expected)
    code, out, _ = saf("analyze", "one-head", arms[0], *COMMON, "--windows", 2, "--heldout-sequences", 0)
    assert code == 0
    assert "Spearman" in out
    assert "residual_cosine" not in out


def test_partial_spearman_reads_what_was_measured(saf_json, saf, measured, tmp_path):
    files = (measured / "one-head.json", "--profiles", measured / "profiles.json")
    told = saf_json("analyze", "partial-spearman", *files, "--out", tmp_path / "p.json")
    quality = read_json(measured / "one-head.json")["quality"]
    assert told == read_json(tmp_path / "p.json")
    assert told["heads"] == 8
    for name, found in told["correlations"].items():
        assert found["spearman"] == pytest.approx(quality[name]["spearman"])
        assert found.keys() == {"spearman", "layer", "layer_entropy", "with_entropy"}
    code, _, err = saf("analyze", "partial-spearman", measured / "profiles.json")
    assert code == 2
    assert "analyze one-head" in err


def test_joint_cost_of_a_set_with_itself_and_of_files(saf_json, arms, tmp_path):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    sets = ("--first", arms[1] / "freeze.json", "--second", "0:0", "0:1", "1:2")
    told = saf_json("analyze", "joint-cost", checkpoint, *COMMON, "--windows", 3, *sets, "--out", tmp_path / "j.json")
    assert told["heads"][0] == read_json(arms[1] / "freeze.json")["heads"]
    assert told["first"]["windows"] == 3
    same = saf_json("analyze", "joint-cost", checkpoint, *COMMON, "--first", "0:0", "1:1", "--second", "1:1", "0:0")
    assert same["difference"]["delta_ppl_percent"] == 0
    assert same["overlap"] == 2


def test_profiles_of_selected_heads(saf_json, saf, arms, measured):
    words = ("analyze", "profiles", arms[0] / "checkpoints" / "step-12", *COMMON)
    told = saf_json(*words, "--selected", arms[1] / "freeze.json")
    assert told["profiles"] == read_json(measured / "profiles.json")["profiles"]
    assert set(told["matched"]) == {"entropy", "local_mass", "largest", "first_token"}
    # Windows of 32 tokens have no key further back than 64.
    assert told["matched"]["local_mass"] == pytest.approx([1, 1])
    code, out, _ = saf(*words, "--selected", "0:1")
    assert code == 0
    assert "layer-matched" in out


def test_stability_of_a_selection_with_itself(saf_json, saf, arms):
    told = saf_json("analyze", "stability", arms[1], arms[1] / "freeze.json")
    assert told["first"] == told["overlap"] == 2
    assert told["expected"] < 2
    assert told["rank_correlation"] == pytest.approx(1)
    code, _, err = saf("analyze", "stability", arms[1] / "config.json", arms[1])
    assert code == 2
    assert "freeze.json" in err


def test_geometry_and_costs(saf_json, saf, arms, tmp_path):
    costs = {rate: {name: number for number, name in enumerate(PATTERNS)} for rate in ("0.25", "0.5")}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    words = ("analyze", "geometry", arms[0] / "checkpoints" / "step-12", *COMMON, "--rates", 0.25, 0.5)
    told = saf_json(*words, "--costs", tmp_path / "costs.json")
    distances = told["distances"]["squared_error"]
    assert distances["0.25"].keys() == PATTERNS.keys()
    assert distances["0.5"]["mean"] == pytest.approx(0, abs=1e-12)
    assert distances["0.5"]["structured_random"] > distances["0.5"]["sharp_mean"] > 0
    within, pooled = told["correlations"]["kl"]
    assert within.keys() == costs.keys()
    assert -1 <= pooled <= 1
    code, _, err = saf(*words[:-2], 0.0)
    assert code == 2
    assert "at least one" in err
