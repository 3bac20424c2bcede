import re

import pytest

from saf.cli import main
from saf.cli.pretrain import parse_words
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget
from saf.train import TrainConfig

SHAPE = "--model-overrides num_layers 2 num_heads 4 hidden_size 32 --length 32 --batch-size 4"
OPTIONS = "--updates 4 --eval-every 2 --eval-windows 2 --save-every 1 --calibration-sequences 4 --device cpu"
SMALL = f"{SHAPE} {OPTIONS} --no-tensorboard --quiet".split()


def parse(*words):
    return parse_words([str(word) for word in words])


def test_options_arrive_in_the_settings(tmp_path):
    words = f"--data d --out {tmp_path} --betas 0.8 0.9 --warmup 5 --model 124m --no-tensorboard --schedule.at 0.25"
    shape = "--model-overrides num_layers 2 position learned --freeze.rate 0.5"
    config = parse(*words.split(), *shape.split()).config
    own = {"betas": (0.8, 0.9), "warmup": 5, "model": "124m", "tensorboard": False, "schedule": OneTime(at=0.25)}
    overrides, freeze = {"num_layers": 2, "position": "learned"}, FreezeConfig(rate=0.5)
    assert config == TrainConfig(data="d", out=str(tmp_path), model_overrides=overrides, freeze=freeze, **own)
    assert isinstance(config.warmup, int)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("schedule:gradual --schedule.end 0.7 --schedule.groups 3", Gradual(end=0.7, groups=3)),
        ("schedule:validation-budget --schedule.budget 0.02", ValidationBudget(budget=0.02)),
        ("schedule:train-loss --schedule.multiplier 1.5", TrainLoss(multiplier=1.5)),
    ],
)
def test_every_schedule_has_flags_made_of_its_fields(words, schedule, tmp_path):
    config = parse("--data", "d", "--out", tmp_path, "--freeze.rate", 0.25, *words.split()).config
    assert config.schedule == schedule


def test_a_run_that_goes_on_keeps_its_schedule(text_data, tmp_path):
    first, frozen = tmp_path / "first", ("--freeze.rate", 0.25, "--freeze.max-fit-kl", 10)
    parse("--data", text_data, "--out", first, *SMALL, *frozen, "schedule:gradual", "--schedule.groups", 2).run()
    assert parse("--out", first, "--resume").config.schedule == Gradual(groups=2)
    parent = ("--parent", first / "checkpoints" / "step-3", "--out", tmp_path / "second")
    assert parse(*parent).config.schedule == Gradual(groups=2)
    assert parse(*parent, *frozen).config.schedule == OneTime(at=3)
    chosen = parse(*parent, *frozen, "schedule:one-time", "--schedule.at", 4)
    assert chosen.config.schedule == OneTime(at=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule.at", "0.25"], "--schedule has no effect"),
        (["--task", "mqar", "--sampler", "random"], "sampler has an effect on text alone"),
        (["--freeze.max-fit-kl", "1"], "--freeze.max-fit-kl needs --freeze.rate"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_flags_that_would_be_without_effect_are_refused(tmp_path, words, message):
    data = [] if words == ["--resume"] else ["--data", "d"]
    with pytest.raises(InputError, match=message):
        parse(*data, "--out", tmp_path, *words)


def test_a_run_as_parent_is_its_newest_checkpoint_when_it_begins_and_when_it_is_resumed(text_data, tmp_path):
    run, on = tmp_path / "run", tmp_path / "on"
    parse("--data", text_data, "--out", run, *SMALL).run()
    result = parse("--parent", run, "--out", on, "--updates", 5, "--quiet").run()
    assert result["provenance"]["checkpoints"]["parent"] == read_json(run / "checkpoints/step-4/manifest.json")["hash"]
    again = parse("--parent", run, "--out", on, "--resume")
    assert again.config.parent == str(run / "checkpoints" / "step-4")
    assert again.run()["report_loss"] == result["report_loss"]
    with pytest.raises(InputError, match="cannot resume with other settings"):
        parse("--parent", on, "--out", on, "--resume").run()


def test_resume_takes_the_runs_settings_and_refuses_others(text_data, tmp_path):
    freeze = ("--freeze.rate", 0.25, "--freeze.max-fit-kl", 10)
    first, second = tmp_path / "first", tmp_path / "second"
    result = parse("--data", text_data, "--out", first, *SMALL, *freeze).run()
    for again in ((), ("--freeze.max-fit-kl", 10, "--schedule.at", 0.5)):
        assert parse("--out", first, "--resume", *again).run()["report_loss"] == result["report_loss"]
    parent = ("--parent", first / "checkpoints" / "step-2")
    parse(*parent, "--out", second, "--quiet").run()
    assert parse(*parent, "--out", second, "--resume").run()["updates"] == 4
    with pytest.raises(InputError, match=r"cannot resume with other settings \(freeze.max_fit_kl must be "):
        parse("--out", first, "--freeze.max-fit-kl", 9, "--resume").run()


def test_a_run_of_recall_needs_no_data_and_prints_its_accuracy_by_tokens_and_pairs(tmp_path, capsys):
    words = "--task mqar --data none --length 16 --batch-size 2 --updates 2 --device cpu --no-tensorboard --quiet"
    shape = "--model-overrides num_layers 1 num_heads 2 hidden_size 16"
    tests = "--mqar.length 8 --mqar.pairs 2 --mqar.vocabulary 32 --mqar.test-lengths 8 16 --mqar.test-pairs 2 3"
    few = "--mqar.test-examples 2 --mqar.development 2"
    assert main(["pretrain", *f"{words} {shape} {tests} {few}".split(), "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "queries answered" in printed
    assert re.search(r"16\W+3\W+\d+\.\d\d", printed)
