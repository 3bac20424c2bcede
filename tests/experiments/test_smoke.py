"""Every recipe at the smoke scale, trained, measured and rendered by one command in this process."""

import json
import os
import re
import resource
import shutil
import signal
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

import saf.cli.run as run_module
from saf.cli import main
from saf.experiments.recipe import open_recipes
from saf.experiments.store import Store
from saf.records.files import read_json
from saf.train.checkpoint import checkpoint_hash
from saf.train.loop import EXIT_STOPPED

pytestmark = pytest.mark.slow
RECIPES = open_recipes()
if find_spec("lm_eval") is None:
    del RECIPES["qwen_zeroshot"]  # what it measures needs the extra `eval`
SEED = ["--scale", "smoke", "--seeds", "7"]
PROCESSOR_SECONDS = 60.0
"""Which all recipes may take of one core, imports included.

They take some 40, alone as well as where four processes share two cores, which makes their wall time 110 s: what else a
machine does hardly shows in the seconds of a process and of its children.
"""


def processor_seconds() -> float:
    """Return what this process and its children that ended have computed for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a store and its tables, what the command said of them, and the processor seconds it took."""
    folder, shown = tmp_path_factory.mktemp("smoke"), StringIO()
    words = ["run", *RECIPES, *SEED, "--store", str(folder / "store"), "--out", str(folder / "out"), "--json"]
    begun = processor_seconds()
    with redirect_stdout(shown):
        assert main(words) == 0
    return folder, json.loads(shown.getvalue()), processor_seconds() - begun


def test_all_recipes_run_in_one_command(made):
    folder, said, _ = made
    assert not said["failed"]
    assert not said["left"]
    assert len(said["ended"]) < 120
    assert sum(read_json(path)["tokens"] for path in (folder / "store").glob("runs/*/result.json")) < 150_000
    records = list((folder / "store" / "records").glob("*.json"))
    assert len(records) + len(list((folder / "store" / "measurements").glob("*.json"))) == len(said["ended"])
    for name, recipe in RECIPES.items():
        (table,) = (path for path in (folder / "out").glob("*.json") if path.name.startswith(f"{name}-smoke"))
        run = {arm.name for arm in recipe.arms if arm.smoke} | {each.name for each in recipe.measurements if each.smoke}
        assert not run & set(read_json(table)["not_run"]), name
    assert len(list((folder / "out").iterdir())) == 5 * len(RECIPES)


def test_all_recipes_take_less_than_a_minute_of_one_core(made):
    assert made[2] < PROCESSOR_SECONDS, f"all recipes took {made[2]:.0f} s at the smoke scale"


def test_what_is_there_is_not_made_again_and_is_listed(made, capsys):
    store = made[0] / "store"
    assert main(["run", "timing", "stability", *SEED, "--store", str(store)]) == 0
    shown = capsys.readouterr()
    assert "training" not in shown.err
    assert "measuring" not in shown.err
    assert "at 50%" in shown.out
    for data in ([], ["--data", str(store / "data")]):
        assert main(["run", *SEED, "--store", str(store), *data]) == 0
        listed = capsys.readouterr().out
        assert re.search(r"timing.*3 │ +3", listed)
        assert "`saf run NAME --scale smoke` trains" in listed
        assert "Name --data" not in listed
    assert main(["run", *SEED, "--store", str(store), "--json"]) == 0
    done = {name: (each["runs"], each["done"]) for name, each in json.loads(capsys.readouterr().out).items()}
    assert done["timing"] == (3, 3)
    assert done["downstream"] == 2 * (done["downstream"][0],), "finetuned ones, too"


def test_a_smoke_plan_knows_its_own_data_and_examples(made, tmp_path, capsys):
    for store, done in ((made[0] / "store", True), (tmp_path / "none", False)):
        words = ["run", "downstream", *SEED, "--store", str(store), "--dry-run", "--json"]
        assert main(words) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["runs"] == 0) is done
    assert not (tmp_path / "none").exists()
    assert told["seconds"] < 60, "of 64 examples of a task, not of 67,349"
    assert main([word for word in words if word != "--json"]) == 0
    assert "Without --data" not in capsys.readouterr().out
    assert main(["run", "--scale", "smoke", "--store", str(tmp_path / "none"), "--json"]) == 0
    assert {each["done"] for each in json.loads(capsys.readouterr().out).values() if each["runs"]} == {0}


def test_a_signal_while_data_are_prepared_stops_the_plan_before_its_first_run(monkeypatch, tmp_path, capsys):
    def prepared(arguments, log):
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(run_module, "in_this_process", prepared)
    with pytest.raises(SystemExit) as end:
        main(["run", "timing", *SEED, "--store", str(tmp_path / "store")])
    assert end.value.code == EXIT_STOPPED
    assert "before its first run; the same command goes on with it" in capsys.readouterr().err


