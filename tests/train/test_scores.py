"""Freezing by scores that read more than attention statistics: averages of gradients, held-out sequences, gates."""

from pathlib import Path

import pytest
import torch

import saf.train.events as events
import saf.train.loop as loop
from saf.data import TokenData, sequential_windows
from saf.errors import DataError, InputError
from saf.freeze_config import FreezeConfig
from saf.records.events import read_events
from saf.schedules import OneTime
from saf.tasks.text import heldout_batches
from saf.train import continue_from, open_checkpoint, pretrain
from tests.train.killed import Killed, die_at

GRADIENT = FreezeConfig(rate=0.25, score="qk_gradient", max_fit_kl=10.0)


def state(config, name):
    return open_checkpoint(f"{config.out}/checkpoints/{name}").state


def freeze_of(config):
    return read_events(config.out)[0].values


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(loop, "run_update", 5), (events, "freeze_", 1), (loop, "run_update", 11)],
    ids=["before", "during", "after"],
)
def test_resuming_with_a_gradient_average_is_exact(settings, outcome, monkeypatch, module, name, call):
    whole = settings("whole", freeze=GRADIENT, keep=0)
    pretrain(whole)
    config = settings("killed", freeze=GRADIENT, keep=0)
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(whole.out)
    assert state(config, "step-6")["qk_gradient"] == state(whole, "step-6")["qk_gradient"]
    assert freeze_of(config)["scores"] == freeze_of(whole)["scores"]


def test_the_average_is_of_every_update_up_to_the_event_and_then_dropped(settings):
    config = settings(freeze=GRADIENT, keep=0)
    pretrain(config)
    kept = state(config, "step-6")["qk_gradient"]
    assert kept["updates"] == 6
    assert freeze_of(config)["scores"] == kept["average"]
    assert state(config, "step-12")["qk_gradient"] is None


def test_no_average_is_kept_that_nothing_reads(settings):
    config = settings(freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0), keep=0)
    pretrain(config)
    assert state(config, "step-6")["qk_gradient"] is None


@pytest.mark.parametrize("score", ["qk_gradient", "rank_sum"])
def test_an_arm_takes_the_average_of_its_parent(settings, outcome, score):
    freeze = FreezeConfig(rate=0.25, score=score, max_fit_kl=10.0)
    pretrain(settings("ordinary", track_gradients=True))
    arm = continue_from(f"{settings('ordinary').out}/checkpoints/step-6", out=settings("arm").out, freeze=freeze)
    assert not arm.track_gradients
    pretrain(arm)
    single = settings("single", freeze=freeze)
    pretrain(single)
    for name in ("model.safetensors", "saf.safetensors", "saf.json", "report_loss"):
        assert outcome(arm.out)[name] == outcome(single.out)[name]


def test_says_at_once_that_no_average_was_kept(settings):
    pretrain(settings("ordinary"))
    arm = continue_from(f"{settings('ordinary').out}/checkpoints/step-6", out=settings("arm").out, freeze=GRADIENT)
    with pytest.raises(InputError, match=r"holds none\. Train its run with track_gradients, or"):
        pretrain(arm)
    with pytest.raises(InputError, match="nothing was trained yet: freeze after some updates"):
        pretrain(settings("first", freeze=GRADIENT, schedule=OneTime(at=0)))


def test_heldout_sequences_are_the_last_of_the_controllers(data):
    opened = TokenData.open(data)
    found = torch.cat(heldout_batches(opened, length=32, count=5, batch_size=2))
    assert torch.equal(found, sequential_windows(opened.tokens("controller"), 32)[-5:, :-1])
    with pytest.raises(DataError, match="ask for fewer"):
        heldout_batches(opened, length=32, count=10**6, batch_size=2)


@pytest.mark.parametrize("score", ["residual_cosine", "gate_taylor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_of_sequences_freeze_in_a_run(settings, score, precision):
    freeze = FreezeConfig(rate=0.25, score=score, max_fit_kl=10.0)
    config = settings(freeze=freeze, heldout_sequences=3, precision=precision, updates=4)
    assert len(pretrain(config)["intervention"]["heads"]) == 2


def test_too_few_heldout_sequences_are_refused_before_training(settings):
    freeze = FreezeConfig(rate=0.25, score="redundancy")
    with pytest.raises(DataError, match="heldout_sequences"):
        pretrain(settings(freeze=freeze, heldout_sequences=10**5))
    with pytest.raises(InputError, match="heldout_sequences must be at least 1"):
        settings(heldout_sequences=0)


def test_a_tail_that_the_length_does_not_have_is_refused_before_training(settings):
    """The constant tail of key logits must begin in the first quarter of the 32 tokens."""
    freeze = FreezeConfig(rate=0.25, fitter_options={"alpha_constant_after": 8})
    config = settings(freeze=freeze)
    with pytest.raises(InputError, match=r"alpha_constant_after must lie in \[0, T/4\), T = 32; got 8: give 7 or less"):
        pretrain(config)
    assert not (Path(config.out) / "config.json").exists()


def test_memory_is_stated_before_the_event_measures(settings, capsys):
    freeze = FreezeConfig(rate=0.25, score="residual_cosine", max_fit_kl=10.0)
    pretrain(settings(freeze=freeze, heldout_sequences=2, updates=4, quiet=False))
    lines = capsys.readouterr().err.splitlines()
    stated = next(number for number, line in enumerate(lines) if "calibration of 8 heads on 4 x 32 tokens: abo" in line)
    frozen = next(number for number, line in enumerate(lines) if "2 of 8 heads frozen by residual_cosine" in line)
    assert stated < frozen
    assert lines[stated].startswith("update 2: ")
    assert lines[stated].endswith("16.38 KB collected on the CPU")
