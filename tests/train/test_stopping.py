import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import saf.train.clock
import saf.train.loop as loop
import saf.train.observer
import saf.train.results
import saf.train.updater
from saf.errors import CheckpointError, DivergenceError, InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json, read_lines
from saf.train import EXIT_STOPPED, continue_from, latest, load_model, pretrain
from saf.train.loop import StopRequest, run_update


@pytest.fixture(autouse=True)
def hangups_are_heard():
    """Hear hangups, also where the tests themselves were started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_saves_and_stops_after_the_current_update(settings, outcome, monkeypatch, number):
    pretrain(settings("whole", save_every=5))
    config = settings(save_every=5)

    def interrupted(run):
        if run.update == 6:
            os.kill(os.getpid(), number)
        return run_update(run)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_update", interrupted)
        stopped = pretrain(config)
    assert signal.getsignal(number) is before
    assert stopped == {"stopped_at": 7, "checkpoint": f"{config.out}/checkpoints/step-7"}
    assert not Path(config.out, "result.json").exists()
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(settings("whole").out)


def test_a_signal_at_any_moment_leaves_the_checkpoint_that_it_names(settings, monkeypatch):
    """It may come between two lines: whoever looks at the request twice in an update sees two answers."""

    class Odd(StopRequest):
        looks = 0

        @property
        def requested(self):
            self.looks += 1
            return self.looks > 3

        @requested.setter
        def requested(self, _):
            pass

    monkeypatch.setattr(loop, "StopRequest", Odd)
    config = settings(save_every=0)
    stopped = pretrain(config)
    newest = latest(Path(config.out, "checkpoints"))
    assert newest is not None
    assert newest.name == f"step-{stopped['stopped_at']}"


def test_second_signal_aborts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_a_run_that_goes_on_telling():
    """What is written after the terminal is gone fails; the run must reach its end all the same."""
    code = """
import fcntl, sys, termios, time
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
from saf.train.loop import StopRequest
with StopRequest() as stop:
    print("ready", file=sys.stderr, flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("stopping", file=sys.stderr, flush=True)
raise SystemExit(75)
"""
    ours, terminal = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    printed = b""
    while b"ready" not in printed:
        printed += os.read(ours, 1000)
    os.close(ours)
    assert process.wait() == 75


@pytest.mark.slow
def test_terminated_command_tells_how_to_go_on(settings):
    config = settings(updates=100_000, save_every=0, eval_every=0)
    words = f"--data {config.data} --out {config.out} --updates 100000 --length 32 --batch-size 4".split()
    words += ["--eval-every", "0", "--model-overrides", "num_layers", "1", "hidden_size", "32", "--no-tensorboard"]
    code = "import sys; from saf.cli.pretrain import parse_words; parse_words(sys.argv[1:]).run()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)
    metrics = Path(config.out, "metrics.jsonl")
    while process.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == EXIT_STOPPED, errors
    assert "--resume" in errors
    update = json.loads(metrics.read_text().splitlines()[-1])["update"]
    assert latest(Path(config.out, "checkpoints")).name == f"step-{update}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(settings, monkeypatch, bad):
    config = settings()
    kept = {}

    def poisoned(run):
        if run.update == 7:
            forward = run.updater.forward
            run.updater.forward = lambda *arguments, **options: forward(*arguments, **options) * bad
            kept.update({name: tensor.clone() for name, tensor in run.model.state_dict().items()})
        try:
            return run_update(run)
        finally:
            if kept:
                assert all(torch.equal(kept[n], t) for n, t in run.model.state_dict().items())

    monkeypatch.setattr(loop, "run_update", poisoned)
    with pytest.raises(
        DivergenceError, match=r"update 8 was not applied.*last good checkpoint is .*step-6.*lower peak_lr"
    ):
        pretrain(config)
    metrics = read_lines(Path(config.out, "metrics.jsonl"))
    assert [line["update"] for line in metrics] == list(range(1, 8))
    assert kept
    load_model(latest(Path(config.out, "checkpoints")))


def test_full_disk_for_the_logs_names_the_last_checkpoint(settings, monkeypatch):
    config = settings()

    def full(log, record):
        if record["update"] == 8:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saf.train.observer.LineLog, "append", full)
    with pytest.raises(CheckpointError, match=r"no space left.*logs.*last good checkpoint is .*step-6"):
        pretrain(config)


def test_diverging_from_a_parent_names_it(settings, monkeypatch):
    pretrain(settings("parent"))
    parent = f"{settings('parent').out}/checkpoints/step-6"

    def diverged(run):
        raise DivergenceError("update 7 was not applied")

    monkeypatch.setattr(loop, "run_update", diverged)
    with pytest.raises(DivergenceError, match=r"last good checkpoint is .*parent/checkpoints/step-6"):
        pretrain(continue_from(parent, out=settings("child").out))


@pytest.fixture
def second_per_look(monkeypatch):
    """A clock that advances one second whenever it is read."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    fake = SimpleNamespace(perf_counter=look)
    monkeypatch.setattr(saf.train.clock, "time", fake)
    monkeypatch.setattr(saf.train.updater, "time", fake)
    return now


def test_time_allowance_is_never_exceeded(settings, second_per_look):
    config = settings(lr_by="elapsed", time_budget_seconds=60.0, updates=10_000, eval_every=0, save_every=0, warmup=0.1)
    result = pretrain(config)
    assert 5 < result["updates"] < 60
    rates = [line["lr"] for line in read_lines(Path(config.out, "metrics.jsonl"))]
    assert max(rates) <= 3e-3
    assert rates[-1] < 4.5e-4
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_time_allowance_of_a_continuation_begins_at_the_parents_rate(settings, second_per_look):
    pretrain(settings("parent"))
    parent_rates = [line["lr"] for line in read_lines(Path(settings("parent").out, "metrics.jsonl"))]
    child = continue_from(
        f"{settings('parent').out}/checkpoints/step-6",
        out=settings("child").out,
        lr_by="elapsed",
        time_budget_seconds=200.0,
    )
    pretrain(child)
    rates = [line["lr"] for line in read_lines(Path(child.out, "metrics.jsonl"))]
    assert len(rates) > 12
    assert parent_rates[6] < rates[0] <= parent_rates[5]
    assert rates[-1] == pytest.approx(3e-4, rel=0.2)


def test_a_time_allowance_that_ends_before_the_freezing_point_gives_an_ordinary_result(settings, second_per_look):
    config = settings(
        lr_by="elapsed", time_budget_seconds=500.0, updates=10_000, eval_every=0, freeze=FreezeConfig(rate=0.25)
    )
    with pytest.warns(UserWarning, match="before its freezing point at update 5000: no heads were frozen"):
        result = pretrain(config)
    assert (result["arm"], result["intervention"], result["provenance"]["heads"]) == ("ordinary", None, [])
    assert result["updates"] > 0
    assert any(told.startswith("events: the run ended after update") for told in result["lacks"])
    assert read_json(Path(config.out, "result.json")) == result


def test_a_time_allowance_without_a_single_update_is_an_error(settings, second_per_look):
    config = settings(lr_by="elapsed", time_budget_seconds=0.5)
    with pytest.raises(InputError, match=r"time_budget_seconds=0.5 was over before the first update.*allow more time"):
        pretrain(config)


def test_full_disk_for_the_result_keeps_the_checkpoints(settings, monkeypatch):
    config = settings()

    def full(path, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saf.train.results, "write_json", full)
        with pytest.raises(CheckpointError, match=r"no space left.*result.*last good checkpoint is .*step-12.*resume"):
            pretrain(config)
    assert pretrain(config, resume=True)["updates"] == 12
