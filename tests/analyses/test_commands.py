"""Every analysis from the command line, on two real, tiny runs: its record, tables and figure."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.analyses import ANALYSES, Analysis, analysis_figure, main
from experiments.analyses.common import matrix, spearman
from saf.checkpoint import checkpoint_hash
from saf.records.files import file_hash, read_json
from saf.records.run import read_events
from saf.targets import TARGETS

SMALL = ("--device", "cpu", "--sequences", 4)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs an analysis and returns its record; it checks that its figure can be drawn."""

    def measure(name, *words) -> dict:
        out = tmp_path / f"{name}.json"
        out.unlink(missing_ok=True)
        assert main([name, *map(str, words), "--out", str(out)]) == 0
        drawn = ANALYSES[name].draw is not Analysis.draw
        assert (analysis_figure([read_json(out)]) is not None) == drawn
        return read_json(out)

    return measure


@pytest.fixture(scope="module")
def measured(arms, tmp_path_factory):
    """One-head costs and profiles of the ordinary run's midpoint, as files."""
    folder = tmp_path_factory.mktemp("analyses")
    one_head = ("--windows", 3, "--heldout-sequences", 2, "--max-fit-kl", 10)
    for name, words in {"one-head": one_head, "profiles": ("--windows", 6)}.items():
        words = (midpoint(arms), *SMALL, *words, "--out", folder / f"{name}.json")
        assert main([name, *map(str, words)]) == 0
    return folder


def midpoint(arms) -> Path:
    return arms[0] / "checkpoints" / "step-12"


def test_one_head(arms, measured):
    record = read_json(measured / "one-head.json")
    assert record["provenance"]["checkpoints"] == {"model": checkpoint_hash(midpoint(arms))}
    assert {"variance", "residual_cosine", "gate_taylor"} <= record["quality"].keys() == record["scores"].keys()
    change, scores = matrix(record["nll_change"]), matrix(record["scores"]["variance"])
    lowest = scores.flatten().argsort()[:2]
    expected = 100 * torch.expm1(change.flatten()[lowest]).mean().item()
    assert record["quality"]["variance"]["mean_cost"]["0.25"] == pytest.approx(expected)
    assert record["quality"]["variance"]["spearman"] == pytest.approx(spearman(scores, change))


def test_partial_spearman_of_records(run, measured, tmp_path, capsys):
    costs, profiles = measured / "one-head.json", read_json(measured / "profiles.json")
    record = run("partial-spearman", costs, "--profiles", measured / "profiles.json")
    for name, found in record["correlations"].items():
        assert found["spearman"] == pytest.approx(read_json(costs)["quality"][name]["spearman"])
    profiles["provenance"]["checkpoints"]["model"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(profiles))
    assert main(["partial-spearman", str(costs), "--profiles", str(tmp_path / "other.json")]) == 2
    assert "about one model" in capsys.readouterr().err


def test_joint_cost_of_heads_in_a_file_and_of_a_set_with_itself(run, arms):
    words = (midpoint(arms), *SMALL, "--windows", 3)
    record = run("joint-cost", *words, "--first", arms[1] / "events.jsonl", "--second", "0:0", "0:1", "1:2")
    assert record["heads"][0] == read_events(arms[1])[0].heads
    same = run("joint-cost", *words, "--first", "0:0", "1:1", "--second", "1:1", "0:0")
    assert (same["difference"]["delta_ppl_percent"], same["overlap"]) == (0, 2)
    adam = run("joint-cost", *words, "--first", "0:0", "1:1", "--second", "1:1", "0:0", "--fitter", "adam")
    assert adam["first"] != same["first"]


def test_profiles_of_selected_heads_over_seeds(run, arms, measured):
    record = run("profiles", midpoint(arms), *SMALL, "--windows", 6, "--selected", arms[1])
    assert record["profiles"] == read_json(measured / "profiles.json")["profiles"]
    # Windows of 32 tokens have no key further back than 64.
    assert record["matched"]["local_mass"] == pytest.approx([1, 1])
    assert record["in_first_layers"] == len(record["selected"]) == 2
    assert analysis_figure([record, {**record, "selected": [[0, 0], [0, 1], [1, 1]]}]) != analysis_figure([record])


