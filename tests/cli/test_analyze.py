"""Every analysis from the command line, on two real, tiny runs."""

import importlib.util
import json
import re
from xml.etree import ElementTree

import pytest
import torch

import saf as package
from saf.analysis import model
from saf.analysis.correlation import matrix
from saf.analysis.row_models import FAMILIES
from saf.estimates import PATTERNS
from saf.opening import find_model
from saf.records.events import read_events
from saf.records.files import file_hash, read_json
from saf.scores import SCORES
from saf.train import TrainConfig, pretrain
from saf.train.checkpoint import checkpoint_hash, latest

COMMON = ("--device", "cpu", "--sequences", 4)


@pytest.fixture(scope="module")
def measured(arms, tmp_path_factory):
    """One-head costs and profiles of the ordinary run's midpoint, as files."""
    from saf.cli import main

    folder, checkpoint = tmp_path_factory.mktemp("analyze"), str(arms[0] / "checkpoints" / "step-12")
    common = [checkpoint, *map(str, COMMON), "--json"]
    one_head = ["--windows", "3", "--heldout-sequences", "2", "--max-fit-kl", "10", "--structured-after", "5"]
    files = {"one-head": one_head, "profiles": ["--windows", "6"]}
    for name, words in files.items():
        assert main(["analyze", name, *common, *words, "--out", str(folder / f"{name}.json")]) == 0
    return folder


def test_one_head(saf, arms, measured):
    record = read_json(measured / "one-head.json")
    assert (record["schema"], record["kind"]) == ("saf.result/2", "one-head")
    assert matrix(record["nll_change"]).shape == (2, 4)
    assert len(record["eligible"]) == 8
    assert {"variance", "residual_cosine", "gate_taylor"} <= record["quality"].keys() == record["scores"].keys()
    assert "qk_gradient" not in record["scores"]
    change = matrix(record["nll_change"])
    lowest = matrix(record["scores"]["variance"]).flatten().argsort()[:2]
    expected = 100 * torch.expm1(change.flatten()[lowest]).mean().item()
    assert record["quality"]["variance"]["mean_cost"]["0.25"] == pytest.approx(expected)
    words = ("analyze", "one-head", arms[0], *COMMON, "--windows", 2, "--heldout-sequences", 0)
    code, out, err = saf(*words, "--structured-after", "None")
    assert code == 0
    assert "Spearman" in out
    assert "residual_cosine" not in out
    assert "structured" not in out
    assert "1 of 8 heads" in err
    assert "8 of 8 heads" in err
    assert "0s left" in err
    code, _, err = saf(*words)
    assert code == 2
    assert "[0, T/4), T = 32; got 16" in err


def test_one_head_under_both_fits(measured):
    record = read_json(measured / "one-head.json")
    both = [torch.tensor(part["nll_change_by_window"]).double() for part in (record, record["structured"])]
    assert both[0].shape == (2, 4, 3)
    assert torch.allclose(both[0].mean(-1), matrix(record["nll_change"]))
    assert record["structured"]["alpha_constant_after"] == 5
    assert (matrix(record["structured"]["fit_kl"]) > matrix(record["fit_kl"])).all()
    difference = record["fit_difference"]
    assert difference.keys() == {"all", "0.25", "0.5"}
    expected = (both[1] - both[0]).flatten(0, 1).mean().item()
    assert difference["all"]["heads"] == 8
    assert difference["all"]["difference"] == pytest.approx(expected)
    assert difference["all"]["ci95"][0] <= expected <= difference["all"]["ci95"][1]
    lowest = matrix(record["scores"]["variance"]).flatten().argsort()[:2]
    assert difference["0.25"]["first"] == pytest.approx(both[0].flatten(0, 1)[lowest].mean().item())


def test_one_head_without_a_fit_that_passes_keeps_its_measurements(saf, arms, tmp_path):
    words = ("--windows", 2, "--heldout-sequences", 0, "--structured-after", 4, "--max-fit-kl", 1e-12)
    files = ("--out", tmp_path / "o.json", "--figure", tmp_path / "o.svg")
    code, out, _ = saf("analyze", "one-head", arms[0], *COMMON, *words, *files)
    assert code == 0
    assert "0 of 8 heads fit" in out
    record = read_json(tmp_path / "o.json")
    assert record["quality"]["variance"]["spearman"] is None
    assert record["fit_difference"] == {}
    assert not matrix(record["nll_change"]).isnan().any()


