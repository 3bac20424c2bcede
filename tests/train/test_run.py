"""What a run of one or several events trains, records and refuses, whether or not it is a run of its own."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import saf.train.events
import saf.train.loop as loop
import saf.train.run
import saf.train.step
from saf.compare import differences
from saf.errors import DataError, InputError, UnsupportedError
from saf.freeze_config import FreezeConfig
from saf.models.adapter import adapter_for
from saf.patterns import CompactPattern
from saf.records.files import read_json, read_lines
from saf.records.run import RecordedRun, heads_edited_by, heads_of_record, read_events
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget
from saf.surgery import pattern_parameters
from saf.tasks import MQARSettings
from saf.tasks.text import read_evaluation
from saf.train import continue_from, open_checkpoint, pretrain
from saf.train.run import Run
from tests.train.helpers import decide_quickly, events_of, killed_and_resumed

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)
HALF = FreezeConfig(rate=0.5, max_fit_kl=10.0)
PRUNE = FreezeConfig(rate=0.25, operation="prune")
WEIGHTS = ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json", "report_loss")


def metrics(folder) -> list[dict]:
    return read_lines(Path(folder) / "metrics.jsonl")


def rates(folder) -> list[float]:
    return [line["lr"] for line in metrics(folder)]


# --- one run


def test_learns(settings):
    result = pretrain(settings(updates=80, accumulation=1, eval_every=0, save_every=0, peak_lr=1e-2))
    assert result["report_loss"] < result["unigram_entropy"] - 0.2


def test_the_folder_of_a_run(settings):
    config = settings(freeze=FREEZE, tensorboard=True, save_every=1, keep=2)
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tobytes()
    result = pretrain(config)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tobytes()) == before
    folder = Path(config.out)
    assert read_json(folder / "result.json") == json.loads(json.dumps(result))
    assert (result["tokens"], result["missing"], result["arm"]) == (12 * 4 * 2 * 32, [], "frozen")
    time = result["time"]
    assert time["everything"]["seconds"] == pytest.approx(sum(time["parts"].values()))
    assert all(time["parts"][part] > 0 for part in ("load", "train", "freeze", "evaluate", "checkpoint"))
    assert time["warm"]["seconds"] == pytest.approx(time["everything"]["seconds"] - time["parts"]["load"])
    written = read_json(folder / "config.json")
    assert (written["train"]["length"], written["data"]["folder"]) == (32, config.data)
    (event,) = read_events(config.out)
    assert (event.number, event.kind, event.update, event.values["num_sequences"]) == (1, "freeze", 6, 4)
    assert event.values["loss_before"] == result["intervention"]["loss_before"]
    assert event.heads == result["provenance"]["heads"] == result["intervention"]["heads"]
    assert event.tensors()["alpha"].shape == (2, 32)
    lines = metrics(folder)
    assert [line["update"] for line in lines] == list(range(1, 13))
    assert lines[-1].keys() == {"update", "tokens", "loss", "lr", "grad_norm", "update_seconds"}
    whens = [line["when"] for line in read_lines(folder / "evaluations.jsonl")]
    assert whens == ["periodic", "before_freeze", "after_freeze", "periodic", "periodic"]
    assert read_evaluation(config.out)[0]["loss"] == result["report_loss"]
    assert list((folder / "tensorboard").glob("events.*"))
    assert (result["update_seconds"]["first_update"], result["update_seconds"]["last_update"]) == (8, 12)
    names = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert names == ["step-11", "step-12", "step-6"], "the one before the event stays"
    frozen = [adapter_for(saf.load(folder / "checkpoints" / name)).heads("frozen") for name in ("step-6", "step-12")]
    assert list(map(len, frozen)) == [0, 2]
    assert len(read_lines(folder / "clock.jsonl")) == 12


def test_an_arm_is_the_same_as_one_run_that_freezes(settings, finished, outcome):
    """Same weights, moments, data order and learning rates, whether or not the arm is a run of its own."""
    ordinary = finished(settings(), "ordinary")
    parent = ordinary / "checkpoints" / "step-6"
    for name, freeze in (("frozen", FREEZE), ("pruned", PRUNE)):
        single = finished(settings(freeze=freeze), name)
        arm = continue_from(parent, out=settings(f"arm-{name}").out, freeze=freeze)
        result = pretrain(arm)
        assert all(outcome(arm.out)[part] == outcome(single)[part] for part in WEIGHTS)
        assert outcome(arm.out)["metrics"] == outcome(single)["metrics"][6:]
        assert (result["arm"], result["provenance"]["checkpoints"]["parent"]) == (name, open_checkpoint(parent).hash)
        assert result["time"]["parent_parts"]["train"] > 0
        assert differences(RecordedRun.open(ordinary), RecordedRun.open(arm.out)) == []


def test_the_rate_rises_again_after_an_event(settings, finished, outcome):
    freeze = FREEZE
    single = settings("single", freeze=freeze, rewarm=0.25)  # of 12 updates
    pretrain(single)
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    arm = continue_from(parent, out=settings("arm").out, freeze=freeze, rewarm=3)
    pretrain(arm)
    assert outcome(arm.out)["metrics"] == outcome(single.out)["metrics"][6:]
    pairs = zip(rates(single.out), rates(finished(settings(), "ordinary")), strict=True)
    assert [own / usual for own, usual in pairs] == pytest.approx([1.0] * 6 + [1 / 3, 2 / 3] + [1.0] * 4)
    assert continue_from(f"{arm.out}/checkpoints/step-9", out="again").rewarm == 0


def test_a_branch_goes_on_with_sequences_of_another_length(settings, finished):
    parent = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    longer = {"length": 64, "batch_size": 2}
    # By a score that reads held-out text, too.
    freeze = replace(FREEZE, score="residual_cosine")
    frozen = continue_from(parent, out=settings("longer").out, freeze=freeze, **longer)
    result = pretrain(frozen)
    assert (result["tokens"], read_evaluation(frozen.out)[0]["length"]) == (12 * 4 * 2 * 32, 64)
    (event,) = read_events(frozen.out)
    assert event.tensors()["alpha"].shape == (2, 64)
    for length, batch_size, freeze, words in (
        (128, 1, None, "at most 64"),
        (64, 4, None, "must be 256 .* got 4 x 2 x 64"),
        (32, 4, FREEZE, "must be 64 to freeze more heads of layer ., .* got 32"),
    ):
        changes = {"length": length, "batch_size": batch_size, "freeze": freeze}
        with pytest.raises(InputError, match=words):
            pretrain(continue_from(result["checkpoint"], out=settings("no").out, updates=20, **changes))
    assert not Path(settings("no").out).exists()


def test_branches_before_the_first_update_and_after_the_last(settings, outcome):
    whole = settings("whole", save_at=(0.0,), updates=6)
    pretrain(whole)
    branch = continue_from(f"{whole.out}/checkpoints/step-0", out=settings("branch").out)
    pretrain(branch)
    assert outcome(branch.out) == outcome(whole.out)
    first = pretrain(settings("first", freeze=FREEZE, schedule=OneTime(at=0), updates=1))
    assert (first["intervention"]["update"], len(first["provenance"]["heads"])) == (0, 2)
    last = settings("last", freeze=FREEZE, schedule=OneTime(at=1.0), updates=4)
    result = pretrain(last)
    assert (result["intervention"]["update"], Path(result["checkpoint"]).name) == (4, "step-4-frozen")
    before = outcome(last.out)
    pretrain(last, resume=True)
    assert outcome(last.out) == before
    rest = {"updates": 8, "lr_start": 4, "peak_lr": 3e-4, "warmup": 0}
    later = continue_from(result["checkpoint"], out=settings("later").out, **rest)
    assert pretrain(later)["arm"] == "frozen"
    assert rates(later.out) == sorted(rates(later.out), reverse=True)
    assert rates(later.out)[-1] == pytest.approx(3e-5)


def test_a_fresh_run_takes_weights_and_heads_alone(settings, finished):
    parent = finished(settings(freeze=FREEZE), "frozen") / "checkpoints" / "step-12"
    config = continue_from(parent, out=settings("fresh").out, fresh=True, updates=1, peak_lr=1e-30, warmup=0)
    result = pretrain(config)
    record = read_json(Path(config.out, "config.json"))["parent"]
    assert (record["update"], record["weights_of_update"]) == (0, 12)
    assert (result["arm"], result["missing"], result["time"]["parent_parts"]) == ("frozen", [], None)
    Path(config.out, "result.json").unlink()  # as if it had not ended
    assert heads_of_record(config.out) == heads_of_record(parent) == result["provenance"]["heads"]
    before, after = saf.load(parent), open_checkpoint(result["checkpoint"])
    assert all(torch.equal(after.model().state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    assert all(float(state["step"]) == 1 for state in after.optimizer(after.model()).state.values())


def test_trained_patterns_follow_the_learning_rate_without_decay(settings, finished):
    folder = finished(settings(freeze=replace(FREEZE, trainable=True)), "trainable")
    checkpoint, tensors = open_checkpoint(folder / "checkpoints" / "step-12"), read_events(folder)[0].tensors()
    model, limit = checkpoint.model(), sum(rates(folder)[6:])
    numbers = sum(parameter.numel() for parameter in pattern_parameters(model))
    assert numbers == 2 * 2 * 32 == read_json(folder / "result.json")["trainable_pattern_parameters"]
    fits = CompactPattern.from_parameters(tensors["alpha"], tensors["rho"]).dense()
    for fit, pattern in zip(fits, patterns(folder / "checkpoints" / "step-12").values(), strict=True):
        assert 1e-3 < (pattern - fit).diagonal().abs().max() < 4 * limit
    groups = checkpoint.state["optimizer_groups"]
    assert {group["weight_decay"] for group in groups for name in group["names"] if name.endswith(".alpha")} == {0.0}
    child = continue_from(checkpoint, out=settings("later").out, updates=14)
    assert pretrain(child)["trainable_pattern_parameters"] == numbers


def test_gradient_scores_read_the_average_of_all_updates_and_an_arm_its_parents(settings, finished, outcome):
    freeze = replace(FREEZE, score="qk_gradient")
    single = finished(settings(freeze=freeze), "gradients")
    state = open_checkpoint(single / "checkpoints" / "step-6").state["qk_gradient"]
    assert read_events(single)[0].values["scores"] == state["average"]
    assert open_checkpoint(single / "checkpoints" / "step-12").state["qk_gradient"] is None
    pretrain(settings("tracked", track_gradients=True))
    arm = continue_from(f"{settings('tracked').out}/checkpoints/step-6", out=settings("arm").out, freeze=freeze)
    pretrain(arm)
    assert all(outcome(arm.out)[part] == outcome(single)[part] for part in WEIGHTS)
    untracked = finished(settings(), "ordinary") / "checkpoints" / "step-6"
    with pytest.raises(InputError, match="train the parent with track_gradients, or freeze later"):
        pretrain(continue_from(untracked, out=settings("none").out, freeze=freeze))


# --- schedules of several events


def test_gradual_freezes_the_chosen_heads_in_groups_and_patterns_installed_stay(settings, finished, outcome):
    changes = {"freeze": HALF, "schedule": Gradual(begin=0.25, end=0.75, groups=2), "keep": 0}
    folder = finished(settings(**changes), "gradual")
    assert events_of(folder) == [(1, "freeze", 3, 2, None), (2, "freeze", 9, 2, None)]
    first, second = read_events(folder)
    assert sorted(first.values["deferred"]) == second.heads
    result = read_json(folder / "result.json")
    assert result["provenance"]["heads"] == sorted(first.heads + second.heads) == heads_edited_by([first, second])
    before, after = (patterns(folder / "checkpoints" / name) for name in ("step-6", "step-12"))
    assert len(after) == 4
    assert all(torch.equal(after[head], pattern) for head, pattern in before.items())
    config = settings(**changes)
    killed_and_resumed(config, saf.train.run, "append_event", 2)
    assert outcome(config.out) == outcome(folder)


def patterns(checkpoint) -> dict:
    sites = [block.attention for block in saf.load(checkpoint).blocks]
    return {
        (layer, head): pattern.dense()
        for layer, site in enumerate(sites)
        if site.frozen is not None
        for head, pattern in zip(site.layout.frozen, site.frozen.patterns, strict=True)
    }


@pytest.mark.parametrize(("kind", "killed"), [("freeze", True), ("prune", False)])
def test_a_run_whose_groups_were_all_undone_is_the_ordinary_run(settings, finished, outcome, monkeypatch, kind, killed):
    real, dear = Run.controller_loss, ("after_freeze", "after_prune", "before_undo")
    costly = lambda run, when, **more: real(run, when, **more) + 0.5 * (when in dear)  # noqa: E731
    monkeypatch.setattr(Run, "controller_loss", costly)
    ordinary = outcome(finished(settings(), "ordinary"))
    config = settings(freeze=PRUNE if kind == "prune" else HALF, schedule=ValidationBudget(begin=0.5, every=0.25))
    result = killed_and_resumed(config, saf.train.events, "uninstall_", 1) if killed else pretrain(config)
    events = [(1, kind, 6, 1, 2), (2, "undo", 6, 1, None), (3, kind, 9, 1, 4), (4, "undo", 9, 1, None)]
    assert events_of(config.out) == events
    first, undo, *_ = read_events(config.out)
    assert "nats after 0 exceed 0.00995" in undo.values["reason"]
    assert undo.values["loss_after"] == first.values["loss_before"]
    assert result["provenance"]["heads"] == result["provenance"]["pruned"] == []
    assert all(outcome(config.out)[part] == ordinary[part] for part in ("model.safetensors", "optimizer.safetensors"))
    assert outcome(config.out)["metrics"] == ordinary["metrics"]


def test_train_loss_freezes_at_a_plateau_and_undoes_what_is_not_absorbed(settings, outcome, monkeypatch):
    decide_quickly(monkeypatch)
    few = {"updates": 40, "batch_size": 1, "accumulation": 1, "eval_every": 0, "save_every": 34, "eval_windows": 1}

    def quick(name):
        return settings(name, freeze=HALF, schedule=TrainLoss(multiplier=2.0), calibration_sequences=2, **few)

    pretrain(quick("whole"))
    killed_and_resumed(quick("killed"), loop, "run_update", 36)
    assert outcome(quick("killed").out) == outcome(quick("whole").out)
    assert events_of(quick("whole").out) == [(1, "freeze", 30, 1, 2), (2, "undo", 39, 1, None)]
    assert "after 9 updates the loss is 0.4" in read_events(quick("whole").out)[1].values["reason"]


# --- time and updates of its own


@pytest.fixture
def second_per_look(monkeypatch):
    """A clock that advances one second whenever it is read."""
    now = iter(range(10**9))
    fake = SimpleNamespace(perf_counter=lambda: float(next(now)), monotonic=lambda: float(next(now)))
    monkeypatch.setattr(saf.train.run, "time", fake)
    monkeypatch.setattr(saf.train.step, "time", fake)


def test_a_time_budget_is_never_exceeded_and_the_rate_follows_it(settings, second_per_look):
    whole = settings("whole", time_budget_seconds=200.0, updates=10_000, eval_every=0, save_every=0)
    result = pretrain(whole)
    assert 5 < result["updates"] < 200
    assert 180 < result["time"]["everything"]["seconds"] < 210, "a look at the clock itself takes a second"
    peak = rates(whole.out).index(max(rates(whole.out)))
    assert rates(whole.out)[peak:] == sorted(rates(whole.out)[peak:], reverse=True)
    assert rates(whole.out)[-1] < 4.5e-4
    never = settings("never", time_budget_seconds=200.0, updates=10_000, eval_every=0, freeze=FREEZE, report_at=[9_000])
    with pytest.warns(UserWarning, match="none is recorded until update"):
        result = pretrain(never)
    assert (result["arm"], result["intervention"], result["provenance"]["heads"]) == ("ordinary", None, [])
    for missing in ("before all events of its schedule", "reports: none after update 9000"):
        assert any(missing in words for words in result["missing"])
    with pytest.raises(InputError, match="must allow an update"):
        pretrain(settings("none", time_budget_seconds=0.5))


def test_budgets_of_a_branch_stretch_what_is_left_of_the_schedule(settings, finished, second_per_look):
    ordinary = finished(settings(), "ordinary")
    parent, usual = ordinary / "checkpoints" / "step-6", rates(ordinary)
    for name, budget in (("updates", {"update_budget": 9}), ("time", {"time_budget_seconds": 300.0})):
        branch = continue_from(parent, out=settings(name).out, freeze=FREEZE, **budget)
        result = pretrain(branch)
        own = rates(branch.out)
        assert (result["updates"] == 15) if name == "updates" else (result["updates"] > 12)
        assert usual[6] < own[0] <= usual[5]
        assert own == sorted(own, reverse=True)
        assert own[-1] == pytest.approx(3e-4, rel=0.2)
        assert result["arm"] == "frozen"
    pair = [RecordedRun.open(settings(name).out) for name in ("updates", "time")]
    assert differences(*pair) == []


# --- failures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"warmup": 12}, "warmup must be"),
        ({"report_at": (13,)}, "report_at must be different updates"),
        ({"save_at": (1.5,)}, "save_at must be shares"),
        ({"time_budget_seconds": 9.0, "update_budget": 3}, "time_budget_seconds must be above 0, or None"),
        ({"mqar": MQARSettings(pairs=4)}, "mqar must be left out without task='mqar'"),
        ({"freeze": FREEZE, "schedule": None}, "schedule must be"),
        ({"freeze": FREEZE, "schedule": OneTime(at=13)}, "schedule.at must be"),
        ({"freeze": replace(FREEZE, backend="fused")}, "backend 'fused' cannot run"),
        ({"freeze": replace(FREEZE, score=lambda statistics, *, weather: None)}, "got weather"),
        ({"freeze": FREEZE, "calibration_sequences": 10_000}, "calibration needs 10000 windows"),
        ({"freeze": replace(FREEZE, score="redundancy"), "heldout_sequences": 10**5}, "heldout_sequences"),
        ({"freeze": FreezeConfig(max_per_layer=1), "schedule": TrainLoss()}, "max_per_layer must be left out"),
        ({"freeze": FreezeConfig(whole_groups=True), "schedule": Gradual(groups=2)}, "whole_groups needs"),
        ({"freeze": FreezeConfig(heads=((0, 4),))}, "heads must exist"),
        ({"batch_size": 2**40}, "training needs about"),
        ({"freeze": FREEZE, "schedule": OneTime(at=4), "update_budget": 4}, "must be before update 4, where"),
        ({"parallel": "ddp"}, "torchrun --nproc-per-node"),
        ({"model_overrides": {"vocab_size": 8}}, "vocab_size must be at least"),
    ],
)
def test_what_cannot_work_is_refused_before_training_and_leaves_nothing(settings, changes, words):
    with pytest.raises((InputError, UnsupportedError, DataError), match=words):
        pretrain(settings(**changes))
    assert not Path(settings().out).exists()


def test_parents_that_cannot_be_continued_are_refused(settings, finished):
    folder = finished(settings(), "ordinary") / "checkpoints"
    for changes, words in (
        ({"freeze": FREEZE, "schedule": OneTime(at=0.25)}, "at least the parent's update 6"),
        ({"updates": 5}, "updates must be at least the parent's update 6"),
        ({"save_at": (0.25,)}, "save_at must be at least the parent's update 6"),
    ):
        with pytest.raises(InputError, match=words):
            continue_from(folder / "step-6", out="x", **changes)
    with pytest.raises(InputError, match="batch_size x accumulation x length must be"):
        pretrain(continue_from(folder / "step-6", out=settings("other").out, batch_size=3))
    with pytest.raises(InputError, match="updates must be above the 12"):
        pretrain(continue_from(folder / "step-12", out=settings("late").out))
    assert not Path(settings("late").out).exists()
