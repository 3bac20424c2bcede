import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.cli.run import _check
from saf.errors import InputError, SafError
from saf.experiments import execution
from saf.experiments.execution import Lanes, Outcome, execute
from saf.experiments.launching import CACHES, in_a_process
from saf.experiments.packing import RESERVE
from saf.experiments.rates import Rates
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.render import render
from saf.experiments.store import Store
from saf.records.files import read_json, write_json
from saf.train import EXIT_STOPPED
from saf.train.loop import StopRequest
from tests.experiments.conftest import SOURCE, Trainer


def carry_out(plan, store, trainer, **settings):
    said = []
    outcome = execute(plan, store, store.folder / "data", say=said.append, launch=trainer, **settings)
    return outcome, said


def test_a_plan_is_carried_out_once(make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    outcome, said = carry_out(made, store, trainer)
    assert len(outcome.ended) == 6
    assert not outcome.failed
    assert "left" in said[1]
    assert "6 of 6 runs" in said[-1]
    children = [words for words in trainer.calls if "--parent" in words]
    parents = {words[words.index("--parent") + 1] for words in children}
    assert len(children) == 4
    assert parents == {str(store.checkpoint(run)) for run in made.runs.values() if run.parent}
    assert len(parents) == 2, "the arms of a seed go on from one checkpoint"

    again, _ = carry_out(made, store, trainer)
    assert len(trainer.calls) == 6
    assert not again.ended
    assert len(again.found) == 6


def test_a_damaged_record_says_that_removing_it_makes_it_again(make_plan, store, trainer):
    made = make_plan(arms=("a",))
    carry_out(made, store, trainer)
    record = next(store.folder.glob("records/*.json"))
    record.write_text(record.read_text()[:-9])
    with pytest.raises(InputError, match=r"restore it, or remove it: `saf run` makes it again, and trains the run"):
        carry_out(made, store, trainer)
    record.unlink()
    carry_out(made, store, trainer)
    assert record.is_file()


@pytest.mark.parametrize(
    ("ask", "instead"), [(Store.fingerprint, "the data with --data"), (Store.examples, "the examples with --tasks")]
)
def test_a_damaged_record_of_another_recipe_is_named_with_what_to_do(make_plan, store, trainer, ask, instead):
    carry_out(make_plan(arms=("a",)), store, trainer)
    another = store.folder / "records" / "another.json"
    another.write_text("{")
    with pytest.raises(InputError, match=rf"another\.json.*: `saf run` makes it again.*; or name {instead}"):
        ask(store)


def test_arms_find_the_settings_of_their_scale(make_plan, store, trainer):
    carry_out(make_plan(arms=("a",)), store, trainer)
    ordinary, arm = (" ".join(words) for words in trainer.calls)
    for part in (
        "--data",
        "--model tiny",
        "--model-overrides num_layers 2 num_heads 8",
        "--seed 1",
        "--no-tensorboard",
    ):
        assert part in ordinary
    assert "--save-at 0.25 0.4 0.5 0.6 0.75" in ordinary
    assert arm.endswith("--freeze.rate 0.25")


def test_a_failure_keeps_its_children_from_beginning_and_the_others_go_on(make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    trainer.codes = [2]
    outcome, _ = carry_out(made, store, trainer)
    assert len(outcome.ended) == 3, "the other seed"
    problems = list(outcome.failed.values())
    assert "ordinary, seed 1 ended with exit code 2: said something" in problems[0]
    assert re.search(r"the same command resumes it: to train it anew, remove .*/runs/\w{16}$", problems[0])
    assert sum("was not begun" in problem for problem in problems) == 2
    outcome, _ = carry_out(made, store, trainer)
    assert len(outcome.ended) == 3
    assert trainer.calls[4][-1] == "--resume", "the failed run left a folder to resume"


def test_what_needs_a_failed_run_by_way_of_others_does_not_begin():
    needs = {"b": "a", "c": "b", "d": "c", "e": ""}
    waiting = [SimpleNamespace(key=key, needs={own} - {""}) for key, own in needs.items()]
    lost = execution._lost(waiting, execution.Outcome(failed={"a": "why"}))
    assert [run.key for run in lost] == ["b", "c", "d"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_record_that_cannot_be_written_is_one_failure_and_is_made_up_for(
    make_plan, store, trainer, monkeypatch, jobs
):
    made = make_plan(seeds=(1, 2))
    full = made.arms["made_up", "a", 1]

    def write(path, record):
        if path.stem == full:
            raise OSError(28, "No space left on device", str(path))
        return write_json(path, record)

    with monkeypatch.context() as patched:
        patched.setattr("saf.experiments.store.write_json", write)
        outcome, _ = carry_out(made, store, trainer, lanes=Lanes(jobs=jobs))
    assert len(outcome.ended) == 5
    assert list(outcome.failed) == [full]
    assert "No space left" in outcome.failed[full]
    outcome, _ = carry_out(made, store, trainer)
    assert outcome.ended == [full]
    assert len(trainer.calls) == 6, "the run itself had ended"


def test_a_stopped_plan_goes_on_where_it_was(make_plan, store, trainer):
    made = make_plan()
    trainer.codes = [0, EXIT_STOPPED]
    outcome, _ = carry_out(made, store, trainer)
    assert outcome.stopped
    assert len(trainer.calls) == 2
    outcome, said = carry_out(made, store, trainer)
    assert not outcome.stopped
    assert trainer.calls[2][-1] == "--resume"
    assert "resuming" in said[0]
    assert len(trainer.calls) == 4


def test_several_runs_at_a_time_wait_for_their_parents(make_plan, store, trainer):
    outcome, _ = carry_out(make_plan(seeds=(1, 2, 3)), store, trainer, lanes=Lanes(jobs=4))
    assert len(outcome.ended) == 9
    began = [words[words.index("--out") + 1] for words in trainer.calls]
    for words in trainer.calls:
        if "--parent" in words:
            parent = words[words.index("--parent") + 1].rsplit("/checkpoints", 1)[0]
            assert began.index(parent) < began.index(words[words.index("--out") + 1])


def test_an_arm_at_matched_time_waits_for_its_reference(recipe, make_plan, store, trainer):
    matched = Arm(name="matched", parent="ordinary", match="a", settings={"freeze.rate": 0.5})
    recipe = Recipe(title="x", source=recipe.source, arms=(*recipe.arms[:2], matched), columns=())
    made = make_plan(made_up=recipe, arms=("matched",))
    outcome, _ = carry_out(made, store, trainer, lanes=Lanes(jobs=3))
    assert len(outcome.ended) == 3
    words = trainer.calls[2]
    folder = store.run_folder(made.arms["made_up", "a", 1])
    assert words[words.index("--match-time") + 1] == str(folder)
    (folder / "result.json").unlink()
    store.record_file(made.arms["made_up", "matched", 1]).unlink()
    shutil.rmtree(store.run_folder(made.arms["made_up", "matched", 1]))
    _, said = carry_out(made, store, trainer)
    assert "is trained again for made_up/matched" in said[0]
    assert "has no result" in said[0]


def test_an_arm_gets_the_heads_of_another_one_that_ended(recipe, make_plan, store, trainer):
    same = Arm(name="same", parent="ordinary", heads="a", settings={"freeze.operation": "prune"})
    recipe = Recipe(title="x", source=recipe.source, arms=(*recipe.arms[:2], same), columns=())
    made = make_plan(made_up=recipe, arms=("same",))
    key = made.arms["made_up", "same", 1]
    assert key != make_plan(made_up=recipe, arms=("a",)).arms["made_up", "a", 1]
    outcome, _ = carry_out(made, store, trainer, lanes=Lanes(jobs=3))
    assert "tells of no heads frozen or pruned" in outcome.failed[key]
    trainer.heads = [[0, 3], [1, 0]]
    outcome, said = carry_out(made, store, trainer, lanes=Lanes(jobs=3))
    assert "a, seed 1 is trained again for made_up/same" in said[0]
    assert outcome.ended[-1] == key
    words = trainer.calls[-1]
    assert words[words.index("--freeze.heads") + 1 :][:3] == ["0:3", "1:0", "--out"]
    # Of a parent that is trained again other heads are chosen, and those count: not the ones recorded first.
    trainer.heads = [[1, 1]]
    for lost in (made.runs[key].parent, key):
        shutil.rmtree(store.run_folder(lost))
    store.record_file(key).unlink()
    outcome, said = carry_out(made, store, trainer)
    assert any("in another training of their parent" in line for line in said)
    assert outcome.ended[-1] == key
    words = trainer.calls[-1]
    assert words[words.index("--freeze.heads") + 1 :][:2] == ["1:1", "--out"]


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_lost_parent_is_trained_again_for_an_arm_that_needs_it(make_plan, store, trainer, harm):
    carry_out(make_plan(arms=("a",)), store, trainer)
    made = make_plan()
    parent = store.run_folder(made.arms["made_up", "ordinary", 1])
    if harm == "missing":
        shutil.rmtree(parent)
    else:
        (parent / "checkpoints" / "step-4" / "state.json").write_text("{}")
    outcome, said = carry_out(made, store, trainer)
    assert "trained again for made_up/b" in said[0]
    assert len(outcome.ended) == 2
    assert len(trainer.calls) == 4


@pytest.mark.parametrize("harm", ["thinned", "damaged"])
def test_a_damaged_parent_that_is_the_reference_at_matched_time_too_is_trained_again(
    recipe, make_plan, store, trainer, harm
):
    matched = Arm(name="matched", parent="ordinary", match="ordinary", settings={"freeze.rate": 0.5})
    recipe = Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], matched), columns=())
    carry_out(make_plan(made_up=recipe, arms=("ordinary",)), store, trainer)
    made = make_plan(made_up=recipe)
    step = store.run_folder(made.arms["made_up", "ordinary", 1]) / "checkpoints" / "step-4"
    if harm == "thinned":
        shutil.rmtree(step)
    else:
        (step / "state.json").write_text("{}")
    outcome, said = carry_out(made, store, trainer)
    assert "is trained again for made_up/matched" in said[0]
    assert (len(outcome.ended), outcome.failed) == (2, {})


