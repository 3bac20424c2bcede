"""A tiny run of each schedule of several events: what it records, how it resumes, and that undoing leaves no trace."""

import hashlib
from pathlib import Path

import pytest
import torch

import saf.train.events as events
import saf.train.loop as loop
from saf.cli import main
from saf.data import TokenData
from saf.errors import InputError
from saf.evaluate.perplexity import evaluate_perplexity
from saf.freeze_config import FreezeConfig
from saf.machine.execution import Execution
from saf.records.events import heads_in_force, read_events
from saf.records.files import read_json, read_lines
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget
from saf.train import continue_from, load_model, pretrain
from saf.train.run import Run
from tests.train import group
from tests.train.killed import killed_and_resumed, told

FREEZE = FreezeConfig(rate=0.5, max_fit_kl=10.0)
GRADUAL = Gradual(begin=0.25, end=0.75, groups=2)
CHECKS = ValidationBudget(begin=0.5, every=0.25)


def test_gradual_freezes_the_chosen_heads_in_groups_and_patterns_installed_stay(settings, finished):
    folder = finished(settings(freeze=FREEZE, schedule=GRADUAL, keep=0), "gradual")
    assert told(folder) == [(1, "freeze", 3, 2, None), (2, "freeze", 9, 2, None)]
    first, second = read_events(folder)
    assert first.values["reason"] == "gradual: group 1 of 2, update 3 is done"
    assert sorted(first.values["deferred"]) == second.heads
    assert [second.values["scores"][layer][head] for layer, head in first.heads] == [None, None]
    assert all(event.values["loss_before"] > 0 and event.values["loss_after"] > 0 for event in (first, second))
    result = read_json(folder / "result.json")
    several = "".join(event.tensors_hash() for event in (first, second))
    assert result["provenance"]["patterns_hash"] == hashlib.sha256(several.encode()).hexdigest()
    assert result["provenance"]["heads"] == sorted(first.heads + second.heads) == heads_in_force([first, second])
    names = [f"{layer}.{head}" for layer, head in first.heads]
    before, after = (patterns(folder / "checkpoints" / name) for name in ("step-6", "step-12"))
    assert len(after) == 4
    assert all(torch.equal(before[name], after[name]) for name in names)


def patterns(checkpoint):
    model = load_model(checkpoint)
    return {
        f"{layer}.{head}": pattern.dense()
        for layer, block in enumerate(model.blocks)
        if block.attention.frozen is not None
        for head, pattern in zip(block.attention.layout.frozen, block.attention.frozen.patterns, strict=True)
    }


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(events, "freeze_", 2), (Run, "record_event", 2), (loop, "run_update", 11)],
    ids=["measuring", "between-measurement-and-outcome", "later"],
)
def test_gradual_resumes_bit_for_bit(settings, finished, outcome, monkeypatch, module, name, call):
    folder = finished(settings(freeze=FREEZE, schedule=GRADUAL, keep=0), "gradual")
    config = settings(freeze=FREEZE, schedule=GRADUAL, keep=0)
    killed_and_resumed(config, monkeypatch, module, name, call)
    assert outcome(config.out) == outcome(folder)
    assert told(config.out) == told(folder)


@pytest.fixture
def costly(monkeypatch):
    """Have every freeze raise the controller loss."""
    real = Run.controller_loss
    dear = {"after_freeze": 0.5, "before_undo": 0.5}
    monkeypatch.setattr(Run, "controller_loss", lambda run, when, **more: real(run, when, **more) + dear.get(when, 0.0))


