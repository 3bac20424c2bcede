"""Matched time: an arm gets what its reference had left, by its own clock or by a speed that was measured."""

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

import saf.train.clock as clock_module
import saf.train.events
import saf.train.loop as loop
import saf.train.run
import saf.train.updater
from saf.errors import InputError
from saf.evaluate.compare import compare_runs
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json, read_lines, write_json
from saf.records.result import SCHEMA
from saf.schedules import Gradual, OneTime, TrainLoss
from saf.tasks import TextTask
from saf.train import continue_from, pretrain
from saf.train.allowance import PAPER_SECONDS, Allowance
from saf.train.clock import OFF_CLOCK
from saf.train.updater import RECENT
from tests.train.killed import Killed, die_at

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)


@pytest.fixture
def now(monkeypatch):
    """A time that goes on by what things cost: a number of seconds, or one after the other of an iterator."""
    time = SimpleNamespace(value=0.0, loading=0.0, update=2.0, checkpoint=1.0, event=3.0, loss=0.0)
    fake = SimpleNamespace(perf_counter=lambda: time.value)
    monkeypatch.setattr(clock_module, "time", fake)
    monkeypatch.setattr(saf.train.updater, "time", fake)

    def costing(module, name, cost):
        real = getattr(module, name)

        def slow(*arguments, **options):
            seconds = getattr(time, cost)
            time.value += seconds if isinstance(seconds, float) else next(seconds)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, slow)

    costing(saf.train.updater, "step_if_finite_", "update")
    costing(saf.train.run, "save_checkpoint", "checkpoint")
    costing(saf.train.events, "freeze_", "event")
    costing(loop, "start_run", "loading")
    costing(TextTask, "controller_loss", "loss")
    return time


def spent(result):
    """The seconds on the clock of everything, which `time` tells twice."""
    seconds = sum(seconds for part, seconds in result["time"]["parts"].items() if part not in OFF_CLOCK)
    parent = result["time"]["parent_parts"] or {}
    assert seconds + sum(parent.values()) == pytest.approx(result["time"]["everything"]["seconds"])
    return seconds


@pytest.fixture
def reference(settings, now):
    """A finished ordinary run of 12 updates whose checkpoint after 6 is kept; 2 s an update, 1 s that checkpoint."""
    config = settings("reference", eval_every=0, save_every=0)
    pretrain(config)
    return config


def arm(reference, name, **changes):
    parent = f"{reference.out}/checkpoints/step-6"
    changes = {"match_time": reference.out, **changes}
    return continue_from(parent, out=str(Path(reference.out).with_name(name)), **changes)


def test_every_arm_gets_what_the_reference_had_left(reference, now):
    """It had 6 updates of 2 s left; the checkpoint after 6 was written before."""
    ordinary = arm(reference, "ordinary")
    assert pretrain(ordinary)["updates"] == 12
    now.update = 1.0
    faster = pretrain(arm(reference, "faster"))
    assert faster["updates"] == 6 + 12
    frozen = arm(reference, "frozen", freeze=FREEZE)
    result = pretrain(frozen)
    assert result["updates"] == 6 + 9, "the event took three of twelve seconds"
    assert spent(result) == 12.0
    matched = read_json(Path(frozen.out, "config.json"))["matched"]
    assert (matched["allowance"]["seconds"], matched["clock"]) == (12.0, "everything")
    logs = (Path(config.out, "metrics.jsonl") for config in (reference, ordinary, frozen))
    before, same, rates = ([line["lr"] for line in read_lines(log)] for log in logs)
    assert same == pytest.approx(before[6:]), "the parent's checkpoint tells what an update takes"
    assert rates[0] < same[0], "the event has used time"
    assert rates[-1] == pytest.approx(before[-1]), "all end at the lowest rate"


def test_an_arm_never_passes_its_time_and_resumes_with_the_same(reference, now):
    now.update = 1.75
    config = arm(reference, "slow", freeze=FREEZE)
    result = pretrain(config)
    assert spent(result) <= 12.0 < spent(result) + 1.75
    assert pretrain(config, resume=True)["updates"] == result["updates"]


