"""The two clocks of a run: every second is booked once, over resumptions and from a parent on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import saf.train.clock as clock_module
import saf.train.events
import saf.train.folder
import saf.train.loop as loop
import saf.train.run
import saf.train.updater
from saf.cli.training import result_table
from saf.freeze_config import FreezeConfig
from saf.records.files import read_lines
from saf.records.run import RecordedRun
from saf.schedules import OneTime
from saf.train import continue_from, open_checkpoint, pretrain
from saf.train.clock import AFTERWARDS, CLOCKS, PARTS, Clock, seconds_until
from tests.train.killed import Killed, die_at


@pytest.fixture
def now(monkeypatch):
    """A time that goes on when a test says so, and by one second where the clock of a run looks at it."""
    time = SimpleNamespace(value=0.0, step=0.0)

    def look():
        time.value += time.step
        return time.value

    fake = SimpleNamespace(perf_counter=look)
    monkeypatch.setattr(clock_module, "time", fake)
    monkeypatch.setattr(saf.train.updater, "time", fake)
    return time


def fail_at(now, value: float) -> None:
    now.value = value
    raise KeyError


def test_every_second_is_booked_once_under_the_innermost_part(now):
    clock = Clock()
    now.value = 2.0
    clock.enter("training")
    now.value = 5.0
    with clock("intervention"):
        now.value = 6.0
        with pytest.raises(KeyError), clock("monitoring"):
            fail_at(now, 10.0)
        now.value = 10.5
    now.value = 11.0
    with clock(AFTERWARDS):
        now.value = 20.0
    assert clock.parts == {
        "loading": 2.0, "training": 3.5, "intervention": 1.5, "monitoring": 4.0, AFTERWARDS: 9.0,
    }  # fmt: skip
    assert clock.everything == 11.0
    assert set(CLOCKS["everything"]) - set(CLOCKS["warm"]) == {"loading", "compilation"}
    assert set(PARTS) == set(CLOCKS["everything"])


def test_compilation_is_what_updates_take_longer_than_the_next_that_has_none(now):
    clock = Clock()
    clock.enter("training")
    for seconds, compiled in ((41.0, True), (31.0, True), (1.0, False), (1.5, False)):
        now.value += seconds
        clock.updated(seconds, compiled=compiled)
    assert (clock.parts["compilation"], clock.parts["training"]) == (70.0, 4.5)
    now.value += 0.5
    clock.updated(0.5, compiled=True)  # its graph was at hand: never less than none
    now.value += 1.0
    clock.updated(1.0, compiled=False)
    assert (clock.parts["compilation"], clock.parts["training"]) == (70.0, 6.0)
    assert clock.everything == now.value


def test_a_parent_and_earlier_processes_count_and_json_keeps_them(now):
    first = Clock()
    now.value = 4.0
    first.enter("training")
    now.value = 10.0
    first.updated(6.0, compiled=True)
    saved = json.loads(json.dumps(first.state_dict()))
    again = Clock()
    now.value += 3.0
    again.go_on(saved)
    again.enter("training")
    now.value += 2.0
    again.updated(2.0, compiled=False)
    assert again.parts == {"loading": 7.0, "training": 4.0, "compilation": 4.0}
    child, parts = Clock(), again.parts
    child.start_from(again.state_dict())
    now.value += 1.0
    record = child.record()
    assert (record["everything"]["seconds"], record["warm"]["seconds"]) == (16.0, 4.0)
    assert record["parent_parts"] == parts
    assert record["everything"]["includes"] == [*PARTS, "parent"]
    grandchild = Clock()
    grandchild.start_from(child.state_dict())
    assert grandchild.record()["everything"]["seconds"] == 16.0


def test_what_no_update_or_event_has_come_of_is_afterwards(now):
    clock = Clock()
    now.value = 1.0
    clock.enter("training")
    now.value += 5.0
    clock.updated(5.0, compiled=False)
    with clock("monitoring"):
        now.value += 2.0
    saved = json.loads(json.dumps(clock.state_dict()))
    assert saved["parts"] == {"loading": 1.0, "training": 5.0, "monitoring": 2.0}, "an update may follow yet"
    again = Clock()
    again.go_on(saved)
    now.value += 3.0
    for _ in range(2):
        again.end()
        now.value += 1.0
    assert again.parts == {"loading": 1.0, "training": 5.0, AFTERWARDS: 7.0}
    assert again.everything == 6.0
    later = Clock()
    later.go_on(json.loads(json.dumps(again.state_dict())))
    assert later.ended
    earlier = Clock()
    earlier.go_on({"parts": {"training": 5.0, "loading": 1.0}, "parent": None, "unsettled": []})
    earlier.end()
    assert earlier.parts == {"training": 5.0, "loading": 1.0, AFTERWARDS: 0.0}, "of a version that told the parts alone"


def test_a_run_of_ones_own_accounts_for_all_its_time(settings, now):
    """Each look at the clock is a second, so that a part booked twice or not at all would show."""
    now.step = 1.0
    config = settings(freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0))
    result = pretrain(config)
    time = result["time"]
    assert set(time["parts"]) == {*PARTS, AFTERWARDS} - {"compilation"}
    assert all(seconds > 0 for seconds in time["parts"].values())
    assert time["everything"]["seconds"] == sum(time["parts"][part] for part in PARTS if part in time["parts"])
    assert time["warm"]["seconds"] == time["everything"]["seconds"] - time["parts"]["loading"]
    # The stopwatch of an event has a time of its own; results are written after the last look.
    assert now.value - 2 <= sum(time["parts"].values()) <= now.value
    run = RecordedRun.open(config.out)
    assert (run.seconds("everything"), run.lacks) == (time["everything"]["seconds"], [])
    assert len(read_lines(run.folder / "clock.jsonl")) == 4


def test_a_resumed_run_counts_what_its_checkpoints_cost_and_a_branch_its_parent(settings, now, monkeypatch):
    now.step = 1.0
    whole = pretrain(settings("whole"))["time"]
    config = settings()
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 8)
        with pytest.raises(Killed):
            pretrain(config)
    checkpoint = open_checkpoint(f"{config.out}/checkpoints/step-6")
    saved, written = checkpoint.state["clock"]["parts"], seconds_until(checkpoint)["parts"]
    assert written["checkpoints"] > saved["checkpoints"]
    resumed = pretrain(config, resume=True)["time"]
    for part in ("training", "monitoring", "checkpoints"):
        assert resumed["parts"][part] == pytest.approx(whole["parts"][part], abs=2), part
    assert resumed["parts"]["loading"] > whole["parts"]["loading"]
    again = pretrain(config, resume=True)["time"]
    assert again["everything"] == resumed["everything"]
    assert again["parts"]["lost"] == resumed["parts"]["lost"] == 1.0, "the seventh update was made twice"
    assert resumed["everything"]["seconds"] == sum(resumed["parts"].get(part, 0.0) for part in PARTS)
    child = pretrain(continue_from(checkpoint.path, out=settings("child").out))["time"]
    assert child["parent_parts"] == written
    assert child["everything"]["seconds"] == sum(written.values()) + sum(
        child["parts"][part] for part in PARTS if part in child["parts"]
    )
    assert "parent" in child["everything"]["includes"]


def test_what_several_kills_lost_is_told_and_on_no_clock(settings, now, monkeypatch):
    """Updates take 1.5 s; the first kill comes before any checkpoint, the last one right after a resumption."""
    taking(monkeypatch, now, saf.train.updater, "step_if_finite_", 1.5)
    config = settings(eval_every=0, save_every=3)
    for module, name, call in ((loop, "run_update", 3), (loop, "run_update", 6), (saf.train.folder, "write_lines", 1)):
        with monkeypatch.context() as patch:
            die_at(patch, module, name, call)
            with pytest.raises(Killed):
                pretrain(config, resume=Path(config.out).exists())
    result = pretrain(config, resume=True)
    time = result["time"]
    assert time["parts"]["lost"] == 1.5 * (2 + 2)
    assert "; 6 s of updates that were lost are in neither" in str(result_table(result))
    assert (time["parts"]["training"], time["everything"]["seconds"]) == (1.5 * 12, 1.5 * 12)
    lost = [line["updates"] for line in read_lines(Path(config.out, "clock.jsonl")) if "lost" in line]
    assert lost == [[1, 2], [4, 5]]


def taking(monkeypatch, now, module, name, seconds):
    real = getattr(module, name)

    def slow(*arguments, **options):
        now.value += seconds
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, slow)


@pytest.mark.parametrize("event", [2.0, 17.0], ids=["cheap", "the-rest"])
def test_no_update_passes_the_time_allowed_nor_follows_an_event_that_used_it_up(settings, now, monkeypatch, event):
    """Updates take 1.5 s, checkpoints 1 s, the event what it is given."""
    taking(monkeypatch, now, saf.train.updater, "step_if_finite_", 1.5)
    taking(monkeypatch, now, saf.train.run, "save_checkpoint", 1.0)
    taking(monkeypatch, now, saf.train.events, "freeze_", event)
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    budget = {"lr_by": "elapsed", "time_budget_seconds": 25.0, "updates": 10_000, "eval_every": 0, "save_every": 0}
    result = pretrain(settings(**budget, freeze=freeze, schedule=OneTime(at=4)))
    # Before and after the event: 4 updates, its checkpoint, its cost; the final checkpoint is on no clock.
    updates = 4 + max(0, int((25.0 - 4 * 1.5 - 1.0 - event) // 1.5))
    assert (result["updates"], result["intervention"]["update"]) == (updates, 4)
    assert result["time"]["parts"] == {
        "loading": 0.0, "training": updates * 1.5, "monitoring": 0.0, "intervention": event, "checkpoints": 1.0,
        AFTERWARDS: 1.0,
    }  # fmt: skip
    assert result["time"]["everything"]["seconds"] <= 25.0
    resumed = pretrain(settings(**budget, freeze=freeze, schedule=OneTime(at=4)), resume=True)
    assert (resumed["updates"], resumed["time"]["everything"]) == (updates, result["time"]["everything"])