def test_stability(run, arms):
    record = run("stability", arms[1], arms[1] / "events.jsonl")
    assert record["first"] == record["overlap"] == 2
    assert "2 of 2 (chance" in analysis_figure([record])
    assert record["rank_correlation"] == pytest.approx(1)
    assert record["provenance"]["files"] == dict.fromkeys(("first", "second"), file_hash(arms[1] / "events.jsonl"))
    rng, layers = np.random.default_rng(0), [sum(layer == at for at, _ in record["heads"][0]) for layer in range(2)]
    drawn = [sum(len({*rng.permutation(4)[:n]} & {*rng.permutation(4)[:n]}) for n in layers) for _ in range(4000)]
    expected = record["expected"], record["standard_deviation"]
    assert (np.mean(drawn), np.std(drawn)) == pytest.approx(expected, abs=0.05)


def test_selections_that_there_are_not_are_refused(arms, capsys):
    assert main(["stability", str(arms[0]), str(arms[1])]) == 2
    assert "must have an event" in capsys.readouterr().err
    assert main(["profiles", str(midpoint(arms)), *map(str, SMALL), "--selected", "9:0"]) == 2
    assert "heads must exist" in capsys.readouterr().err


def test_geometry_and_costs(run, arms, tmp_path):
    costs = {rate: {name: number for number, name in enumerate(TARGETS)} for rate in ("0.25", "0.5")}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    record = run("geometry", midpoint(arms), *SMALL, "--rates", 0.25, 0.5, "--costs", tmp_path / "costs.json")
    distances = record["distances"]["squared_error"]
    assert distances["0.25"].keys() == TARGETS.keys()
    assert distances["0.5"]["mean"] == pytest.approx(0, abs=1e-12)
    assert distances["0.5"]["structured_random"] > distances["0.5"]["sharp_mean"] > 0
    assert record["correlations"]["kl"][0].keys() == costs.keys()


def test_distributions(run, arms):
    words = (midpoint(arms), "--device", "cpu", "--sequences", 12, "--rate", 0.5, "--shown", 2)
    record = run("distributions", *words)
    assert (record["sequences"], record["rows"]) == ([7, 5], 3)
    assert record["positions"] == [1, 3, 7, 15, 23, 31]
    flat = [value for row in record["normalised"]["gaussian"] for value in row]
    assert record["medians"]["gaussian"] == pytest.approx(np.median(flat))


def test_storage(run, arms):
    record = run("storage", arms[1])
    layers = {layer for layer, _ in read_events(arms[1])[0].heads}
    assert (record["heads"], record["layers"]) == (2, len(layers))
    assert record["bytes"]["dense_by_layer"] == len(layers) * 4 * 32 * 32 * 4


def test_unusable_input_is_refused(arms, tmp_path, capsys):
    checkpoint, old = midpoint(arms), tmp_path / "old.json"
    old.write_text("old")
    for words, message in (
        (("profiles", checkpoint, "--selected", *(f"0:{head}" for head in range(4))), "nothing to compare"),
        (("joint-cost", checkpoint, "--first", "0:0", "--second", "0:4"), "do not exist: [[0, 4]]"),
        (("one-head", checkpoint, "--rates", 0.25, 0.01), "at least one of 8 heads"),
        (("geometry", checkpoint, "--rates", 0.25, "--costs", arms[1] / "config.json"), "a rank needs two"),
        (("distributions", checkpoint, "--sequences", 5), "to be fitted to and two others; got 3 of 5"),
        (("profiles", checkpoint, "--out", old), "exists already"),
    ):
        assert main(list(map(str, (*words, "--device", "cpu")))) == 2
        assert message in capsys.readouterr().err
    assert old.read_text() == "old"
