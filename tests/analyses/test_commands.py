"""Every analysis from the command line, on two real, tiny runs; its record, tables and figure."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import saf
from experiments.analyses import ANALYSES, svg
from experiments.analyses.__main__ import main
from experiments.analyses.common import MISSING, matrix, spearman
from saf.checkpoint import checkpoint_hash, latest
from saf.records.events import read_events
from saf.records.files import file_hash, read_json
from saf.records.table import plain
from saf.scores import SCORES
from saf.targets import TARGETS
from saf.train import TrainConfig, pretrain

ROOT = Path(__file__).parents[2]
SMALL = ("--device", "cpu", "--sequences", 4)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs an analysis and returns its record; it checks that a figure can be drawn."""

    def measure(name, *words) -> dict:
        out, drawn = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
        out.unlink(missing_ok=True)
        assert main([name, *map(str, words), "--out", str(out), "--figure", str(drawn)]) == 0
        assert drawn.read_text() == svg([read_json(out)])
        return read_json(out)

    return measure


@pytest.fixture
def refused(capsys):
    """Return a function that runs an analysis and returns its error."""

    def measure(*words) -> str:
        capsys.readouterr()
        assert main(list(map(str, words))) == 2
        return capsys.readouterr().err

    return measure


@pytest.fixture(scope="module")
def measured(arms, tmp_path_factory):
    """One-head costs and profiles of the ordinary run's midpoint, as files."""
    folder, checkpoint = tmp_path_factory.mktemp("analyses"), arms[0] / "checkpoints" / "step-12"
    one_head = ("--windows", 3, "--heldout-sequences", 2, "--max-fit-kl", 10)
    for name, words in {"one-head": one_head, "profiles": ("--windows", 6)}.items():
        words = (checkpoint, *SMALL, *words, "--out", folder / f"{name}.json")
        assert main([name, *map(str, words)]) == 0
    return folder


def midpoint(arms) -> Path:
    return arms[0] / "checkpoints" / "step-12"


def test_one_head(arms, measured):
    record = read_json(measured / "one-head.json")
    provenance = record["provenance"]
    assert (record["schema"], record["kind"]) == ("saf.result/2", "one-head")
    assert provenance["checkpoints"] == {"model": checkpoint_hash(midpoint(arms))}
    assert provenance["data"] == {"analysed": read_json(arms[1] / "result.json")["provenance"]["data"]["train"]}
    assert "out" not in record["settings"]
    assert {"variance", "residual_cosine", "gate_taylor"} <= record["quality"].keys() == record["scores"].keys()
    assert "qk_gradient" not in record["scores"]
    change, scores = matrix(record["nll_change"]), matrix(record["scores"]["variance"])
    lowest = scores.flatten().argsort()[:2]
    expected = 100 * torch.expm1(change.flatten()[lowest]).mean().item()
    assert record["quality"]["variance"]["mean_cost"]["0.25"] == pytest.approx(expected)
    assert record["quality"]["variance"]["spearman"] == pytest.approx(spearman(scores, change))
    assert torch.allclose(torch.tensor(record["nll_change_by_window"]).double().mean(-1), change)


def test_one_head_without_a_fit_that_passes_keeps_its_measurements(run, arms, capsys):
    words = ("--windows", 2, "--heldout-sequences", 0, "--max-fit-kl", 1e-12)
    record = run("one-head", arms[0], *SMALL, *words)
    assert "0 of 8 heads fit" in capsys.readouterr().out
    assert record["quality"]["variance"]["spearman"] is None
    assert record["eligible"] == []
    assert not matrix(record["nll_change"]).isnan().any()


def test_every_score_is_there_when_the_run_kept_gradients(run, text_data, tmp_path):
    shape = {"num_layers": 1, "num_heads": 2, "hidden_size": 16}
    updates = {"length": 32, "batch_size": 2, "updates": 3, "eval_every": 3, "eval_windows": 1, "save_every": 0}
    rest = {"tensorboard": False, "quiet": True, "device": "cpu", "track_gradients": True}
    out = str(tmp_path / "run")
    pretrain(TrainConfig(data=str(text_data), out=out, model_overrides=shape, **updates, **rest))
    words = ("--windows", 1, "--heldout-sequences", 2, "--max-fit-kl", 9)
    assert run("one-head", out, *SMALL, *words)["quality"].keys() == SCORES.keys() - {"random"}