def test_a_record_is_not_written_over(saf, arms, tmp_path):
    (tmp_path / "g.json").write_text("kept")
    code, _, err = saf("analyze", "geometry", arms[0], *COMMON, "--out", tmp_path / "g.json")
    assert code == 2
    assert "g.json exists already" in err
    assert (tmp_path / "g.json").read_text() == "kept"


def test_what_was_measured_stays_when_one_head_is_cut_off(saf, arms, tmp_path, monkeypatch):
    from saf.analysis.costs import CostMeter

    calls, measure = [], CostMeter.log_probs

    def cut_off(self, heads, *args, **options):
        calls.append(heads)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return measure(self, heads, *args, **options)

    monkeypatch.setattr(CostMeter, "log_probs", cut_off)
    monkeypatch.setattr(model, "EVERY", 0.0)
    words = (*COMMON, "--windows", 2, "--heldout-sequences", 0, "--structured-after", 4)
    code, _, err = saf("analyze", "one-head", arms[0], *words, "--out", tmp_path / "part.json")
    assert code == 130
    assert "interrupted" in err
    record = read_json(tmp_path / "part.json")
    assert record["kind"] == "one-head-partial"
    assert not matrix(record["nll_change"]).isnan().any()
    # The layers take turns, in the second fit as in the first.
    assert matrix(record["structured"]["nll_change"]).isnan().logical_not().nonzero().tolist() == [[0, 0], [1, 0]]
    assert "quality" not in record
    code, out, _ = saf("analyze", "draw", tmp_path / "part.json", tmp_path / "part.svg")
    assert code == 0
    assert out.strip().endswith("part.svg")
    assert "so far" in (tmp_path / "part.svg").read_text()


def test_every_score_is_there_when_the_run_kept_gradients(saf_json, text_data, tmp_path):
    settings = {"num_layers": 1, "num_heads": 2, "hidden_size": 16}
    config = TrainConfig(
        data=str(text_data),
        out=str(tmp_path / "run"),
        model_overrides=settings,
        length=32,
        batch_size=2,
        updates=3,
        eval_every=3,
        eval_windows=1,
        save_every=0,
        tensorboard=False,
        quiet=True,
        device="cpu",
        track_gradients=True,
    )
    pretrain(config)
    words = ("--windows", 1, "--heldout-sequences", 2, "--structured-after", 4, "--max-fit-kl", 9)
    printed = saf_json("analyze", "one-head", tmp_path / "run", *COMMON, *words)
    assert printed["quality"].keys() == SCORES.keys() - {"random"}


def test_fits_of_one_half_on_the_other(saf_json, arms):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    words = ("--device", "cpu", "--sequences", 6, "--structured-after", 4, "--rates", 0.25)
    printed = saf_json("analyze", "fits", checkpoint, *words)
    assert printed["sequences"] == [3, 3]
    values = {(name, half): matrix(each[half]) for name, each in printed["fits"].items() for half in ("own", "other")}
    assert (values["free", "own"] < values["structured", "own"]).all()
    lowest = matrix(printed["variance"]).flatten().argsort()[:2]
    group = printed["groups"]["0% to 25%"]
    assert group["heads"] == 2
    for (name, half), each in values.items():
        assert group[f"{name}_{half}"] == pytest.approx(each.flatten()[lowest].mean().item())
        assert printed["groups"]["all"][f"{name}_{half}"] == pytest.approx(each.mean().item())
    closer = values["structured", "other"] < values["free", "other"]
    assert printed["groups"]["all"]["structured_closer"] == int(closer.sum())


def test_distributions(saf_json, saf, arms, monkeypatch):
    words = ("analyze", "distributions", arms[0] / "checkpoints" / "step-12", "--device", "cpu", "--sequences", 12)
    printed = saf_json(*words, "--rate", 0.5, "--shown", 2)
    assert printed["sequences"] == [7, 5]
    assert printed["rows"] == 3
    assert printed["positions"] == [1, 3, 7, 15, 23, 31]
    assert len(printed["heads"]) == 4
    assert {name: len(rows) for name, rows in printed["normalised"].items()} == dict.fromkeys(FAMILIES, 4)
    flat = [value for row in printed["normalised"]["gaussian"] for value in row]
    assert printed["medians"]["gaussian"] == pytest.approx(torch.tensor(flat).quantile(0.5).item())
    assert [curve["head"] for curve in printed["entries"]["curves"]] == [printed["heads"][0], printed["heads"][2]]
    assert (printed["entries"]["query"], printed["entries"]["key"]) == (31, 30)
    assert all(0 <= value <= 1 for values in printed["entries"]["distances"].values() for value in values)
    some = saf_json(*words, "--heads", "1:2", "--positions", 9, 20, "--distance", 20)
    assert some["heads"] == [[1, 2]]
    assert some["entries"]["key"] == 0
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = saf(*words, "--umap")
    assert code == 2
    assert "pip install umap-learn" in err