def test_a_run_whose_groups_were_all_undone_is_the_ordinary_run_bit_for_bit(settings, finished, outcome, costly):
    ordinary = outcome(finished(settings(), "ordinary"))
    config = settings(freeze=FREEZE, schedule=CHECKS)
    result = pretrain(config)
    assert told(config.out) == [
        (1, "freeze", 6, 1, 2),
        (2, "undo", 6, 1, None),
        (3, "freeze", 9, 1, 4),
        (4, "undo", 9, 1, None),
    ]
    undo = read_events(config.out)[1]
    assert "nats beside 0 are more than 0.00995" in undo.values["reason"]
    assert undo.values["loss_after"] == read_events(config.out)[0].values["loss_before"]
    assert result["provenance"]["heads"] == []
    found = outcome(config.out)
    for name in ("model.safetensors", "optimizer.safetensors", "metrics", "report_loss"):
        assert found[name] == ordinary[name], name


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(events, "freeze_", 2), (Run, "record_event", 1), (events, "uninstall_", 1)],
    ids=["measuring", "before-the-outcome", "undoing"],
)
def test_validation_budget_resumes_bit_for_bit(settings, finished, outcome, monkeypatch, costly, module, name, call):
    config = settings(freeze=FREEZE, schedule=CHECKS)
    killed_and_resumed(config, monkeypatch, module, name, call)
    ordinary = outcome(finished(settings(), "ordinary"))
    found = outcome(config.out)
    assert all(found[part] == ordinary[part] for part in ("model.safetensors", "optimizer.safetensors", "metrics"))
    assert [event.undone_by for event in read_events(config.out)] == [2, None, 4, None]


def test_validation_budget_keeps_what_fits_and_measures_eight_fixed_batches(settings, data):
    config = settings(freeze=FREEZE, schedule=ValidationBudget(budget=10.0, every=0.25), batch_size=2, keep=0)
    pretrain(config)
    assert told(config.out) == [(1, "freeze", 6, 1, None), (2, "freeze", 9, 1, None)]
    model = load_model(Path(config.out) / "checkpoints" / "step-6")
    record = evaluate_perplexity(
        model, TokenData.open(data), partition="controller", length=32, limit=16, batch_size=2, precision="fp32"
    )
    assert record["windows"] == 16
    assert read_events(config.out)[0].values["loss_before"] == record["loss"]


@pytest.fixture
def brisk(monkeypatch):
    """Let a controller decide within 40 updates, and show it a loss that levels off and that a freeze raises."""
    group.brisk(monkeypatch)


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(Run, "record_event", 1), (loop, "run_update", 36), (events, "uninstall_", 1)],
    ids=["between-measurement-and-outcome", "not-yet-absorbed", "undoing"],
)
def test_train_loss_freezes_at_a_plateau_undoes_what_stays_and_resumes(
    settings, finished, outcome, monkeypatch, brisk, module, name, call
):
    def quick():
        few = {"updates": 40, "batch_size": 1, "accumulation": 1, "eval_every": 0, "save_every": 34, "eval_windows": 1}
        return settings(freeze=FREEZE, schedule=TrainLoss(multiplier=2.0), calibration_sequences=2, **few)

    folder = finished(quick(), "train_loss")
    assert told(folder) == [(1, "freeze", 30, 1, 2), (2, "undo", 39, 1, None)]
    first, undo = read_events(folder)
    assert first.values["reason"].startswith("train_loss: the averaged loss fell by")
    assert "after 9 updates the loss is 0.4" in undo.values["reason"]
    assert heads_in_force([first, undo]) == read_json(folder / "result.json")["provenance"]["heads"] == []
    config = quick()
    killed_and_resumed(config, monkeypatch, module, name, call)
    assert outcome(config.out) == outcome(folder)
    assert told(config.out) == told(folder)


def test_an_arm_goes_on_from_a_parent_at_the_updates_of_the_whole_schedule(settings, finished, outcome):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    arm = continue_from(parent, out=settings("arm").out, freeze=FREEZE, schedule=Gradual(begin=0.5, end=0.75, groups=2))
    pretrain(arm)
    assert [event.update for event in read_events(arm.out)] == [6, 9]