@pytest.mark.parametrize("step", [4, 8])
def test_heads_of_another_training_of_a_damaged_parent_are_chosen_again(recipe, make_plan, store, trainer, step):
    """The parent is trained again for the pruned arm itself, or, by another checkpoint, for an arm beside it."""
    trainer.heads = [[0, 0]]
    pruned = Arm(name="pruned", parent="ordinary", heads="a", settings={"freeze.operation": "prune"})
    late = Arm(name="late", parent="ordinary", at=1.0, more=0.5, settings={"freeze.rate": 0.5})
    recipe = Recipe(title="x", source=recipe.source, arms=(*recipe.arms[:2], pruned, late), columns=())
    carry_out(make_plan(made_up=recipe, arms=("a",)), store, trainer)
    made = make_plan(made_up=recipe)
    parent = store.run_folder(made.arms["made_up", "ordinary", 1])
    (parent / "checkpoints" / f"step-{step}" / "state.json").write_text("{}")
    outcome, said = carry_out(made, store, trainer)
    assert {line.split(" is trained again ")[0] for line in said[:2]} == {
        "made_up/ordinary, seed 1",
        "made_up/a, seed 1",
    }
    assert (len(outcome.ended), outcome.failed) == (4, {})


def test_a_lost_parent_that_nobody_needs_stays_lost(make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    shutil.rmtree(store.folder / "runs")
    carry_out(made, store, trainer)
    assert len(trainer.calls) == 3


def test_a_store_of_another_version_or_something_else_is_refused(tmp_path):
    folder = tmp_path / "store"
    write_json(folder / "store.json", {"schema": "saf.experiment/0"})
    with pytest.raises(InputError, match=r"version 'saf\.experiment/0'"):
        Store(folder).open(write=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        Store(tmp_path / "other").open(write=True)
    (tmp_path / "other" / "records").mkdir()
    with pytest.raises(InputError, match=r"store.json is missing from a folder of runs of recipes; restore it"):
        Store(tmp_path / "other").open(write=True)
    (folder / "store.json").write_text("{")
    with pytest.raises(InputError, match=r"not valid JSON.*; restore it, or name another folder"):
        Store(folder).open(write=True)


def test_a_record_of_another_run_is_refused(make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    one, other = list(made.runs)[:2]
    shutil.copy(store.record_file(one), store.record_file(other))
    with pytest.raises(InputError, match=f"is the record of '{one}'"):
        store.record(other)


def test_a_record_says_where_its_numbers_come_from(make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    key = made.arms["made_up", "a", 1]
    record = read_json(store.record_file(key))
    assert record["kind"] == "experiment"
    assert record["provenance"]["commit"] == "0" * 40
    assert record["settings"]["freeze.rate"] == 0.25
    assert (record["parent"], record["step"]) == (made.arms["made_up", "ordinary", 1], 4)
    assert record["window_losses"] == pytest.approx([3.0, 3.2])


def test_the_limit_of_a_command_leaves_runs_for_the_next_one(make_plan, store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made, brief = make_plan(seeds=(1, 2)), Lasting(now, seconds=0.01)
    # The rates say that a run takes 20 s beside its updates; RESERVE is kept back.
    rates = Rates(flops=1e15, start=20.0, compilation=0.0, uncompiled=1.0, launching=0.0, source="made up")
    outcome, _ = carry_out(made, store, brief, rates=rates, seconds=RESERVE + 10)
    assert len(outcome.ended) == 6, "what ended in milliseconds corrected the rates; the first began as longer than any"
    assert not outcome.left

    again = Store(store.folder.parent / "other").open(write=True)
    outcome, _ = carry_out(make_plan(), again, Lasting(now, seconds=1.0), rates=rates, seconds=RESERVE + 0.1)
    assert not outcome.stopped
    assert not outcome.ended
    assert len(outcome.left) == 3, "the parent stopped at the limit, its arms were not begun"
    assert not outcome.advanced, "it had no checkpoint yet"
    outcome, said = carry_out(make_plan(), again, brief, rates=rates, seconds=RESERVE + 100)
    assert "resuming" in said[0]
    assert len(outcome.ended) == 3
    assert outcome.advanced


def test_a_command_in_which_nothing_got_further_does_not_promise_that_the_same_one_goes_on():
    with pytest.raises(SafError, match=r"1 runs are left, and none got further .*--command-minutes"):
        _check(Outcome(left=["a"], advanced=False))
    with pytest.raises(SystemExit) as stopped:
        _check(Outcome(left=["a"]))
    assert stopped.value.code == EXIT_STOPPED


def test_runs_longer_than_a_command_begin_first_on_every_gpu(make_plan, store):
    """Parents of two seeds would never end in time: each begins on a GPU of its own, and both stop at the limit."""
    rates = Rates(flops=1e15, start=20.0, compilation=0.0, uncompiled=1.0, launching=0.0, source="made up")
    together = threading.Barrier(2)

    class Together(Trainer):
        def __call__(self, words, log, device, stop, **rest):
            self.codes.append(EXIT_STOPPED)
            together.wait(timeout=10)
            return super().__call__(words, log, device, stop, **rest)

    lanes, long = Lanes(devices=("0", "1")), Together()
    outcome, _ = carry_out(make_plan(seeds=(1, 2)), store, long, rates=rates, seconds=RESERVE + 10, lanes=lanes)
    assert len(long.calls) == 2
    assert not outcome.failed
    assert len(outcome.left) == 6


class Lasting(Trainer):
    """Trains for so many seconds of a clock that stands still otherwise, and stops where it is asked to."""

    def __init__(self, now, seconds):
        super().__init__()
        self.now, self.seconds = now, seconds

    def __call__(self, words, log, device, stop, **rest):
        self.now[0] += self.seconds
        self.codes = [EXIT_STOPPED] if stop.requested else []
        return super().__call__(words, log, device, stop, **rest)


def test_a_parent_trained_again_has_a_second_record_and_arms_are_compared_with_their_own(
    recipe, make_plan, store, trainer
):
    carry_out(make_plan(arms=("a",)), store, trainer)
    made = make_plan()
    ordinary = made.arms["made_up", "ordinary", 1]
    shutil.rmtree(store.run_folder(ordinary))
    trainer.losses[ordinary] = [4.0, 4.0]
    before = store.record_file(ordinary).read_bytes()
    carry_out(made, store, trainer)
    assert store.record_file(ordinary).read_bytes() == before, "no record is overwritten"
    first, second = store.records(ordinary)
    assert (first["report_loss"], second["report_loss"]) == pytest.approx((3.1, 4.0))
    table = render("made_up", recipe, made, store)
    assert table.values["a"]["delta"].mean == pytest.approx(0.0, abs=1e-3), "of the first training"
    assert table.values["b"]["delta"].mean < -50, "of the second"
    notes = " ".join(table.tables()[0].notes)
    assert "another training of the same parent" in notes, "b is compared with a, of the first"


def test_runs_at_a_time_share_the_cores_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("saf.experiments.execution.usable_cores", lambda: 12)
    assert Lanes().threads is None
    assert Lanes(devices=("0", "1"), jobs=3).threads == 2
    assert Lanes(jobs=50).threads == 1
    script = tmp_path / "tells"
    script.write_text("#!/bin/sh\necho $OMP_NUM_THREADS $TORCHINDUCTOR_COMPILE_THREADS\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    assert in_a_process(["pretrain"], tmp_path / "log", None, StopRequest(), threads=2) == 0
    assert in_a_process(["pretrain"], tmp_path / "log", None, StopRequest()) == 0
    assert (tmp_path / "log").read_text().split("\n") == ["2 7", "7", ""], "what the environment says stays"


def test_a_run_that_compiles_anew_has_caches_of_its_own_which_end_with_it(tmp_path, monkeypatch):
    script = tmp_path / "tells"
    script.write_text("#!/bin/sh\necho $TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR\nls -A $TRITON_CACHE_DIR\n")
    script.chmod(0o755)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/compiled").touch()
    monkeypatch.setattr(sys, "executable", str(script))
    for name in CACHES:
        monkeypatch.setenv(name, str(tmp_path / "shared"))
    for number in range(2):
        asked = {"compiles_anew": True}
        assert in_a_process(["pretrain"], tmp_path / f"own-{number}", None, StopRequest(), **asked) == 0
    assert in_a_process(["pretrain"], tmp_path / "usual", None, StopRequest()) == 0
    own = [(tmp_path / f"own-{number}").read_text().split() for number in range(2)]
    assert [len(told) for told in own] == [2, 2], "nothing lies there at first"
    assert len({folder for told in own for folder in told}) == 2
    assert not any(Path(folder).exists() for told in own for folder in told)
    assert (tmp_path / "usual").read_text().split() == [*[str(tmp_path / "shared")] * 2, "compiled"]


def test_arms_whose_own_clock_decides_compile_anew(make_plan, store, trainer):
    by_speed = {"match_speed": 1.1, "match_speed_source": "a file"}
    clocked = Arm(name="clocked", parent="ordinary", match="ordinary")
    reckoned = Arm(name="reckoned", parent="ordinary", match="ordinary", settings=by_speed)
    made = Recipe(title="x", source=SOURCE, arms=(Arm(name="ordinary", reference=None), clocked, reckoned), columns=())
    carry_out(make_plan(x=made, own_clocks=True), store, trainer)
    (anew,) = trainer.anew
    assert "--match-time" in anew
    assert "--match-speed" not in anew
    assert len(trainer.calls) == 3


def test_a_run_that_outlives_its_command_holds_the_store(store, tmp_path, monkeypatch):
    script = tmp_path / "sleeps"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    held, stop = store.hold(), StopRequest()
    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(in_a_process, ["pretrain"], tmp_path / "log", None, stop, held=(held.fileno(),))
        while not (tmp_path / "log").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        held.close()  # as the end of a killed process does
        try:
            with pytest.raises(InputError, match="a run that one began before it was killed"):
                store.hold()
        finally:
            stop.requested = True
        assert code.result() == EXIT_STOPPED, "asked to stop, it ended by the signal"
    store.hold().close()