def _check_hashes(provenance, arms):
    """Of the checkpoint that was measured and of the data; of two selections, of the runs that made them."""
    fingerprint = read_json(arms[1] / "result.json")["provenance"]["data"]["train"]
    if "first" in provenance.get("files", ()):
        roles, expected = ("first", "second"), checkpoint_hash(latest(arms[1] / "checkpoints"))
        assert provenance["files"] == dict.fromkeys(roles, file_hash(arms[1] / "events.jsonl"))
        assert provenance["data"] == dict.fromkeys(roles, fingerprint)
    else:
        roles, expected = ("model",), checkpoint_hash(arms[0] / "checkpoints" / "step-12")
        assert provenance["data"] == {"analysed": fingerprint}
    assert provenance["checkpoints"] == dict.fromkeys(roles, expected)


def test_figures(saf, arms, measured, tmp_path):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    sets = ("--first", "0:0", "--second", "0:1", "1:2", "--windows", 2)
    tiny = ("--device", "cpu", "--sequences", 8)
    for name, *words in (
        ("joint-cost", checkpoint, *COMMON, *sets),
        ("stability", arms[1], arms[1]),
        ("geometry", checkpoint, *COMMON, "--rates", 0.5),
        ("fits", checkpoint, *tiny, "--structured-after", 4),
        ("distributions", checkpoint, *tiny, "--heads", "0:1"),
        ("partial-spearman", measured / "one-head.json"),
    ):
        out = tmp_path / f"{name}.json"
        assert saf("analyze", name, *words, "--figure", tmp_path / f"{name}.svg", "--out", out)[0] == 0
        _check_hashes(read_json(out)["provenance"], arms)
    for name in ("one-head", "profiles"):
        _check_hashes(read_json(measured / f"{name}.json")["provenance"], arms)
    for name in ("one-head", "profiles"):
        assert saf("analyze", "draw", measured / f"{name}.json", tmp_path / f"{name}.svg")[0] == 0
    for path in tmp_path.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in re.sub(r"<text.*?</text>", "", path.read_text())
    assert len(list(tmp_path.glob("*.svg"))) == 8
    code, _, err = saf("analyze", "profiles", checkpoint, "--figure", tmp_path / "x.png")
    assert code == 2
    assert "ending in .svg" in err
    code, _, err = saf("analyze", "draw", arms[1] / "events.jsonl", tmp_path / "x.svg")
    assert code == 2
    assert "saf.freezing.recipe/1" in err