@pytest.mark.parametrize("every", [{"save_every": 1}, {"save_every": 5}, {"eval_every": 1}, {"eval_every": 3}], ids=str)
@pytest.mark.parametrize("update", [0.8, 1.75, 2.0])
def test_nor_by_what_is_saved_or_measured_on_the_way(reference, now, every, update):
    now.update, now.loss = update, 0.7
    began = now.value
    result = pretrain(arm(reference, "slow", freeze=FREEZE, **every))
    assert spent(result) <= 12.0
    assert sum(result["time"]["parts"].values()) == pytest.approx(now.value - began), "every second, once"
    assert result["updates"] > 6 + 1
    # A loss or a checkpoint after the last update may have left no room for one more, which is told.
    unused = 12.0 - spent(result)
    assert [line[:5] for line in result["lacks"]] == ["time:"] * (unused > 0.12 + update)


def test_nothing_after_the_last_update_is_on_a_clock(reference, now, monkeypatch):
    """After four updates and checkpoints of 1.75 and 1 s no fifth one fits; without the last checkpoint it would."""
    now.update, now.loss = 1.75, 0.5
    config = arm(reference, "whole", save_every=1)
    parts = {"loading": 0.0, "training": 4 * 1.75, "checkpoints": 3.0}
    assert pretrain(config)["time"]["parts"] == {**parts, "afterwards": 1.0}
    assert pretrain(config, resume=True)["time"]["parts"] == {**parts, "afterwards": 1.0}
    killed = replace(config, out=config.out + "-killed")
    with monkeypatch.context() as patch:
        die_at(patch, loop, "finish", 1)
        with pytest.raises(Killed):
            pretrain(killed)
    now.loading = 5.0
    resumed = pretrain(killed, resume=True)
    assert resumed["updates"] == 6 + 4, "its last checkpoint was written before it was known to be the last"
    assert resumed["time"]["parts"] == {**parts, "afterwards": 6.0}


def test_a_last_loss_is_on_no_clock_of_an_ordinary_run_either(settings, now):
    now.loss = 0.5
    parts = pretrain(settings(eval_every=4, save_every=0, schedule=None))["time"]["parts"]
    assert (parts["monitoring"], parts["afterwards"]) == (1.0, 1.5)
    after_the_end = settings("event", eval_every=4, save_every=0, freeze=FREEZE, schedule=OneTime(at=1.0))
    parts = pretrain(after_the_end)["time"]["parts"]
    assert (parts["monitoring"], parts["checkpoints"], parts["intervention"]) == (2.5, 1.0, 3.0), "the event counts"


def test_a_resumed_run_whose_loading_leaves_no_room_ends_with_what_it_has(reference, now, monkeypatch):
    config = arm(reference, "resumed", save_every=1)
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 3)
        with pytest.raises(Killed):
            pretrain(config)
    now.loading = 100.0
    result = pretrain(config, resume=True)
    assert (result["updates"], spent(result)) == (6 + 2, 2 * 2.0 + 1.0)
    (told,) = result["lacks"]
    assert told.startswith(
        "time: 12.00 s were allowed, and 7.00 s of them were not used: losses, checkpoints or loading"
    )


def test_the_longest_of_a_few_updates_is_expected(reference, now):
    now.update = chain.from_iterable(repeat((1.75, 2.5)))
    result = pretrain(arm(reference, "scattered", save_every=0))
    assert (result["updates"], spent(result)) == (6 + 5, 10.25), "the sixth would have exceeded 12 s"
    now.update = chain((3.0,), repeat(1.5))
    result = pretrain(arm(reference, "once", save_every=0))
    assert (result["updates"], spent(result)) == (6 + 6, 10.5), "which may cost an update"
    now.update = chain((2.0, 0.6, *[0.5] * RECENT), repeat(0.5))
    assert spent(pretrain(arm(reference, "stalled", save_every=0))) == pytest.approx(11.6), "a stall is forgotten"


def test_what_a_compiling_update_takes_is_foreseen(settings, now, monkeypatch):
    """The first update of a run compiles for 28 s."""
    made = []

    class Compiling(saf.train.updater.Updater):
        def __post_init__(self):
            super().__post_init__()
            self.compiling = True
            made.append(self)

    monkeypatch.setattr(saf.train.start, "Updater", Compiling)
    now.update = chain((30.0,), repeat(2.0))
    pretrain(settings(eval_every=0))
    assert (made[0].expected_seconds, made[0].compile_seconds) == (2.0, 28.0)
    config = continue_from(f"{settings().out}/checkpoints/step-6", out=settings("arm").out, match_time=settings().out)
    with pytest.raises(InputError, match="was over before the first update"):
        pretrain(config)
    assert (made[1].expected_seconds, made[1].compile_seconds) == (2.0, 28.0), "by what the parent tells"


