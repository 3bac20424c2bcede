import json

import pytest

from saf.cli.pretrain import Pretrain
from saf.errors import InputError
from saf.freezing.config import FreezeConfig
from saf.schedules import OneTime
from saf.train import TrainConfig

SHAPE = "--model-overrides num_layers 2 num_heads 4 hidden_size 32 --length 32 --batch-size 4"
OPTIONS = "--updates 4 --eval-every 2 --eval-windows 2 --save-every 1 --calibration-sequences 4 --device cpu"
SMALL = f"{SHAPE} {OPTIONS} --no-tensorboard --quiet".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from saf.data import prepare

    folder = tmp_path_factory.mktemp("cli-data")
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(f"line {number} of the text " * 100)
    prepare([str(folder / "text")], folder / "data", vocab_size=290, heldout_fraction=0.3, workers=1, progress=False)
    return folder / "data"


def parse(*words):
    return Pretrain.from_words([str(word) for word in words])


def test_options_left_out_are_the_defaults(tmp_path):
    config = parse("--data", "d", "--out", tmp_path).settings
    assert config == TrainConfig(data="d", out=str(tmp_path))


def test_options_arrive_in_the_settings(tmp_path):
    config = parse(
        *f"--data d --out {tmp_path} --updates 50 --peak-lr 1e-3 --warmup 5 --betas 0.8 0.9 --sampler random".split(),
        *["--model", "124m", "--model-overrides", "num_layers", "2", "position", "learned", "--no-tensorboard"],
        *["--freeze.rate", "0.5", "--freeze.max-fit-kl", "0.3", "--freeze.strict", "--freeze-at", "0.25"],
    ).settings
    assert config == TrainConfig(
        data="d",
        out=str(tmp_path),
        updates=50,
        peak_lr=1e-3,
        warmup=5,
        betas=(0.8, 0.9),
        sampler="random",
        model="124m",
        model_overrides={"num_layers": 2, "position": "learned"},
        tensorboard=False,
        freeze=FreezeConfig(rate=0.5, max_fit_kl=0.3, strict=True),
        schedule=OneTime(at=0.25),
    )
    assert isinstance(config.warmup, int)


@pytest.mark.parametrize(("text", "kind"), [("100", int), ("0.5", float)])
def test_moments_are_whole_updates_or_shares(tmp_path, text, kind):
    config = parse("--data", "d", "--out", tmp_path, "--freeze-at", text).settings
    assert type(config.schedule.at) is kind


def test_two_arms(data, tmp_path, capsys):
    ordinary, frozen = tmp_path / "ordinary", tmp_path / "frozen"
    parse("--data", data, "--out", ordinary, *SMALL, "--json").run()
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((ordinary / "result.json").read_text())
    parent = ordinary / "checkpoints" / "step-2"
    result = parse(
        *("--parent", parent, "--out", frozen, "--freeze.rate", 0.25, "--freeze.max-fit-kl", 10, "--quiet")
    ).run()
    table = capsys.readouterr().out
    assert "frozen arm, 4 updates" in table
    assert f"{result['report_perplexity']:.4f}" in table
    assert "2 after update 2" in table
    assert len(result["provenance"]["heads"]) == 2
    again = ("--freeze.rate", 0.25, "--freeze.max-fit-kl", 10, "--updates", 5, "--quiet")
    parse("--parent", frozen / "checkpoints" / "step-4", "--out", tmp_path / "again", *again).run()
    assert "2 more after update 4, 4 in all" in capsys.readouterr().out
    assert result["provenance"]["checkpoints"]["parent"] == json.loads((parent / "manifest.json").read_text())["hash"]


def test_resume_takes_the_runs_settings(data, tmp_path):
    first = parse("--data", data, "--out", tmp_path, *SMALL).run()
    assert parse("--out", tmp_path, "--resume").run()["report_loss"] == first["report_loss"]
    with pytest.raises(InputError, match="cannot resume with other settings"):
        parse("--out", tmp_path, "--resume", "--peak-lr", 0.1).run()


def test_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--out", tmp_path)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "--data" in told
    assert "Folder made by `saf data prepare`" in told
    with pytest.raises(InputError, match=r"--freeze\.max-fit-kl needs --freeze\.rate"):
        parse("--data", "d", "--out", tmp_path, "--freeze.max-fit-kl", 0.3)


def test_resuming_from_another_parent_is_refused(data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    parse("--data", data, "--out", first, *SMALL).run()
    parse("--parent", first / "checkpoints" / "step-2", "--out", second, "--quiet").run()
    assert parse("--parent", first / "checkpoints" / "step-2", "--out", second, "--resume").run()["updates"] == 4
    with pytest.raises(InputError, match=r"cannot resume with other settings \(parent: "):
        parse("--parent", first / "checkpoints" / "step-3", "--out", second, "--resume").run()


def test_help_shows_the_settings_that_words_change(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    parse("--data", data, "--out", tmp_path / "run", *SMALL, "--peak-lr", 0.03125).run()
    for words in (("--out", tmp_path / "run", "--resume"), ("--parent", tmp_path / "run/checkpoints/step-2")):
        with pytest.raises(SystemExit) as stop:
            parse(*words, "--out", tmp_path / "run", "--help")
        told = capsys.readouterr().out
        assert stop.value.code == 0
        assert "(default: 0.03125)" in told
        assert "(default: num_layers 2" in told
        assert "(required)" not in told


def test_resuming_with_the_same_settings_said_again(data, tmp_path):
    freeze = ("--freeze.rate", 0.25, "--freeze.max-fit-kl", 10)
    first = parse("--data", data, "--out", tmp_path, *SMALL, *freeze).run()
    again = parse("--out", tmp_path, "--resume", "--freeze.max-fit-kl", 10, "--freeze-at", 0.5).run()
    assert again["report_loss"] == first["report_loss"]
    with pytest.raises(InputError, match=r"cannot resume with other settings \(freeze.max_fit_kl: "):
        parse("--out", tmp_path, "--resume", "--freeze.max-fit-kl", 9).run()


def test_resuming_where_no_run_is_says_so(tmp_path):
    with pytest.raises(InputError, match="holds no run to resume"):
        parse("--out", tmp_path / "nowhere", "--resume")
    assert not (tmp_path / "nowhere").exists()
