from pathlib import Path

import pytest

from saf.freeze_config import FreezeConfig
from saf.records.files import read_json
from saf.train import pretrain
from saf.train.observer import Observer, Progress, duration


def tell(folder, updates: int, peak_flops: float | None = None, **options) -> None:
    progress = Progress(done=0, total=updates, **options)
    observer = Observer(
        folder,
        progress,
        tensorboard=False,
        purge_from=1,
        tokens_per_update=1000,
        flops_per_update=2e12,
        peak_flops=peak_flops,
    )
    for update in range(1, updates + 1):
        observer.updated(
            {"update": update, "tokens": update, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "update_seconds": 0.5}
        )
    observer.close()


def test_plain_lines_now_and_then_without_a_terminal(tmp_path, capsys):
    tell(tmp_path, 25, every=10)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0].split("  ")[1:] == ["loss 2.5000", "lr 1.00e-03", "2,000 tokens/s", "8s left"]


def test_shows_utilisation_where_the_peak_is_known(tmp_path, capsys):
    tell(tmp_path, 1, peak_flops=1e13)
    assert "MFU 40.0%" in capsys.readouterr().err


def test_an_update_that_compiles_is_announced_and_foretells_no_time(capsys):
    progress = Progress(done=0, total=3, every=1)
    for update, seconds in ((1, 100.0), (2, 2.0)):
        if update == 1:
            progress.compiling(update)
        record = {"update": update, "loss": 2.5, "lr": 1e-3, "update_seconds": seconds}
        progress.advance(record, tokens_per_second=10.0, utilisation=None)
    said, first, second = capsys.readouterr().err.splitlines()
    assert said.startswith("compiling the model for update 1")
    assert "left" not in first
    assert second.endswith("2s left")


@pytest.mark.parametrize("compile", ["on", "layers"])
def test_a_run_says_that_it_compiles_at_its_start_and_after_freezing(settings, capsys, monkeypatch, compile):
    monkeypatch.setattr("torch.compile", lambda model, **_: model)
    monkeypatch.setattr("saf.models.by_layer._programs", {})
    config = settings(compile=compile, quiet=False, updates=4, freeze=FreezeConfig(count=1, max_fit_kl=10))
    pretrain(config)
    assert read_json(Path(config.out) / "config.json")["train"]["compile"] == (True if compile == "on" else "layers")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compiling")]
    assert [line.split(",")[0] for line in said] == [f"compiling the model for update {n}" for n in (1, 3)]


def test_quiet_says_nothing(tmp_path, capsys):
    tell(tmp_path, 25, quiet=True)
    output = capsys.readouterr()
    assert output.err == output.out == ""


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0s"), (59.6, "60s"), (61, "1m 01s"), (7260, "2h 01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_line_with_a_name_in_it_is_text(capsys):
    Progress(done=0, total=1).say("checkpoint in [red]a\x1b[31m")
    assert capsys.readouterr().err == "checkpoint in [red]a\ufffd[31m\n"