def test_what_can_be_measured_is_measured_before_further_runs(made, tmp_path, capsys):
    store = Store(shutil.copytree(made[0] / "store", tmp_path / "store"))
    for path in (store.folder / "measurements").glob("*.json"):
        if read_json(path)["kind"] == "stability":
            path.unlink()
    (run,) = (
        path
        for path in (store.folder / "records").glob("*.json")
        if read_json(path)["intervention"] is not None
        and read_json(path)["settings"].get("schedule") == "gradual"
        and read_json(path)["settings"]["freeze.rate"] == 0.5
    )
    run.unlink()
    shutil.rmtree(store.run_folder(run.stem))
    assert main(["run", "schedules", "stability", *SEED, "--store", str(store.folder)]) == 0
    told = [
        line.split()[0] for line in capsys.readouterr().err.splitlines() if line.startswith(("measuring", "training"))
    ]
    assert told == ["measuring"] * (len(told) - 1) + ["training"]
    assert len(told) > 1


def test_a_plan_tells_of_data_and_rates_as_they_are(made, capsys):
    store = made[0] / "store"
    words = ["run", "timing", "--dry-run", "--data", str(store / "data"), "--store", str(store)]
    assert main([*words, "--scale", "smoke"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "One device: 1.0 GFLOP/s" in shown
    assert "vocabulary" not in shown
    assert main([*words, "--scale", "small"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "vocabulary of 512 tokens where the scale 'small' means 16,384" in shown
    assert re.search(r"reads each [\d,]{3,} times", shown)


def test_arms_go_on_from_their_parents_checkpoints(made):
    store = made[0] / "store"
    parents = {read_json(path)["parent"]["path"] for path in store.glob("runs/*/config.json") if _parent(path)}
    assert {path.split("/")[-1] for path in parents} >= {"step-2", "step-4", "step-8"}
    begun: dict[str, set[str]] = {}
    for path in store.glob("runs/*/config.json"):
        if (parent := _parent(path)) is not None and Path(parent["path"]).is_dir():
            begun.setdefault(parent["path"], set()).add(parent["hash"])
    assert max(map(len, begun.values())) == 1, "arms of one checkpoint read the same bytes"
    for checkpoint, found in begun.items():
        assert found == {checkpoint_hash(Path(checkpoint))}, "which are there still"


def _parent(path):
    return read_json(path)["parent"]


def test_tables_are_made_of_the_records_alone(made, tmp_path, capsys):
    folder, store = made[0], tmp_path / "store"
    for part in ("records", "measurements"):
        shutil.copytree(folder / "store" / part, store / part)
    shutil.copy(folder / "store" / "store.json", store)
    chosen = ["timing", "matched_time", "stability"]
    assert main(["report", *chosen, *SEED, "--store", str(store), "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"heads in both, at 25% and at 50% +│ +\d\.\d │ 30 to 31 of 36", shown)
    assert main(["report", *chosen, "--scale", "smoke", "--store", str(store), "--out", str(tmp_path / "found")]) == 0
    for path in (tmp_path / "again").iterdir():
        assert (tmp_path / "found" / path.name).read_bytes() == path.read_bytes(), "seeds are those of the records"
    assert main(["report", "timing", "--scale", "small", "--store", str(store)]) == 2
    assert "has no record of the scale small; name one that it has, --scale smoke (seeds 7)" in capsys.readouterr().err
    assert main(["report", "timing", "--scale", "small-60M", "--tokens", "75M", "--store", str(store)]) == 2
    assert "leave out --tokens" in capsys.readouterr().err
    # What another recipe's record holds is asked where the data are not named, and by what finetunes.
    (store / "records" / "another.json").write_text("{")
    words = ["report", *chosen, *SEED, "--store", str(store)]
    assert main(words) == 2
    assert "another.json" in capsys.readouterr().err
    assert main([*words, "--data", str(folder / "store" / "data")]) == 0
    again = list((tmp_path / "again").iterdir())
    assert len(again) == 15
    for path in again:
        assert path.read_bytes() == (folder / "out" / path.name).read_bytes(), path.name


def test_one_command_at_a_time_works_in_a_store(made, capsys):
    store = Store(made[0] / "store")
    words = ["run", "timing", *SEED, "--store", str(store.folder), "--data", str(store.folder / "data")]
    with store.hold():
        assert main(words) == 2
        assert "another `saf run`" in capsys.readouterr().err
        assert main([*words, "--dry-run"]) == 0
    assert main(words) == 0


def test_a_misspelt_recipe_is_named(capsys):
    assert main(["report", "timin", "--scale", "smoke"]) == 2
    assert "'timin' is no run, no file and no recipe here" in (said := capsys.readouterr().err)
    assert "did you mean 'timing'" in said
    assert main(["report", "timing", "selectrs", "--scale", "smoke"]) == 2
    assert "no recipe 'selectrs'; did you mean 'selectors'" in capsys.readouterr().err


def test_tables_of_recipes_are_written_into_a_folder(capsys):
    assert main(["report", "timing", "--scale", "smoke", "--out", "timing.html"]) == 2
    assert "expected --out to be a folder, got timing.html" in capsys.readouterr().err
