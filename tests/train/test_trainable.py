"""Runs whose patterns train on: resumed exactly, reached by the learning rate, counted, and told from fixed ones."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import saf.train.events as events
import saf.train.loop as loop
from saf.cli import main
from saf.errors import InputError, UnsupportedError
from saf.freeze_config import FreezeConfig
from saf.records.events import read_events
from saf.records.files import read_json, read_lines
from saf.surgery import pattern_parameters
from saf.train import continue_from, load_model, open_checkpoint, pretrain
from tests.train.killed import Killed, die_at

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0, trainable=True)
FIXED = FreezeConfig(rate=0.25, max_fit_kl=10.0)
PARAMETERS = 2 * 2 * 32


def checkpoint(config, name):
    return Path(config.out) / "checkpoints" / name


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Return a function that trains settings once and returns the run's folder."""
    done = {}

    def run(config):
        if "run" not in done:
            config.out = str(tmp_path_factory.mktemp("trainable") / "run")
            pretrain(config)
            done["run"] = config.out
        return done["run"]

    return run


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(events, "freeze_", 1), (loop, "run_update", 7), (loop, "run_update", 11), (loop, "finish", 1)],
    ids=["during", "right-after", "later", "evaluation"],
)
def test_resumed_is_uninterrupted_bit_for_bit(settings, finished, outcome, monkeypatch, module, name, call):
    expected = outcome(finished(settings(freeze=FREEZE)))
    config = settings(freeze=FREEZE)
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def test_a_run_says_that_patterns_train_and_how_many_parameters_they_have(settings, finished):
    folder = Path(finished(settings(freeze=FREEZE)))
    written, result = (read_json(folder / f"{name}.json") for name in ("config", "result"))
    event = read_events(folder)[0].values
    assert event["config"]["trainable"] is written["freeze"]["trainable"] is True
    assert event["trainable_parameters"] == result["trainable_pattern_parameters"] == PARAMETERS
    layers = read_json(folder / "checkpoints" / "step-12" / "saf.json")["layers"]
    trained = [[layer, head] for layer, one in enumerate(layers) for head in one["trainable"]]
    assert trained == event["heads"]


def test_patterns_move_from_their_fit_with_the_learning_rate_and_without_decay(settings, finished):
    folder = Path(finished(settings(freeze=FREEZE)))
    (event,) = read_events(folder)
    tensors = event.tensors()
    model = load_model(folder / "checkpoints" / "step-12")
    assert sum(parameter.numel() for parameter in pattern_parameters(model)) == PARAMETERS
    limit = sum(line["lr"] for line in read_lines(folder / "metrics.jsonl")[6:])
    for number, (layer, head) in enumerate(event.heads):
        attention = model.blocks[layer].attention
        pattern = attention.frozen.patterns[attention.layout.frozen.index(head)]
        fit = torch.exp(tensors["alpha"][number] + tensors["rho"][number, 0] - tensors["log_z"][number])
        now = pattern.compact().dense().diagonal()
        assert 1e-3 < (now.float() - fit).abs().max() < 4 * limit
    groups = open_checkpoint(folder / "checkpoints" / "step-12").state["optimizer_groups"]
    holding = [group for group in groups if any(name.endswith(".alpha") for name in group["names"])]
    assert len(groups) == 2
    assert [group["weight_decay"] for group in holding] == [0.0]
    moments = load_file(folder / "checkpoints" / "step-12" / "optimizer.safetensors")
    steps = {int(tensor) for name, tensor in moments.items() if name.endswith((".alpha.step", ".rho.step"))}
    assert steps == {6}


def test_fixed_patterns_stay_and_give_another_run(settings, finished, outcome):
    fixed = settings("fixed", freeze=FIXED)
    assert pretrain(fixed)["trainable_pattern_parameters"] == 0
    trained = outcome(finished(settings(freeze=FREEZE)))
    before, after = (load_file(checkpoint(fixed, name) / "saf.safetensors") for name in ("step-9", "step-12"))
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    found = outcome(fixed.out)
    assert found["metrics"][:6] == trained["metrics"][:6]
    assert found["metrics"][6]["loss"] == pytest.approx(trained["metrics"][6]["loss"], rel=1e-6)
    assert found["metrics"][11]["loss"] != trained["metrics"][11]["loss"]


def test_compiled_training_follows_the_parameters(settings, finished, monkeypatch):
    """The same losses but for rounding: a graph that kept its first tables would give those of fixed patterns."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    compiled, fixed = settings("compiled", freeze=FREEZE, compile="on"), settings("fixed", freeze=FIXED)
    for config in (compiled, fixed):
        pretrain(config)
    eager, found, other = (
        torch.tensor([line["loss"] for line in read_lines(Path(out) / "metrics.jsonl")], dtype=torch.float64)
        for out in (finished(settings(freeze=FREEZE)), compiled.out, fixed.out)
    )
    assert (found - eager).abs().max() < 0.01 * (other - eager).abs().max()


def test_an_arm_continues_from_a_frozen_one(settings, finished):
    parent = f"{finished(settings(freeze=FREEZE))}/checkpoints/step-12"
    child = continue_from(parent, out=settings("later").out, updates=16)
    result = pretrain(child)
    assert result["trainable_pattern_parameters"] == PARAMETERS
    before, after = (pattern_parameters(load_model(path)) for path in (parent, checkpoint(child, "step-16")))
    assert all(not torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_commands_take_the_setting(settings, tmp_path, capsys):
    ordinary = settings("ordinary")
    pretrain(ordinary)
    parent, frozen, arm = checkpoint(ordinary, "step-6"), tmp_path / "frozen", tmp_path / "arm"
    common = "--max-fit-kl 10 --rate 0.25 --trainable --device cpu --sequences 4"
    assert main(["freeze", str(parent), "--out", str(frozen), *common.split()]) == 0
    assert f"{PARAMETERS} pattern parameters train on" in capsys.readouterr().out
    assert main(["pretrain", "--parent", str(frozen), "--out", str(tmp_path / "one"), "--quiet"]) == 0
    words = "--freeze.rate 0.25 --freeze.max-fit-kl 10 --freeze.trainable --quiet"
    assert main(["pretrain", "--parent", str(parent), "--out", str(arm), *words.split()]) == 0
    assert f"{PARAMETERS} trained" in capsys.readouterr().out
    results = [read_json(folder / "result.json") for folder in (tmp_path / "one", arm)]
    assert results[0]["report_loss"] == results[1]["report_loss"]
    assert {result["trainable_pattern_parameters"] for result in results} == {PARAMETERS}


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ({"heads": ((9, 0),)}, r"2 layers of 4 heads; got \[\(9, 0\)\]"),
        ({"exclude": ((1, 7),)}, r"2 layers of 4 heads; got \[\(1, 7\)\]"),
        ({"count": 99}, "count must be at most the 8 live heads of 8, got 99"),
    ],
)
def test_heads_that_are_not_there_are_told_before_training(settings, freeze, message):
    config = settings(freeze=FreezeConfig(**freeze))
    with pytest.raises(InputError, match=message):
        pretrain(config)
    assert not Path(config.out).exists()


def test_settings_that_cannot_work_are_told_before_training(settings):
    with pytest.raises(InputError, match="trainable patterns have key and distance logits: use storage='compact'"):
        FreezeConfig(trainable=True, storage="dense")
    config = settings(freeze=FreezeConfig(rate=0.25, trainable=True, backend="fused"))
    with pytest.raises(UnsupportedError, match="no gradients for key and distance logits"):
        pretrain(config)
    assert not Path(config.out).exists()
