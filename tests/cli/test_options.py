"""Every setting of FreezeConfig on the command line of pretrain and freeze."""

import json
from pathlib import Path

import pytest

from saf.cli.finetune import parse_words as parse_finetune
from saf.cli.freeze import Command
from saf.cli.parsing import parse, read_heads
from saf.cli.pretrain import parse_words
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import write_json
from saf.records.run import append_event, read_events
from saf.train import TrainConfig

TEXT = """--rate 0.5 --score random --pattern dirichlet --fitter adam --max-fit-kl 0.3 --strict
--exclude 0:1 1:11 --match variance --whole-groups --seed 7 --backend toeplitz --fitter-options steps 20
--pattern-options scale 4"""
WORDS = TEXT.split()
CONFIG = FreezeConfig(
    rate=0.5, score="random", pattern="dirichlet", fitter="adam", max_fit_kl=0.3, strict=True,
    exclude=((0, 1), (1, 11)), match="variance", whole_groups=True, seed=7, backend="toeplitz",
    fitter_options={"steps": 20}, pattern_options={"scale": 4},
)  # fmt: skip


def freeze(*words: str) -> FreezeConfig:
    return parse(Command, ["checkpoint", "--out", "out", *words], prog="saf freeze").config


def pretrain(*words: str) -> TrainConfig:
    return parse_words(["--data", "d", "--out", "out", *words]).config


def test_commands_take_them_all():
    assert freeze(*WORDS) == CONFIG
    assert freeze("--storage", "dense", "--budget=1%") == FreezeConfig(storage="dense", budget=0.01)
    assert parse(Command, ["model", "--out", "5%"], prog="saf freeze").out == Path("5%"), "a share only as a number"
    config = pretrain(*(word.replace("--", "--freeze.", 1) for word in WORDS), "--track-gradients")
    assert (config.freeze, config.track_gradients) == (CONFIG, True)
    assert pretrain("--freeze.rate", "0.25").freeze == FreezeConfig()
    assert pretrain("--freeze.count", "5").freeze == FreezeConfig(count=5, rate=0.0)
    with pytest.raises(InputError, match="got rate and count"):
        pretrain("--freeze.rate=0.25", "--freeze.count", "5")
    with pytest.raises(InputError, match="name it with --parent"):
        parse_finetune([])


def test_values_that_cannot_be_used_end_with_exit_code_2(saf, text_data, arms, tmp_path):
    train = ["pretrain", "--data", text_data, "--out", tmp_path / "out", "--device", "cpu", "--length", "32"]
    event = ["freeze", arms[0], "--out", tmp_path / "out", "--device", "cpu"]
    few = [*event, "--sequences", 4]
    for words, message in (
        ([*train, "--freeze.rate", "0.25", "--calibration-sequences", 10**6], "--calibration-sequences"),
        ([*train, "--length", 10**6], "a window of length"),
        ([*train, "--batch-size", "0"], "batch_size must be at least 1"),
        ([*few, "--score", "qk_gradient"], "--track-gradients"),
        ([*event, "--fitter-options", "steps"], "pairs of NAME VALUE"),
        ([*few, "--max-fit-kl", 1e-12], "at least 1 of 2 heads must be frozen, and 8 do not fit within"),
    ):
        code, _, err = saf(*words)
        assert (code, message in " ".join(err.split()), "Warning" in err) == (2, True, False), err
        assert not (tmp_path / "out").exists()


def test_heads_come_from_words_and_files(tmp_path):
    (tmp_path / "pairs.json").write_text("[[2, 1], [0, 3]]")
    (tmp_path / "freeze.json").write_text(json.dumps({"heads": [[1, 2]]}))
    words = ["--freeze.heads", "0:0", str(tmp_path / "pairs.json"), str(tmp_path / "freeze.json")]
    assert pretrain(*words).freeze == FreezeConfig(rate=0.0, heads=((0, 0), (2, 1), (0, 3), (1, 2)))
    (tmp_path / "other.json").write_text("{}")
    write_json(tmp_path / "undone" / "config.json", {})
    append_event(tmp_path / "undone", "freeze", {"heads": [[0, 1]]})
    append_event(tmp_path / "undone", "undo", {"heads": [[0, 1]], "undoes": 1})
    for word, message in (
        ("3", "LAYER:HEAD"),
        ("no.json", "LAYER:HEAD"),
        (tmp_path / "undone", "undone must have frozen or pruned heads"),
        (tmp_path / "other.json", "must list heads"),
    ):
        with pytest.raises(InputError, match=message):
            read_heads([str(word)])


def test_freezing_a_checkpoint_by_scores_and_lists(saf_json, arms, tmp_path):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    common, heldout = ("--device", "cpu", "--sequences", 4, "--max-fit-kl", 10), ("--heldout-sequences", 3)
    scored = ("freeze", checkpoint, "--out", tmp_path / "cosine", "--score", "residual_cosine", *common, *heldout)
    printed = saf_json(*scored)
    assert (printed["score_name"], len(printed["heads"])) == ("residual_cosine", 2)
    list_of = tmp_path / "cosine" / "events.jsonl"
    named = saf_json("freeze", checkpoint, "--out", tmp_path / "named", "--heads", list_of, *common)
    assert named["heads"] == printed["heads"] == read_events(tmp_path / "named")[0].heads
