"""evaluate, compare, report and freeze on two real, tiny runs."""

import shutil
from dataclasses import replace

import pytest

from saf.data import prepare
from saf.errors import DataError, InputError
from saf.opening import ModelFolder, find_model
from saf.records.files import read_json, write_json
from saf.records.table import signed
from saf.tasks.text import read_evaluation


def test_evaluate_repeats_what_the_run_recorded(saf_json, arms, tmp_path):
    for run in arms:
        printed = saf_json("evaluate", run, "--device", "cpu", "--out", tmp_path / run.name)
        recorded, losses = read_evaluation(run)
        again, losses_again = read_evaluation(tmp_path / run.name)
        assert printed["loss"] == again["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
        assert again["windows_hash"] == recorded["windows_hash"]
        assert (losses - losses_again).abs().max() < 1e-4


def test_other_text_is_measured_as_a_file_or_prepared_whole(saf, saf_json, arms, text_data, tmp_path):
    (tmp_path / "other.txt").write_text("A head looks back at every token before it, and mixes values. " * 40)
    words = ("data", "prepare", tmp_path / "other.txt", "--tokenizer", text_data, "--report-only")
    saf_json(*words, "--out", tmp_path / "other")
    words = ("evaluate", arms[0], "--device", "cpu", "--data")
    text, folder = (saf_json(*words, tmp_path / name) for name in ("other.txt", "other"))
    assert (text["windows_hash"], text["loss"]) == (folder["windows_hash"], folder["loss"])
    code, _, err = saf("freeze", arms[0], "--data", tmp_path / "other.txt", "--rate", 0.2, "--out", tmp_path / "x")
    assert (code, "must be a folder by `saf data prepare`" in err) == (2, True)


def test_evaluate_writes_only_into_a_folder_of_its_own(saf, arms, tmp_path):
    (tmp_path / "file").write_text("x")
    for out, word in ((arms[0], "did not write"), (tmp_path / "file", "is a file")):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        code, _, err = saf("evaluate", arms[0] / "checkpoints" / "step-12", "--out", out, "--limit", 1)
        assert (code, word in err) == (2, True)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_tokenizers_are_compared_where_the_training_data_are_not_visible(arms, text_data, tmp_path):
    options = {"heldout_fraction": 0.3, "seed": 1, "progress": False}
    text = [str(text_data.parent / "text")]
    prepare(text, tmp_path / "foreign", vocab_size=280, **options)
    prepare(text, tmp_path / "same", tokenizer=str(text_data / "tokenizer.json"), **options)
    opened = find_model(arms[0])
    state = opened.state | {"settings": opened.state["settings"] | {"data": "gone"}}
    source = ModelFolder(opened.folder, replace(opened.checkpoint, state=state))
    with pytest.raises(DataError, match="must have the tokenizer"):
        source.data(tmp_path / "foreign")
    assert source.data(tmp_path / "same").fingerprint != state["data_fingerprint"]
    with pytest.raises(DataError, match="gone: no such file or data folder; give --data"):
        source.data(None)
    settings = state["settings"] | {"task": "boolq", "data": "train.jsonl"}
    finetuned = ModelFolder(opened.folder, replace(opened.checkpoint, state=state | {"settings": settings}))
    with pytest.raises(InputError, match="was trained on boolq, which is no held-out text; give --data"):
        finetuned.data(None)


def test_compare_writes_what_it_prints(saf, saf_json, arms, tmp_path):
    printed = saf_json("compare", *arms, "--out", tmp_path)
    assert printed == read_json(tmp_path / "compare.json")
    assert (printed["heads"], printed["differences"], printed["timed_updates"]) == (2, [], [16, 24])
    assert printed["ci95"][0] <= printed["delta_ppl_percent"] <= printed["ci95"][1]
    code, out, _ = saf("compare", *arms, "--out", tmp_path)
    assert (code, signed(printed["delta_ppl_percent"]) in out) == (0, True)
    page = saf_json("report", *arms, "--out", tmp_path / "page.html")
    assert page == {"report": str(tmp_path / "page.html"), "bytes": (tmp_path / "page.html").stat().st_size}


def test_compare_refuses_arms_in_the_wrong_order_and_lists_differences(saf, saf_json, arms, tmp_path):
    code, _, err = saf("compare", arms[1], arms[0], "--out", tmp_path)
    assert (code, "froze or pruned no heads" in err) == (2, True)
    other = shutil.copytree(arms[1], tmp_path / "other")
    config = read_json(other / "config.json")
    config["train"]["seed"] = 5
    write_json(other / "config.json", config)
    code, _, err = saf("compare", arms[0], other)
    assert (code, "train.seed: 1337 in the ordinary arm, 5 in the frozen arm" in err) == (2, True)
    assert not (other / "compare.json").exists()
    assert len(saf_json("compare", arms[0], other, "--allow-differences")["differences"]) == 1
    assert (other / "compare.json").exists()


def test_a_frozen_checkpoint_evaluates_continues_and_compares(saf, saf_json, arms, tmp_path):
    options = ("--rate", 0.25, "--sequences", 4, "--batch-size", 4, "--device", "cpu")
    printed = saf_json("freeze", arms[0] / "checkpoints" / "step-12", "--out", tmp_path / "frozen", *options)
    seen = saf_json("inspect", tmp_path / "frozen")
    assert (seen["hash"], seen["parent"], seen["frozen"]) == (printed["hash"], printed["parent"], printed["heads"])
    assert seen["files"].keys() > {"events.jsonl", "event-1.safetensors"}
    assert saf_json("evaluate", tmp_path / "frozen", "--limit", 2)["loss"] > 0
    result = saf_json("pretrain", "--parent", tmp_path / "frozen", "--out", tmp_path / "run", "--quiet")
    assert (result["arm"], result["intervention"]["update"], len(result["intervention"]["heads"])) == ("frozen", 12, 2)
    own, other = (path / "event-1.safetensors" for path in (tmp_path / "run", arms[1]))
    assert own.read_bytes() == other.read_bytes()  # the same patterns
    ordinary = shutil.copytree(arms[0], tmp_path / "thinned", ignore=shutil.ignore_patterns("checkpoints"))
    record = saf_json("compare", ordinary, tmp_path / "run")
    assert (record["differences"], record["heads"], record["timed_updates"]) == ([], 2, [16, 24])


def test_freeze_refuses_calibration_text_that_the_run_is_reported_on(saf, arms, text_data, tmp_path):
    text, tokenizer = [str(text_data.parent / "text")], str(text_data / "tokenizer.json")
    prepare(text, tmp_path / "other", tokenizer=tokenizer, heldout_fraction=0.3, seed=2, progress=False)
    code, _, err = saf("freeze", arms[0], "--out", tmp_path / "out", "--sequences", 4, "--data", tmp_path / "other")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert "(calibration) must have no document of the report partition" in err


def test_a_checkpoint_without_its_optimiser_evaluates_but_does_not_freeze(saf, arms, tmp_path):
    checkpoint = shutil.copytree(arms[0] / "checkpoints" / "step-24", tmp_path / "step-24")
    (checkpoint / "optimizer.safetensors").unlink()
    assert saf("evaluate", checkpoint, "--limit", 1, "--device", "cpu")[0] == 0
    for words in (("inspect", checkpoint), ("freeze", checkpoint, "--out", tmp_path / "frozen", "--rate", 0.5)):
        code, _, err = saf(*words)
        assert (code, "optimizer.safetensors is missing" in err) == (2, True)