def test_partial_spearman_reads_what_was_measured(saf_json, saf, measured, tmp_path):
    files = (measured / "one-head.json", "--profiles", measured / "profiles.json")
    printed = saf_json("analyze", "partial-spearman", *files, "--out", tmp_path / "p.json")
    quality = read_json(measured / "one-head.json")["quality"]
    assert printed == read_json(tmp_path / "p.json")
    assert printed["heads"] == 8
    for name, found in printed["correlations"].items():
        assert found["spearman"] == pytest.approx(quality[name]["spearman"])
        assert found.keys() == {"spearman", "layer", "layer_entropy", "with_entropy"}
    assert printed["provenance"]["files"] == {
        "one_head": file_hash(measured / "one-head.json"),
        "profiles": file_hash(measured / "profiles.json"),
    }
    other = read_json(measured / "profiles.json")
    other["provenance"]["checkpoints"]["model"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    code, _, err = saf("analyze", "partial-spearman", files[0], "--profiles", tmp_path / "other.json")
    assert code == 2
    assert f"about {'0' * 64}" in err
    code, _, err = saf("analyze", "partial-spearman", measured / "profiles.json")
    assert code == 2
    assert "analyze one-head" in err


def test_joint_cost_of_a_set_with_itself_and_of_files(saf_json, arms, tmp_path):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    sets = ("--first", arms[1] / "events.jsonl", "--second", "0:0", "0:1", "1:2")
    printed = saf_json(
        "analyze", "joint-cost", checkpoint, *COMMON, "--windows", 3, *sets, "--out", tmp_path / "j.json"
    )
    assert printed["heads"][0] == read_events(arms[1])[0].heads
    assert printed["first"]["windows"] == 3
    same = saf_json("analyze", "joint-cost", checkpoint, *COMMON, "--first", "0:0", "1:1", "--second", "1:1", "0:0")
    assert same["difference"]["delta_ppl_percent"] == 0
    assert same["overlap"] == 2


def test_profiles_of_selected_heads(saf_json, saf, arms, measured):
    words = ("analyze", "profiles", arms[0] / "checkpoints" / "step-12", *COMMON)
    printed = saf_json(*words, "--windows", 6, "--selected", arms[1] / "events.jsonl")
    assert printed["profiles"] == read_json(measured / "profiles.json")["profiles"]
    assert set(printed["matched"]) == {"entropy", "local_mass", "largest", "first_token"}
    # Windows of 32 tokens have no key further back than 64.
    assert printed["matched"]["local_mass"] == pytest.approx([1, 1])
    code, out, _ = saf(*words, "--windows", 2, "--selected", "0:1")
    assert code == 0
    assert "layer-matched" in out


def test_head_sets_that_cannot_be_compared_are_refused_before_anything_is_measured(saf, arms, monkeypatch):
    measuring = ("joint_cost.calibrate", "geometry.calibrate", "distributions.calibrate", "profiles.attention_profiles")
    for name in measuring:
        monkeypatch.setattr(f"saf.analysis.{name}", lambda *_, **__: pytest.fail("something was measured"))
    checkpoint = arms[0] / "checkpoints" / "step-12"
    whole = [f"0:{head}" for head in range(4)]
    costs = arms[1] / "config.json"
    for words, message in (
        (("profiles", checkpoint, "--selected", *whole), "nothing to compare"),
        (("profiles", checkpoint, "--selected", "0:1", "2:0"), "2 layers of 4 heads; got [[2, 0]]"),
        (("profiles", arms[1], "--selected", arms[1] / "events.jsonl"), "nothing to compare"),
        (("joint-cost", checkpoint, "--first", "0:0", "--second", "0:4"), "do not exist: [[0, 4]]"),
        (("joint-cost", arms[1], "--first", arms[1] / "events.jsonl", "--second", "0:0"), "are frozen"),
        (("geometry", checkpoint, "--rates", 0.25, 0.01), "at least one of 8 heads"),
        (("distributions", checkpoint, "--sequences", 8, "--rate", 0.01), "at least one of 8 heads"),
        (("distributions", checkpoint, "--sequences", 5), "to be fitted to and two others; got 3 of 5"),
        (("geometry", checkpoint, "--rates", 0.25, "--costs", costs), "rate 0.25: 0 patterns have both"),
    ):
        code, _, err = saf("analyze", *words, "--device", "cpu")
        assert code == 2
        assert message in err


def test_stability_of_a_selection_with_itself(saf_json, saf, arms):
    printed = saf_json("analyze", "stability", arms[1], arms[1] / "events.jsonl")
    assert printed["first"] == printed["overlap"] == 2
    assert printed["expected"] < 2
    assert printed["rank_correlation"] == pytest.approx(1)
    code, _, err = saf("analyze", "stability", arms[1] / "config.json", arms[1])
    assert code == 2
    assert "lists no heads" in err


def test_geometry_and_costs(saf_json, saf, arms, tmp_path):
    costs = {rate: {name: number for number, name in enumerate(PATTERNS)} for rate in ("0.25", "0.5")}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    words = ("analyze", "geometry", arms[0] / "checkpoints" / "step-12", *COMMON, "--rates", 0.25, 0.5)
    printed = saf_json(*words, "--costs", tmp_path / "costs.json")
    distances = printed["distances"]["squared_error"]
    assert distances["0.25"].keys() == PATTERNS.keys()
    assert distances["0.5"]["mean"] == pytest.approx(0, abs=1e-12)
    assert distances["0.5"]["structured_random"] > distances["0.5"]["sharp_mean"] > 0
    within, pooled = printed["correlations"]["kl"]
    assert within.keys() == costs.keys()
    assert -1 <= pooled <= 1
    code, _, err = saf(*words[:-2], 0.0)
    assert code == 2
    assert "at least one" in err


def test_a_saved_model_is_named_by_the_file_that_holds_its_sums(arms, tmp_path):
    package.save(package.load(arms[1]), tmp_path)
    assert find_model(tmp_path).hash == file_hash(tmp_path / "saf.json")
