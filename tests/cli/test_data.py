"""`saf data prepare`; a run finds what it read from another working directory."""

import json
import shutil

import pytest

from saf.data import TokenData
from saf.train import TrainConfig, pretrain


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prepare_shows_the_folders_index(saf, saf_json, tmp_path):
    texts = ({"text": f"Document {n}. " + "some words to learn from " * (n % 7 + 3)} for n in range(80))
    text = lines(tmp_path / "text.jsonl", texts)
    held = lines(tmp_path / "held.jsonl", ({"text": f"held out {n}"} for n in range(9)))
    (tmp_path / "more.txt").write_text("One more document of training text.")
    words = ("data", "prepare", text, tmp_path / "more.txt", "--vocab-size", 300, "--heldout", held)
    result = saf_json(*words, "--calibration-from", "train", "--out", tmp_path / "data")
    assert result == {"folder": str(tmp_path / "data"), **TokenData.open(tmp_path / "data", verify=True).index}
    assert [source["documents"] for source in (*result["sources"], *result["heldout"])] == [80, 1, 9]
    assert (result["calibration_from"], result["partitions"]["calibration"]["tokens"]) == ("train", 0)
    assert "a finished data folder is there" in saf(*words, "--out", tmp_path / "data")[2]
    out = saf(*words, "--out", tmp_path / "data", "--overwrite")[1]
    assert f"{result['partitions']['train']['tokens']:,}" in out


@pytest.fixture
def moved(text_data, tmp_path, monkeypatch):
    """A run that was trained on a relative data folder; the working directory is another one by now."""
    shutil.copytree(text_data, tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    shape = {"num_layers": 1, "num_heads": 2, "hidden_size": 16}
    settings = {"length": 32, "batch_size": 4, "updates": 4, "eval_windows": 2, "calibration_sequences": 2}
    options = {"tensorboard": False, "quiet": True, "device": "cpu"}
    pretrain(TrainConfig(data="data", out="run", model_overrides=shape, **settings, **options))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_the_data_of_a_run_are_found(moved, saf, saf_json):
    words = ("evaluate", moved / "run", "--limit", 2, "--device", "cpu")
    assert saf_json(*words)["loss"] == saf_json(*words, "--data", moved / "data")["loss"]
    (moved / "data").rename(moved / "gone")
    code, _, err = saf(*words)
    assert (code, "--data" in err) == (2, True)


def test_the_files_of_finetuning_are_found(moved, saf, monkeypatch):
    rows = [{"text": f"number {n}", "choices": [" even", " odd"], "answer": n % 2} for n in range(40)]
    for name in ("train.jsonl", "test.jsonl"):
        lines(moved / "elsewhere" / name, rows)
    words = ("--parent", moved / "run", "--task", "train.jsonl", "--test", "test.jsonl", "--max-tokens", 30)
    flags = ("--epochs", 1, "--device", "cpu", "--no-tensorboard", "--calibration-sequences", 2, "--batch-size", 8)
    code, _, err = saf("finetune", *words, *flags, "--out", moved / "tuned")
    assert code == 0, err
    monkeypatch.chdir(moved)
    code, _, err = saf("finetune", "--out", moved / "tuned", "--resume")
    assert code == 0, err