def test_an_update_that_compiled_counts_before_it_is_known_what_of_it_was_compiling(reference, now, monkeypatch):
    """Where compiling is free, the one behind a late event, 2 s of training and 28 s of compiling, is the last."""

    class Compiling(saf.train.updater.Updater):
        def compile_(self):
            super().compile_()
            self.compiling = True

    monkeypatch.setattr(saf.train.start, "Updater", Compiling)
    now.event, now.update = 0.0, chain((30.0,), repeat(2.0, 4), (30.0,), repeat(2.0))
    now.checkpoint = 0.0
    result = pretrain(arm(reference, "late", freeze=FREEZE, schedule=OneTime(at=11), match_clock="warm", save_every=0))
    assert result["updates"] == 12
    assert result["time"]["parts"]["training"] == 10.0, "of the last one nothing tells what was training"


def test_a_run_that_used_more_than_it_may_is_refused_and_a_little_is_told(settings, now):
    asked = {"eval_every": 0, "save_every": 0, "lr_by": "elapsed"}
    small = settings("small", time_budget_seconds=1.0, **asked)
    with pytest.raises(InputError, match=r"=1 allowed 1\.00 s, and the run used 2\.00 s: training 2\.00 s.*allow more"):
        pretrain(small)
    with pytest.raises(InputError, match=r"the run used 2\.00 s.*step-1, is kept"):
        pretrain(small, resume=True)
    assert not Path(small.out, "result.json").exists()
    now.event = 7.0
    late = settings("late", time_budget_seconds=16.0, freeze=FREEZE, **asked)
    with pytest.raises(
        InputError, match=r"used 20\.00 s: training 12\.00 s, intervention 7\.00 s, checkpoints 1\.00 s\. An"
    ):
        pretrain(late)
    now.event = 3.1
    result = pretrain(settings("hardly", time_budget_seconds=16.0, freeze=FREEZE, **asked))
    told, behind = result["lacks"]
    assert behind.startswith("events: the run ended after update 6, and nothing trained on behind the event")
    assert told.startswith("time: 16.00 s were allowed, and 0.10 s more were used")


def test_an_arm_by_its_own_clock_that_used_more_than_was_left_is_refused(reference, now):
    now.event = 11.0
    now.update = repeat(1.5)
    config = arm(reference, "over", freeze=FREEZE, schedule=OneTime(at=7))
    with pytest.raises(InputError, match=r"had left allowed 12\.00 s, and the run used 13\.50 s.*a measured speed"):
        pretrain(config)


def test_moments_of_an_arm_by_its_own_clock(reference, now):
    """They are shares of updates, of which an arm may do fewer than its reference."""
    for schedule, name in ((OneTime(at=1.0), "schedule.at"), (Gradual(begin=12, end=12), "schedule.begin")):
        with pytest.raises(InputError, match=rf"one whose first event \({name}\) comes before the end, updates=12"):
            arm(reference, "never", freeze=FREEZE, schedule=schedule)
    now.update = 4.0
    config = arm(reference, "late", freeze=FREEZE, schedule=OneTime(at=11))
    with pytest.raises(InputError, match=r"after update 9, before its freezing point at update 11: .*step-9, is kept"):
        pretrain(config)
    with pytest.raises(InputError, match="before its freezing point"):
        pretrain(config, resume=True)
    # Where the last update and the event's moment are one, nothing would train on behind it.
    with pytest.raises(InputError, match="before its freezing point at update 9"):
        pretrain(arm(reference, "last", freeze=FREEZE, schedule=OneTime(at=9)))
    now.update = 2.0
    now.event = 3.0
    with pytest.raises(
        InputError, match=r"after update 10, and nothing trained on behind the event .* its first one\. B"
    ):
        pretrain(arm(reference, "behind", freeze=FREEZE, schedule=OneTime(at=10)))
    now.update = 1.0
    last = pretrain(arm(reference, "second", freeze=FREEZE, schedule=Gradual(begin=7, end=10, groups=2)))
    assert last["updates"] == 10
    assert last["lacks"] == [
        "events: the run ended after update 10, and nothing trained on behind the event that came there"
    ]
    now.update = 4.0
    half = arm(reference, "half", freeze=FREEZE, schedule=Gradual(begin=7, end=12, groups=2))
    result = pretrain(half)
    assert result["intervention"]["events"] == 1
    (told,) = result["lacks"]
    assert told.startswith("events: the run ended after update 8, before all events of its gradual schedule had come")
    with pytest.warns(UserWarning, match="its schedule found no moment"):
        assert pretrain(arm(reference, "loss", freeze=FREEZE, schedule=TrainLoss()))["lacks"] == []