@pytest.mark.parametrize(
    ("early", "now", "name"),
    [
        (OneTime(at=0.25), OneTime(at=6), "schedule.at"),
        (GRADUAL, Gradual(begin=6, end=9, groups=2), "schedule.begin"),
        (ValidationBudget(begin=0.25), ValidationBudget(begin=6), "schedule.begin"),
    ],
)
def test_a_first_moment_that_is_over_is_told_with_the_schedules_own_setting(settings, finished, early, now, name):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    with pytest.raises(InputError, match=rf"begins after update 3, before the parent's 6; .* moment \({name}\)"):
        continue_from(parent, out="x", freeze=FREEZE, schedule=early)
    freeze = FreezeConfig(score="qk_gradient")
    arm = continue_from(parent, out=settings("arm").out, freeze=freeze, schedule=now)
    with pytest.raises(InputError, match=rf"freeze after some updates of this one \({name} above 6\)"):
        pretrain(arm)


@pytest.mark.parametrize(
    ("freeze", "schedule", "message"),
    [
        ({"rate": 0.25}, Gradual(), "5 groups needs as many heads; 2 are to be frozen"),
        ({"rate": 0.75}, ValidationBudget(), "ask for 6 of 8 heads; .* freezes at most 4"),
        ({"rate": 0.75}, TrainLoss(), "ask for 6 of 8 heads; .* freezes at most 4"),
        ({"max_per_layer": 1}, TrainLoss(), "max_per_layer cannot be kept by a train_loss schedule"),
        ({"heads": ((0, 1),)}, ValidationBudget(), "heads cannot be kept by a validation_budget schedule"),
        ({"match": "random"}, ValidationBudget(), "match cannot be kept by a validation_budget schedule"),
        ({"whole_groups": True}, Gradual(groups=2), "whole_groups is kept by a one_time schedule alone"),
    ],
)
def test_settings_that_cannot_work_are_told_before_training(settings, freeze, schedule, message):
    config = settings(freeze=FreezeConfig(**freeze), schedule=schedule)
    with pytest.raises(InputError, match=message):
        pretrain(config)
    assert not Path(config.out).exists()


def test_gradual_keeps_conditions_on_all_heads(settings):
    """One head a layer is frozen in all, as by one event."""
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0, max_per_layer=1)
    for name, schedule in (("groups", Gradual(begin=0.0, end=0.0, groups=2)), ("once", OneTime(at=0))):
        pretrain(settings(name, freeze=freeze, schedule=schedule, updates=1, eval_every=0, save_every=0))
    groups, once = (read_events(settings(name).out) for name in ("groups", "once"))
    assert heads_in_force(groups) == heads_in_force(once)
    assert sorted(layer for layer, _ in heads_in_force(groups)) == [0, 1]


def test_a_finished_run_goes_on_with_a_later_intervention_and_rates_of_its_own(settings, finished, capsys):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-12"
    words = f"--parent {parent} --out {settings('later').out} --updates 16 --lr-start 12 --peak-lr 6e-5 --warmup 0"
    frozen = "--freeze.rate 0.5 --freeze.max-fit-kl 10 "
    moments = "--quiet schedule:gradual --schedule.groups 2 --schedule.begin 12 --schedule.end 14"
    assert main(["pretrain", *words.split(), *frozen.split(), *moments.split()]) == 0
    told = capsys.readouterr().out
    assert "4 by 2 events, the first after update 12" in told
    assert "by the events themselves" in " ".join(told.replace("│", " ").split())
    folder = Path(settings("later").out)
    assert [event.update for event in read_events(folder)] == [12, 14]
    rates = [line["lr"] for line in read_lines(folder / "metrics.jsonl")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 6e-5
    assert rates[-1] == pytest.approx(6e-6)


@pytest.mark.parametrize("schedule", [OneTime(), GRADUAL], ids=["one_time", "gradual"])
def test_what_auto_compiles_depends_on_how_often_heads_change(settings, monkeypatch, schedule):
    real, asked = Execution.of, []
    monkeypatch.setattr(Execution, "of", lambda *given, **named: asked.append(named) or real(*given, **named))
    pretrain(settings(freeze=FREEZE, schedule=schedule))
    assert asked[0]["several_events"] is (schedule is GRADUAL)
