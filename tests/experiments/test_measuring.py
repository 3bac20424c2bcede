"""Measurements of a plan: each once, by a command of its own, when what it reads has ended."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.errors import InputError
from saf.experiments.execution import Outcome
from saf.experiments.launching import in_a_process
from saf.experiments.measurement import (
    Changes,
    Checkpoint,
    Measurement,
    Number,
    RecordOf,
    RunOf,
    speedup,
)
from saf.experiments.measuring import carry_out, plan_measurements, ready, words
from saf.experiments.plan import plan
from saf.experiments.recipe import Recipe
from saf.experiments.render import render
from saf.experiments.scales import SCALES
from saf.records.files import read_json, write_json
from saf.records.result import result_header
from tests.experiments.conftest import OVERLAP, STABILITY, measured_recipe


def test_a_measurement_is_made_once_for_each_seed_and_never_again(prepare, store, command):
    made, found, outcome, _ = prepare(measured_recipe(STABILITY), seeds=(1, 2))
    assert len(command.calls) == len(found.planned) == 2
    key = found.keys["x", "two", 1]
    assert key in outcome.ended
    folders = [str(store.run_folder(made.arms["x", arm, 1])) for arm in ("a", "b")]
    assert command.calls[0][:4] == ["analyze", "stability", *folders]
    record = store.measurement(key)
    assert (record["key"], record["seed"], record["overlap"]) == (key, 1, 3)
    prepare(measured_recipe(STABILITY), seeds=(1, 2))
    assert len(command.calls) == 2


def test_what_reads_no_run_is_measured_once_for_all_seeds_and_recipes(store):
    speed = Measurement(name="speed", does="bench update", settings={"model": "tiny"})
    recipes = {"x": Recipe(title="t", source=None, measurements=(speed,)), "y": measured_recipe(speed)}
    made = plan(recipes, SCALES["smoke"], data="data", seeds=(1, 2))
    found = plan_measurements(recipes, made)
    assert len(found.planned) == 1
    (one,) = found.planned.values()
    assert one.tables == (("x", "speed"), ("y", "speed"))
    assert words(one, store, Path("o.json")) == ["bench", "update", "--out", "o.json", "--model", "tiny"]


def test_several_processes_measure_together(prepare, command, monkeypatch, tmp_path):
    settings = {"model": "tiny"}
    speed = Measurement(
        name="speed", does="bench update", settings=settings, processes=4, scaled={"smoke": {"processes": 2}}
    )
    made, found, _, _ = prepare(measured_recipe(speed))
    assert command.processes == 2
    assert "--processes" not in command.calls[0]
    alone = plan_measurements({"x": measured_recipe(replace(speed, processes=1, scaled={}))}, made)
    assert not alone.planned.keys() & found.planned.keys()
    started = []

    def start(command, **options):
        started.append(command)
        return real(["true"], **options)

    real = subprocess.Popen
    monkeypatch.setattr("saf.experiments.launching.subprocess.Popen", start)
    stop = SimpleNamespace(requested=False)
    assert in_a_process(["bench", "update"], tmp_path / "log", None, stop, processes=2) == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert started[0][1:] == [*torchrun, "-m", "saf", "bench", "update"]


def test_settings_of_a_scale_make_another_measurement():
    speed = Measurement(
        name="speed", does="bench update", settings={"model": "124m"}, scaled={"smoke": {"model": "tiny"}}
    )
    recipe = Recipe(title="t", source=None, measurements=(speed,))
    keys = set()
    for scale in ("smoke", "small", "paper"):
        made = plan({"x": recipe}, SCALES[scale], data="", seeds=(1,))
        keys |= set(plan_measurements({"x": recipe}, made).planned)
    assert len(keys) == 2, "paper and small ask for the same"


def test_references_become_paths(prepare, store, command):
    recipe = measured_recipe(
        Measurement(name="first", does="analyze one-head", on=(Checkpoint("ordinary", 0.5),)),
        Measurement(
            name="last", does="analyze profiles", on=(Checkpoint("a", 1.0),), settings={"selected": RunOf("a")}
        ),
        Measurement(name="of", does="analyze partial-spearman", on=(RecordOf("first"),)),
        Measurement(
            name="far",
            does="analyze geometry",
            on=(Checkpoint("ordinary"),),
            settings={"costs": Changes({"0.25": {"mean": "a", "dirichlet": "ordinary"}})},
        ),
    )
    made, found, outcome, _ = prepare(recipe)
    assert not outcome.failed
    of = {each[1]: each for each in command.calls}
    ordinary, a = (store.run_folder(made.arms["x", arm, 1]) for arm in ("ordinary", "a"))
    assert of["one-head"][2] == str(ordinary / "checkpoints" / "step-4")
    assert of["profiles"][2] == str(a / "checkpoints" / "step-8")
    assert of["profiles"][-2:] == ["--selected", str(a)]
    assert of["partial-spearman"][2] == str(store.measurement_file(found.keys["x", "first", 1]))
    changes = read_json(Path(of["geometry"][-1]))
    assert changes["0.25"]["dirichlet"] == 0.0
    assert changes["0.25"]["mean"] == pytest.approx(0.0, abs=1e-9), "the trainer's losses are all alike"


def test_a_failure_names_its_log_and_stops_what_reads_it_alone(prepare, command):
    command.codes = [1, 0]
    recipe = measured_recipe(
        Measurement(name="first", does="analyze one-head", on=(Checkpoint("ordinary"),)),
        Measurement(name="of", does="analyze partial-spearman", on=(RecordOf("first"),)),
        STABILITY,
    )
    _, found, outcome, said = prepare(recipe)
    assert len(command.calls) == 2
    assert "exit code 1: said something" in outcome.failed[found.keys["x", "first", 1]]
    assert "not begun" in outcome.failed[found.keys["x", "of", 1]]
    assert found.keys["x", "two", 1] in outcome.ended
    assert "3 of 3 measurements" in said[-1]


def test_what_an_analysis_can_go_on_with_stays_for_it(prepare, store, command):
    recipe = measured_recipe(
        Measurement(name="study", does="analyze zero-shot", on=("MODEL",)),
        Measurement(name="speed", does="bench update"),
    )
    command.codes = [1, 1]
    _, found, *_ = prepare(recipe)
    study, speed = (store.run_folder(key) / "measured.json" for key in found.planned)
    for out, kind in ((study, "zero-shot"), (speed, "update")):
        write_json(out, {**result_header(kind, {}), "arms": [], "asked": 2, "finished": False})
    command.codes = [1, 1]
    prepare(recipe)
    assert study.exists()
    assert not speed.exists(), "a benchmark begins anew"
    write_json(study, {**result_header("zero-shot", {}), "arms": [], "asked": 0})
    command.codes = [1]
    prepare(recipe)
    assert not study.exists(), "it was not cut off, and the command would refuse it"


def test_a_measurement_without_a_readable_record_is_one_failure(prepare, command, monkeypatch):
    def nothing(path):
        raise InputError(f"{path} is not valid JSON")

    monkeypatch.setattr("saf.experiments.measuring.read_result", nothing)
    *_, outcome, said = prepare(measured_recipe(STABILITY))
    (problem,) = outcome.failed.values()
    assert "x/two, seed 1 has no record" in problem
    assert "1 of 1 measurements" in said[-1]


def test_a_run_whose_folder_is_gone_is_trained_again_for_what_reads_it(prepare, store, trainer):
    made, *_ = prepare(measured_recipe(STABILITY))
    shutil.rmtree(store.run_folder(made.arms["x", "a", 1]))
    prepare(measured_recipe(STABILITY))
    assert len(trainer.calls) == 3, "it is measured already"
    shutil.rmtree(store.folder / "measurements")
    *_, said = prepare(measured_recipe(STABILITY))
    assert len(trainer.calls) == 4
    assert any("x/a, seed 1 is trained again for x/two, seed 1" in line for line in said)


def test_what_reads_a_run_that_is_left_is_left_too_and_the_others_are_measured(prepare, store, command):
    both = Measurement(name="one", does="analyze profiles", on=(RunOf("a"),))
    recipe = measured_recipe(STABILITY, both)
    made, found, *_ = prepare(recipe)
    shutil.rmtree(store.folder / "measurements")
    outcome = Outcome(left=[made.arms["x", "b", 1]])
    carry_out(found, store, outcome, say=lambda text: None, launch=command)
    assert outcome.ended == [found.keys["x", "one", 1]]
    assert outcome.left == [made.arms["x", "b", 1], found.keys["x", "two", 1]]
    again = Outcome(failed={found.keys["x", "two", 1]: "it failed before"})
    carry_out(found, store, again, say=lambda text: None, launch=command)
    assert not again.ended, "what failed once in a command is not tried twice"


def test_a_stop_after_the_last_measurement_is_told(prepare, store, command):
    _, found, *_ = prepare(measured_recipe(STABILITY))
    assert not carry_out(found, store, Outcome(), say=lambda text: None, launch=command)
    shutil.rmtree(store.folder / "measurements")

    def signalled(given, log, device, stop, processes=1):
        stop.requested = True
        return command(given, log, device, stop, processes)

    outcome = Outcome()
    assert carry_out(found, store, outcome, say=lambda text: None, launch=signalled)
    assert outcome.ended, "it was made all the same"


def test_ready_is_what_reads_runs_that_are_all_there(prepare, store):
    speed = Measurement(name="speed", does="bench update")
    chained = (
        Measurement(name="first", does="analyze one-head", on=(Checkpoint("ordinary"),)),
        Measurement(name="of", does="analyze partial-spearman", on=(RecordOf("first"),)),
    )
    made, found, *_ = prepare(measured_recipe(STABILITY, speed, *chained))

    def names() -> set[str]:
        return {each.tables[0][1] for each in ready(found, store).planned.values()}

    assert not names(), "all are measured"
    shutil.rmtree(store.folder / "measurements")
    assert names() == {"two", "first"}, "neither what reads no run nor what reads a record that is not there"
    store.forget_(made.arms["x", "a", 1])
    assert names() == {"first"}
    shutil.rmtree(store.run_folder(made.arms["x", "ordinary", 1]))
    assert not names(), "its run has a record and no folder"


def test_tables_have_the_papers_number_and_what_was_not_made(prepare, store, tmp_path):
    speed = Measurement(
        name="speed", does="bench update", numbers=(speedup("25%", 0.25, (8, 1), "1.05×"),), smoke=False
    )
    recipe = measured_recipe(STABILITY, speed)
    made, found, *_ = prepare(recipe, seeds=(1, 2))
    table = render("x", recipe, made, store, found)
    rows = [list(map(str, row)) for row in table.measurements()[0].rows]
    assert rows == [["overlap", "3 ± 0", "30"]]
    other = replace(STABILITY, numbers=(replace(OVERLAP, path=("of nothing",)),))
    (row,) = render("x", replace(recipe, measurements=(other,)), made, store, found).measurements()[0].rows
    assert list(map(str, row)) == ["overlap", "not run", "30"], "a record that has not got the number"
    assert re.findall(r"25\\.*", table.latex()) == [r"25\% & not run & 1.05$\times$ \\"]
    files = {path.suffix: path for path in table.write(tmp_path / "out")}
    markdown = files[".md"].read_text()
    assert "Measurements not run: speed (saf bench update)." in markdown
    assert "heads in both" in markdown, "the analysis's own table"
    assert "two,overlap,3" in files[".csv"].read_text()
    assert r"\bottomrule" in files[".tex"].read_text()
    assert read_json(files[".json"])["measured"]["two"]["overlap"]["seeds"] == 2


def test_numbers_are_found_by_conditions_that_one_entry_meets():
    rows = [
        {"backend": "toeplitz", "rate": rate, "variant": "update", "refused": rate == 0.5, "ratio": 1 + rate}
        | {"point": {"length": 8, "batch_size": 1, "accumulation": 2}}
        for rate in (0.25, 0.5)
    ]
    assert speedup("25%", 0.25, (8, 1), None).find({"rows": rows}) == 1.25
    assert speedup("50%", 0.5, (8, 1), None).find({"rows": rows}) is None, "refused"
    assert speedup("25%", 0.25, (8, 2), None).find({"rows": rows}) is None
    with pytest.raises(InputError, match="2 entries meet"):
        Number(title="any", path=("rows", {"backend": "toeplitz"}, "ratio")).find({"rows": rows})
    orders = [{"order": f"of {seed}", "refused": seed == 3, "ratio": seed} for seed in (1, 2, 3, 4)]
    several = {"order": frozenset(f"of {seed}" for seed in (1, 2, 3)), "refused": False}
    found = Number(title="mean", path=("rows", several, "ratio"), mean=True)
    assert found.find({"rows": orders}) == 1.5, "of the accepted ones among those asked for"
    assert found.find({"rows": []}) is None
    assert Number(title="worst", path=("rows", several, "ratio"), largest=True).find({"rows": orders}) == 2.0
    assert Number(title="the paper's alone", path=(), paper="1.0").find({"rows": orders}) is None
    assert Number(title="of", path=("pair", 1), scale=2.0).find({"pair": [1, 3]}) == 6.0


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Measurement(name="m", does="bench updates"), "expected one of bench update"),
        (lambda: measured_recipe(Measurement(name="a", does="bench update")), "two arms or measurements"),
        (lambda: measured_recipe(Measurement(name="m", does="analyze profiles", on=(RunOf("c"),))), "reads 'c'"),
        (
            lambda: measured_recipe(Measurement(name="m", does="analyze partial-spearman", on=(RecordOf("n"),))),
            "reads 'n'",
        ),
    ],
)
def test_what_is_not_there_is_named(make, expected):
    with pytest.raises(InputError, match=expected):
        make()


def test_a_moment_without_a_checkpoint_is_named(prepare):
    with pytest.raises(InputError, match=r"reads 'ordinary' after 0\.3"):
        prepare(measured_recipe(Measurement(name="m", does="analyze profiles", on=(Checkpoint("ordinary", 0.3),))))


def test_chosen_measurements_bring_what_they_read():
    first = Measurement(name="first", does="analyze one-head", on=(Checkpoint("ordinary"),))
    of = Measurement(name="of", does="analyze partial-spearman", on=(RecordOf("first"),))
    recipe = measured_recipe(first, of, STABILITY)
    assert [each.name for each in recipe.chosen_measurements(("of",), smoke=False)] == ["first", "of"]
    assert [arm.name for arm in recipe.chosen(("of",), smoke=False)] == ["ordinary"]
    assert [arm.name for arm in recipe.chosen(("two",), smoke=False)] == ["ordinary", "a", "b"]
    assert not recipe.chosen_measurements(("a",), smoke=False)


def test_outcomes_of_a_stop_are_kept(store, command):
    recipe = measured_recipe(Measurement(name="speed", does="bench update"))
    made = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=(1,))
    found, outcome = plan_measurements({"x": recipe}, made), Outcome(stopped=True)
    carry_out(found, store, outcome, say=lambda text: None, launch=command)
    assert not command.calls