def test_partial_spearman_of_records(run, refused, measured, tmp_path):
    files = (measured / "one-head.json", "--profiles", measured / "profiles.json")
    record = run("partial-spearman", *files)
    quality = read_json(measured / "one-head.json")["quality"]
    for name, found in record["correlations"].items():
        assert found["spearman"] == pytest.approx(quality[name]["spearman"])
        assert found.keys() == {"spearman", "layer", "layer_entropy", "with_entropy"}
    hashes = {"one_head": file_hash(files[0]), "profiles": file_hash(files[2])}
    assert record["provenance"]["files"] == hashes
    other = read_json(measured / "profiles.json")
    other["provenance"]["checkpoints"]["model"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert "about one model" in refused("partial-spearman", files[0], "--profiles", tmp_path / "other.json")
    assert "analysis one-head, got 'profiles'" in refused("partial-spearman", files[2])


def test_joint_cost_of_heads_in_a_file_and_of_a_set_with_itself(run, arms):
    words = (midpoint(arms), *SMALL, "--windows", 3)
    record = run("joint-cost", *words, "--first", arms[1] / "events.jsonl", "--second", "0:0", "0:1", "1:2")
    assert record["heads"][0] == read_events(arms[1])[0].heads
    assert record["first"]["windows"] == 3
    same = run("joint-cost", *words, "--first", "0:0", "1:1", "--second", "1:1", "0:0")
    assert same["difference"]["delta_ppl_percent"] == 0
    assert same["overlap"] == 2


def test_profiles_of_selected_heads(run, arms, measured):
    record = run("profiles", midpoint(arms), *SMALL, "--windows", 6, "--selected", arms[1])
    assert record["profiles"] == read_json(measured / "profiles.json")["profiles"]
    # Windows of 32 tokens have no key further back than 64.
    assert record["matched"]["local_mass"] == pytest.approx([1, 1])


def test_stability(run, arms):
    record = run("stability", arms[1], arms[1] / "events.jsonl")
    assert record["first"] == record["overlap"] == 2
    assert record["rank_correlation"] == pytest.approx(1)
    roles = ("first", "second")
    assert record["provenance"]["files"] == dict.fromkeys(roles, file_hash(arms[1] / "events.jsonl"))
    newest = checkpoint_hash(latest(arms[1] / "checkpoints"))
    assert record["provenance"]["checkpoints"] == dict.fromkeys(roles, newest)
    layers = [sum(layer == at for at, _ in record["heads"][0]) for layer in range(2)]
    rng = np.random.default_rng(0)
    drawn = [sum(len({*rng.permutation(4)[:n]} & {*rng.permutation(4)[:n]}) for n in layers) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(record["expected"], abs=0.05)
    assert np.std(drawn) == pytest.approx(record["standard_deviation"], abs=0.05)


def test_geometry_and_costs(run, arms, tmp_path):
    costs = {rate: {name: number for number, name in enumerate(TARGETS)} for rate in ("0.25", "0.5")}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    record = run("geometry", midpoint(arms), *SMALL, "--rates", 0.25, 0.5, "--costs", tmp_path / "costs.json")
    distances = record["distances"]["squared_error"]
    assert distances["0.25"].keys() == TARGETS.keys()
    assert distances["0.5"]["mean"] == pytest.approx(0, abs=1e-12)
    assert distances["0.5"]["structured_random"] > distances["0.5"]["sharp_mean"] > 0
    within, pooled = record["correlations"]["kl"]
    assert within.keys() == costs.keys()
    assert -1 <= pooled <= 1


def test_distributions(run, arms):
    words = (midpoint(arms), "--device", "cpu", "--sequences", 12)
    record = run("distributions", *words, "--rate", 0.5, "--shown", 2)
    assert (record["sequences"], record["rows"]) == ([7, 5], 3)
    assert record["positions"] == [1, 3, 7, 15, 23, 31]
    flat = [value for row in record["normalised"]["gaussian"] for value in row]
    assert record["medians"]["gaussian"] == pytest.approx(np.median(flat))
    assert [curve["head"] for curve in record["entries"]["curves"]] == [record["heads"][0], record["heads"][2]]
    some = run("distributions", *words, "--heads", "1:2", "--positions", 9, 20, "--distance", 20)
    assert (some["heads"], some["entries"]["query"], some["entries"]["key"]) == ([[1, 2]], 20, 0)


def test_storage_counts_every_form(run, refused, arms):
    record = run("storage", arms[1])
    matrix_bytes = 32 * 32 * 4
    layers = {layer for layer, _ in read_events(arms[1])[0].heads}
    assert (record["heads"], record["layers"]) == (2, len(layers))
    assert record["bytes"]["dense_by_layer"] == len(layers) * 4 * matrix_bytes
    assert record["bytes"]["dense_packed"] == 2 * matrix_bytes
    assert record["bytes"]["compact"] == 2 * 3 * 32 * 4
    assert "no frozen heads" in refused("storage", arms[0])


def test_unusable_input_is_refused(refused, arms, tmp_path):
    checkpoint, events, kept = midpoint(arms), arms[1] / "events.jsonl", tmp_path / "kept.json"
    kept.write_text("kept")
    for words, message in (
        (("profiles", checkpoint, "--selected", *(f"0:{head}" for head in range(4))), "nothing to compare"),
        (("profiles", checkpoint, "--selected", "0:1", "2:0"), "2 layers of 4 heads; got [[2, 0]]"),
        (("profiles", checkpoint, "--selected", "none"), "LAYER:HEAD"),
        (("profiles", arms[1], "--selected", events), "nothing to compare"),
        (("joint-cost", checkpoint, "--first", "0:0", "--second", "0:4"), "do not exist: [[0, 4]]"),
        (("joint-cost", arms[1], "--first", events, "--second", "0:0"), "are frozen"),
        (("geometry", checkpoint, "--rates", 0.25, 0.01), "at least one of 8 heads"),
        (("geometry", checkpoint, "--rates", 1.5), "must be in (0, 1]"),
        (("geometry", checkpoint, "--rates", 0.25, "--costs", arms[1] / "config.json"), "a rank needs two"),
        (("distributions", checkpoint, "--sequences", 8, "--rate", 0.01), "at least one of 8 heads"),
        (("distributions", checkpoint, "--sequences", 5), "to be fitted to and two others; got 3 of 5"),
        (("geometry", checkpoint, "--figure", "x.png"), "must end in .svg"),
        (("geometry", checkpoint, "--out", kept), "exists already"),
    ):
        assert message in refused(*words, "--device", "cpu")
    assert kept.read_text() == "kept"


def test_a_saved_model_is_named_by_the_file_that_holds_its_sums(run, arms, tmp_path):
    saf.save(saf.load(arms[1]), tmp_path / "saved")
    found = run("storage", tmp_path / "saved")["provenance"]["checkpoints"]
    assert found == {"model": file_hash(tmp_path / "saved" / "saf.json")}


@pytest.mark.parametrize("name", ["distributions", "one-head", "partial-spearman", "profiles"])
def test_committed_records_give_the_cells_that_the_results_page_had(name):
    record = read_json(ROOT / f"results/124m-midpoint/{name}.json")
    cells = []
    for part in ANALYSES[record["kind"]].tables(record):
        if not isinstance(part, str):
            head, *columns = part.columns
            for number, row in enumerate(part.to_dict("records"), 1):
                texts = {name: plain(row[name]) for name in columns if row[name] not in (MISSING, "")}
                cells += [(str(number), row[head], name, text) for name, text in texts.items()]
    with open(ROOT / "results" / "cells.csv") as file:
        rows = [row for row in csv.DictReader(file) if (row["section"], row["recipe"]) == ("Analyses", name)]
    assert cells == [(row["row"], row["arm"], row["metric"], row["text"]) for row in rows]
