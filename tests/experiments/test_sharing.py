"""What runs share: a GPU and its memory, and the disk of their store."""

import threading
import time
from dataclasses import replace

import pytest

from saf.experiments import execution
from saf.experiments.execution import Lanes
from saf.experiments.recipe import Arm, Recipe
from saf.train.checkpoint import checkpoints
from tests.experiments.conftest import Trainer
from tests.experiments.test_execution import carry_out


class Watched(Trainer):
    """Notes which runs are on a device together; those that may share one stay until so many have been there."""

    def __init__(self, timed, *, wanted=3):
        super().__init__()
        self.timed, self.wanted, self.on, self.changed = timed, wanted, {}, threading.Condition()
        self.disturbed, self.devices, self.most = [], set(), 0

    def __call__(self, words, log, device, stop):
        key = words[words.index("--out") + 1].rsplit("/", 1)[1]
        with self.changed:
            beside = self.on.setdefault(device, set())
            self.disturbed += [key] if beside and (key in self.timed or beside & self.timed) else []
            beside.add(key)
            self.devices.add(device)
            self.most = max(self.most, len(beside))
            self.changed.notify_all()
            if "--parent" in words and key not in self.timed:
                self.changed.wait_for(lambda: self.most >= self.wanted, timeout=60)
        time.sleep(0.02)
        with self.changed:
            self.on[device].remove(key)
            return super().__call__(words, log, device, stop)


@pytest.mark.parametrize("first", [0, 5], ids=["timed ones stand first", "timed ones stand last"])
def test_timed_runs_have_their_gpu_alone_and_others_share_it(recipe, make_plan, store, first):
    """Four arms whose time matters and five others on two GPUs with three jobs each, from one parent."""
    arms = [Arm(name=f"arm {number}", parent="ordinary", settings={"seed": number}) for number in range(9)]
    made = make_plan(
        made_up=Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], *arms), columns=("perplexity",))
    )
    timed = {made.arms["made_up", f"arm {number}", 1] for number in range(first, first + 4)}
    watched = Watched(timed)
    lanes = Lanes(devices=("0", "1"), jobs=3, alone=frozenset(timed))
    outcome, _ = carry_out(made, store, watched, lanes=lanes)
    assert len(outcome.ended) == 10
    assert watched.devices == {"0", "1"}
    assert not watched.disturbed
    assert watched.most > 2, "the others shared"
    shared = {key for key in made.runs if store.record(key)["shared"]}
    assert shared == set(made.runs) - timed


def test_runs_share_a_gpu_as_far_as_its_memory_goes(recipe, make_plan, store):
    arms = [Arm(name=f"arm {number}", parent="ordinary", settings={"seed": number}) for number in range(5)]
    made = make_plan(
        made_up=Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], *arms), columns=("perplexity",))
    )
    watched = Watched(set(), wanted=2)
    lanes = Lanes(jobs=4, takes=dict.fromkeys(made.runs, 4.0), memory=11.0)
    assert lanes.at_once == 2
    outcome, _ = carry_out(made, store, watched, lanes=lanes)
    assert len(outcome.ended) == 6
    assert watched.most == 2
    assert Lanes(jobs=4, takes={"one": 4.0}).at_once == 4, "where the driver does not tell"
    assert Lanes(jobs=4, takes={"one": 20.0}, memory=11.0).free("one", []) == 0, "an empty one takes any"


@pytest.mark.parametrize(("gigabytes", "fit"), [(None, 3), (2.5, 2), (0.1, 1)])
def test_a_machine_says_how_many_runs_its_gpus_hold(make_plan, monkeypatch, gigabytes, fit):
    told = None if gigabytes is None else gigabytes * 1e9
    monkeypatch.setattr(execution, "smallest_memory_bytes", lambda: told)
    monkeypatch.setattr(execution, "visible_devices", lambda: ("0", "1"))
    lanes = Lanes.of_this_machine(3, (), make_plan().runs.values())
    assert lanes.devices == ("0", "1"), "every GPU is a lane"
    assert lanes.at_once == fit, "the smoke scale's take a gigabyte beside their megabytes"


def test_an_arm_keeps_its_last_checkpoint_alone_once_it_has_a_record(make_plan, store, trainer):
    made = make_plan(arms=("a",))
    carry_out(made, store, trainer)
    kept = {
        arm: [path.name for path in checkpoints(store.run_folder(key) / "checkpoints")]
        for (_, arm, _), key in made.arms.items()
    }
    assert kept == {"ordinary": ["step-4", "step-8"], "a": ["step-8"]}
    assert len(store.record(made.arms["made_up", "a", 1])["went_through"]) == 3, "both, and where it began"


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_finds_no_room_on_the_disk_is_left_with_what_to_do(make_plan, store, trainer, monkeypatch, jobs):
    made = make_plan()
    ordinary, arm = (made.runs[made.arms["made_up", name, 1]] for name in ("ordinary", "a"))
    room = [2 * ordinary.disk_bytes]

    def free(folder):
        """As much as the ordinary run needs with its reserve; then as much as one arm needs, and nothing after it."""
        arms = sum("--parent" in words for words in trainer.calls)
        return room[0] - 2 * arm.disk_bytes * (arms + bool(trainer.calls))

    monkeypatch.setattr("saf.experiments.room.free_bytes", free)

    outcome, said = carry_out(made, store, trainer, lanes=Lanes(jobs=jobs))
    assert len(outcome.ended) == 2, "the parent and one arm"
    assert len(outcome.left) == 1
    assert not outcome.failed
    assert sum("is not begun: its checkpoints take up to" in line for line in said) == 1
    assert any("may be removed" in line for line in said)
    room[0] += ordinary.disk_bytes
    assert len(carry_out(made, store, trainer)[0].ended) == 1, "the same command goes on"


def test_patterns_stored_whole_count_with_their_entries(recipe, make_plan):
    whole = Arm(name="whole", parent="ordinary", settings={"freeze.rate": 0.25, "freeze.storage": "dense"})
    made = make_plan(made_up=replace(recipe, arms=(*recipe.arms, whole)))
    compact, whole = (made.runs[made.arms["made_up", name, 1]] for name in ("a", "whole"))
    assert whole.checkpoint_bytes - compact.checkpoint_bytes == 4 * 4 * 32 * 32, "four heads of 32 x 32 floats"
    assert compact.disk_bytes == 3 * compact.kept_bytes, "at 60 and 75% of training and at its end"
    ordinary = made.runs[made.arms["made_up", "ordinary", 1]]
    assert ordinary.disk_bytes == ordinary.kept_bytes == 6 * ordinary.checkpoint_bytes
