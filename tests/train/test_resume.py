"""Runs that were killed or stopped go on bit for bit; what could not go on exactly is refused."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import saf.checkpoint as checkpoint
import saf.train.events as events
import saf.train.loop as loop
import saf.train.run as run
from saf.errors import CheckpointError, InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import locked, read_json, read_lines
from saf.schedules import OneTime
from saf.train import continue_from, latest, pretrain
from tests.train.helpers import killed, killed_and_resumed, start_process

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)
EXPONENTIAL = FreezeConfig(rate=0.25, storage="exponential", max_fit_kl=9)
LOWEST = FreezeConfig(rate=0.25, score=lambda statistics: statistics.variance, max_fit_kl=10.0)
CASES = {
    "ordinary": {},
    "frozen": {"freeze": FREEZE},
    "trainable, random windows": {"freeze": replace(FREEZE, trainable=True), "sampler": "random"},
    "gradients": {"freeze": replace(FREEZE, score="qk_gradient")},
    "no heads in a layer": {"freeze": FreezeConfig(operation="prune", heads=[(1, head) for head in range(4)])},
    "exponential": {"freeze": EXPONENTIAL, "length": 160, "updates": 4, "save_every": 1},
    "score of one's own": {"freeze": LOWEST, "updates": 4, "schedule": OneTime(at=2)},
}


@pytest.mark.parametrize(
    ("case", "owner", "name", "call"),
    [
        ("ordinary", checkpoint, "write_manifest", 3),
        ("frozen", events, "freeze_", 1),
        ("frozen", run, "append_event", 1),
        ("frozen", loop, "finish", 1),
        ("trainable, random windows", loop, "run_update", 11),
        ("gradients", loop, "run_update", 5),
        ("no heads in a layer", loop, "run_update", 8),
        ("exponential", loop, "run_update", 4),
        ("score of one's own", loop, "run_update", 1),
    ],
)
def test_killed_and_resumed_is_uninterrupted_bit_for_bit(settings, finished, outcome, case, owner, name, call):
    folder = finished(settings(**CASES[case]), case)
    config = settings(**CASES[case])
    result = killed_and_resumed(config, owner, name, call)
    assert outcome(config.out) == outcome(folder)
    if "freeze" in CASES[case]:
        assert result["intervention"]["update"] == config.updates // 2
        assert result["intervention"]["heads"] == read_json(folder / "result.json")["intervention"]["heads"]


def resumed(config) -> None:
    """Train from the newest checkpoint, or from the start; for a process of its own."""
    torch.set_num_threads(1)
    pretrain(config, resume=(Path(config.out) / "config.json").exists())


def test_killed_process_resumes(settings, finished, outcome):
    """SIGKILL at a moment that nobody chose."""
    folder = finished(settings(freeze=FREEZE), "frozen")
    config = settings(freeze=FREEZE, keep=0)
    process = start_process(resumed, config)
    while process.is_alive() and not read_lines(Path(config.out) / "metrics.jsonl"):
        time.sleep(0.005)
    time.sleep(0.1)
    process.kill()
    process.join()
    process = start_process(resumed, config)
    process.join()
    assert process.exitcode == 0
    assert outcome(config.out) == outcome(folder)


def test_random_states_are_put_back(settings):
    def drawn():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    config = settings(updates=1, eval_every=0)
    drawn()  # leaves half a pair of normal numbers in each generator
    pretrain(config)
    expected = drawn()
    pretrain(config, resume=True)
    assert drawn() == expected


def test_damaged_files_are_refused_or_named_and_half_written_ones_dropped(settings, finished, outcome):
    expected = outcome(finished(settings(), "ordinary"))
    config = settings()
    killed(lambda: pretrain(config), loop, "run_update", 11)
    folder = Path(config.out)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"update": 11, "tok')
    (folder / ".metrics.jsonl.4711.tmp").write_bytes(b"half")
    damaged = latest(folder / "checkpoints")
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged.*step-6 is whole.*move step-9 away"):
        pretrain(config, resume=True)
    shutil.rmtree(damaged)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected
    assert not list(folder.glob(".*.tmp"))
    pretrain(config, resume=True)  # of a finished run
    assert outcome(config.out) == expected


def test_a_folder_belongs_to_one_run_and_one_process(settings):
    config = settings(updates=2, seed=5)
    lock = Path(config.out).with_name(".run.lock")
    with locked(lock, InputError("busy")), pytest.raises(InputError, match="another process trains in"):
        pretrain(config)
    assert not Path(config.out).exists()
    pretrain(config)
    assert not lock.exists()
    with pytest.raises(InputError, match="holds a run already"):
        pretrain(config)
    with pytest.raises(InputError, match="must be another folder than the data's"):
        pretrain(replace(config, out=config.data))
    pretrain(config, resume=True)


def test_other_settings_or_data_are_refused(settings, text_data, tmp_path):
    from saf.data import prepare

    config = settings(updates=2, freeze=FreezeConfig(rate=0.25, max_fit_kl=9.0))
    pretrain(config)
    freeze, shape = replace(config.freeze, max_fit_kl=8.0), {**config.model_overrides, "num_heads": 2}
    differing = r"\(freeze.max_fit_kl must be 9.0, got 8.0; model_overrides.num_heads must be 4, got 2\)"
    with pytest.raises(InputError, match=differing):
        pretrain(replace(config, freeze=freeze, model_overrides=shape), resume=True)
    pretrain(replace(config, save_every=1, log_every=3), resume=True)
    text = [str(text_data.parent / "text")]
    prepare(text, tmp_path / "other", vocab_size=300, heldout_fraction=0.3, progress=False, seed=5)
    parent = f"{config.out}/checkpoints/step-1"
    with pytest.raises(CheckpointError, match="fingerprint"):
        pretrain(continue_from(parent, out=tmp_path / "child", data=str(tmp_path / "other")))


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_after_the_current_update(settings, finished, outcome, monkeypatch, number):
    folder, config = finished(settings(), "ordinary"), settings()
    before, real = signal.signal(number, signal.SIG_DFL), loop.run_update

    def interrupted(run):
        if run.update == 6:
            os.kill(os.getpid(), number)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_update", interrupted)
        stopped = pretrain(config)
    assert signal.signal(number, before) is signal.SIG_DFL
    assert stopped == {"stopped_at": 7, "checkpoint": f"{config.out}/checkpoints/step-7"}
    assert not Path(config.out, "result.json").exists()
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(folder)


def test_a_second_signal_aborts_and_an_ignored_hangup_stays_ignored():
    with loop.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