def test_the_scaled_clock_charges_an_event_as_the_papers_run_would(reference, now):
    config = arm(reference, "scaled", freeze=FREEZE, match_clock="scaled")
    assert pretrain(config)["updates"] == 6 + 5, "an event is never free: the sixth update would be too much"
    matched = read_json(Path(config.out, "config.json"))["matched"]
    # The reference took 12 updates of 2 s and one checkpoint: 25 s stand for the paper's 187.65 minutes.
    assert matched["allowance"]["weights"]["intervention"] == pytest.approx(25 / PAPER_SECONDS)
    assert matched["allowance"]["weights"]["loading"] == 0.0
    alike = {matched["allowance"]["weights"][part] for part in ("compilation", "monitoring", "checkpoints")}
    assert alike == {matched["allowance"]["weights"]["intervention"]}, "none of them grows with the updates"


def test_a_measured_speed_gives_updates_instead_of_seconds(reference, now):
    now.update = 50.0
    given = {"match_speed": 1.5, "match_speed_source": "a pair"}
    config = arm(reference, "given", freeze=FREEZE, **given)
    assert pretrain(config)["updates"] == 6 + 9, "however slow this machine is"
    matched = read_json(Path(config.out, "config.json"))["matched"]
    assert (matched["match_speed"], matched["match_speed_source"]) == tuple(given.values())
    rates = [line["lr"] for line in read_lines(Path(config.out, "metrics.jsonl"))]
    assert rates[-1] == pytest.approx(read_lines(Path(reference.out, "metrics.jsonl"))[-1]["lr"])
    charged = arm(reference, "charged", **given, match_charge_seconds=PAPER_SECONDS / 12)
    assert pretrain(charged)["updates"] == 6 + int(1.5 * 5), "one update of the reference's twelve"


def test_a_speed_stands_in_the_file_that_it_is_said_to_be_from(reference, now, tmp_path):
    pairs = [
        {"role": "frozen", "rate": 0.5, "backend": "toeplitz", "ratio": 1.1813, "refused": False},
        {"role": "frozen", "rate": 0.75, "backend": "toeplitz", "ratio": 1.5, "refused": True},
        {"role": "free", "rate": 0.5, "backend": "free", "ratio": 1.5, "refused": False},
    ]
    bench = tmp_path / "update.json"
    write_json(bench, {"schema": SCHEMA, "kind": "update", "settings": {}, "provenance": {}, "rows": pairs})
    said = r"match_speed=1.5 was not measured in .*, whose pairs have 1.1813 \(50% toeplitz\): give one of them"
    for source, reason in (
        ("no/such.json", "does not exist"),
        (f"{reference.out}/result.json", "a result of 'run'"),
        (str(bench), said),
    ):
        with pytest.raises(InputError, match=reason):
            pretrain(arm(reference, "unmeasured", match_speed=1.5, match_speed_source=source))
    measured = arm(reference, "measured", match_speed=1.181, match_speed_source=str(bench))
    assert pretrain(measured)["updates"] == 6 + 7


@pytest.mark.parametrize(
    ("speed", "moment", "told"),
    [
        (0.5, 9, "does 3 updates from 6 on and ends after update 9, and its first event would come after update 9"),
        (0.5, 11, "ends after update 9, and its first event would come after update 11, since moments are shares"),
    ],
)
def test_a_moment_that_a_measured_speed_never_reaches_is_refused_at_the_start(reference, now, speed, moment, told):
    given = {"match_speed": speed, "match_speed_source": "x", "freeze": FREEZE}
    config = arm(reference, "late", schedule=OneTime(at=moment), **given)
    with pytest.raises(InputError, match=told):
        pretrain(config)
    assert not Path(config.out).exists()
    assert pretrain(replace(config, schedule=OneTime(at=8)))["updates"] == 9


