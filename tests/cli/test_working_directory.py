"""What a run read is found again from another working directory, and a setting is named where it is gone."""

import json
import shutil

import pytest

from saf.train import TrainConfig, pretrain


@pytest.fixture
def moved(text_data, tmp_path, monkeypatch):
    """A run that was trained on a relative data folder; the working directory is another one by now."""
    shutil.copytree(text_data, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    shape = {"num_layers": 1, "num_heads": 2, "hidden_size": 16}
    settings = {"length": 32, "batch_size": 4, "updates": 4, "eval_windows": 2, "calibration_sequences": 2}
    pretrain(
        TrainConfig(
            data="data", out="run", model_overrides=shape, **settings, tensorboard=False, quiet=True, device="cpu"
        )
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def examples(path, count=40):
    """Write questions with two choices as JSON Lines."""
    rows = ({"text": f"number {n}", "choices": [" even", " odd"], "answer": n % 2} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_data_of_a_run_are_found(moved, saf, saf_json):
    told = saf_json("evaluate", moved / "run", "--limit", 2, "--device", "cpu")
    named = saf_json("evaluate", moved / "run", "--data", moved / "data", "--limit", 2, "--device", "cpu")
    assert told["loss"] == named["loss"]
    (moved / "data").rename(moved / "gone")
    code, _, error = saf("evaluate", moved / "run", "--device", "cpu")
    assert code == 2
    assert "--data" in error


def test_the_files_of_finetuning_are_found(moved, saf, monkeypatch):
    (moved / "files").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        examples(moved / "files" / name)
    monkeypatch.chdir(moved / "files")
    words = ("--parent", moved / "run", "--task", "train.jsonl", "--test", "test.jsonl", "--max-tokens", 30)
    flags = ("--epochs", 1, "--device", "cpu", "--no-tensorboard", "--calibration-sequences", 2, "--batch-size", 8)
    code, _, error = saf("finetune", *words, *flags, "--out", moved / "tuned")
    assert code == 0, error
    monkeypatch.chdir(moved)
    code, _, error = saf("finetune", "--out", moved / "tuned", "--resume")
    assert code == 0, error