def test_a_reference_is_an_ordinary_run_of_as_many_updates(reference, settings, now):
    frozen = arm(reference, "frozen", freeze=FREEZE, match_time=None)
    pretrain(frozen)
    with pytest.raises(InputError, match=r"is an ordinary run.*frozen is frozen: name the ordinary one"):
        pretrain(arm(reference, "beside", match_time=frozen.out))
    with pytest.raises(InputError, match=r"reference has updates=12, and the arm asks for updates=20"):
        pretrain(arm(reference, "longer", updates=20))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {},
            r"had left was over before the first update \(.*into freezing\); start from an earlier checkpoint, or",
        ),
        (
            {"match_speed": 1.1, "match_speed_source": "x", "match_charge_seconds": PAPER_SECONDS / 2},
            r"buys no update at a speed of 1.1: it had 6 left, and .* cost 6\.0 of them; charge less",
        ),
        (
            {"match_speed": 0.1, "match_speed_source": "x"},
            r"buys no update at a speed of 0.1: it had 6 left; start from an earlier checkpoint",
        ),
    ],
    ids=["seconds", "speed", "speed of nothing charged"],
)
def test_an_arm_that_its_event_leaves_no_update_is_none(reference, now, given, told):
    """The event's checkpoint alone is not what an arm at matched time trained."""
    now.event = 13.0
    config = arm(reference, "none", freeze=FREEZE, **given)
    with pytest.raises(InputError, match=told):
        pretrain(config)
    assert not Path(config.out, "result.json").exists()


def test_arms_of_one_reference_can_be_compared(reference, now):
    pretrain(arm(reference, "ordinary"))
    now.update = 1.0
    frozen = arm(reference, "frozen", freeze=FREEZE)
    pretrain(frozen)
    folder = Path(reference.out).parent
    assert compare_runs(folder / "ordinary", folder / "frozen")["differences"] == []


def test_an_allowance_counts_weights_and_never_what_comes_afterwards():
    allowance = Allowance(seconds=10.0, weights={"compilation": 0.5})
    parts = {"training": 3.0, "compilation": 4.0, "afterwards": 100.0}
    expected = {"training": 1.0, "compilation": 2.0}
    assert allowance.used(parts=parts, expected=expected, updates=9) == pytest.approx(0.7)
    assert allowance.seconds_left(parts) == 5.0
    assert Allowance(updates=4).used(parts=parts, expected=expected, updates=3) == 1.0
    assert Allowance(updates=0).used(parts=parts, expected=expected, updates=0) > 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parent": None}, "match_time must be left out without a parent"),
        ({"time_budget_seconds": 5.0, "lr_by": "elapsed"}, "time_budget_seconds must be None with match_time"),
        ({"match_speed": 1.1}, "match_speed_source must be a file"),
        ({"match_speed": float("inf"), "match_speed_source": "x"}, "match_speed must be a finite number"),
        ({"match_charge_seconds": 3.0}, "match_charge_seconds must be 0 without match_speed"),
        ({"match_time": None, "match_clock": "warm"}, "match_clock must be left out without match_time"),
        ({"match_clock": "cold"}, "match_clock must be one of"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, changes, expected):
    with pytest.raises(InputError, match=expected):
        settings(**{"parent": "p", "match_time": "r", **changes})


def test_a_reference_that_does_not_fit_is_named(reference, settings, now):
    config = arm(reference, "arm")
    pretrain(settings("other", seed=5, save_every=0))
    with pytest.raises(InputError, match=r"other did not go through .*step-6"):
        pretrain(replace(config, match_time=settings("other").out))
    with pytest.raises(InputError, match="does not exist"):
        pretrain(replace(config, match_time=config.out + "-nowhere"))
    now.update = 100.0
    pretrain(settings("long", save_every=0))
    late = continue_from(f"{settings('long').out}/checkpoints/step-12", out=config.out, match_time=settings("long").out)
    with pytest.raises(InputError, match=r"long had left was over before the first update"):
        pretrain(late)
