"""`saf run`: what a table or figure needs, trained and measured; and which recipes there are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.arguments import at_least
from saf.cli.command import Command
from saf.cli.output import show
from saf.data import TokenData
from saf.errors import SafError
from saf.experiments.execution import Launch, Outcome, execute, in_a_process
from saf.experiments.measuring import Measurements, carry_out, lost_inputs, plan_measurements
from saf.experiments.plan import Plan, plan
from saf.experiments.recipe import Scale, open_recipes, scale_named
from saf.experiments.render import render
from saf.experiments.store import Store
from saf.records.table import Table
from saf.train.loop import StopRequest
from saf.train.observer import duration

SMOKE_DATA = ("python", "--max-bytes", "1000000", "--vocab-size", "512", "--seed", "0")
"""What the smoke scale trains on where no data are named."""


@dataclass(kw_only=True)
class Run(Command):
    """Train and measure what recipes lack, each run and measurement once, and print their tables; alone, list them.

    The same command goes on with what stopped or failed; what is there already is never made again.
    """

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of recipes; `saf run` alone lists them."""
    scale: str = "small"
    """paper (its exact settings), small (any prepared folder), or smoke (seconds, on any machine)."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the smoke scale makes its own."""
    store: Path = Path("runs/recipes")
    """Folder of the runs and their records; recipes share it."""
    arms: tuple[str, ...] = ()
    """Only these arms or measurements, with what they go on from, are compared with and read."""
    seeds: tuple[int, ...] = ()
    """Seeds instead of the scale's own."""
    dry_run: bool = False
    """Say what would run, how long and with how much memory, and stop."""
    jobs: Annotated[int, at_least(1)] = 1
    """Runs at a time. Runs that share a device tell nothing of their speed."""
    folder: Path | None = None
    """Folder of recipes instead of the project's own."""
    out: Path | None = None
    """Also write the tables into this folder: Markdown, LaTeX, CSV, HTML and JSON."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """List, plan or carry out, and return what was shown.

        Raises:
            SafError: A run failed; the table shows the others.
        """
        recipes = open_recipes(self.recipes, folder=self.folder)
        scale = scale_named(self.scale)
        data = self._data(scale, trains=any(recipe.arms for recipe in recipes.values()))
        made = plan(recipes, scale, data=data[1] if data else "", seeds=self.seeds, arms=self.arms)
        measured = plan_measurements(recipes, made, only=self.arms)
        if not self.recipes:
            return self._list(made, measured, Store(self.store).open(write=False), known=data is not None)
        if self.dry_run:
            return self._foretell(made, measured)
        if data is None and made.runs:
            raise SafError(f"the scale {scale.name!r} needs --data, a folder made by `saf data prepare`: {scale.text}")
        store = Store(self.store).open(write=True)
        launch, lost = self._launch(scale), lost_inputs(measured, store)
        folder = data[0] if data else Path()
        outcome = execute(made, store, folder, say=_say, jobs=self.jobs, launch=launch, lost=lost)
        if not outcome.stopped:
            carry_out(measured, store, outcome, say=_say, launch=launch)
        tables = [render(name, recipe, made, store, measured) for name, recipe in recipes.items()]
        for table in tables if self.out else ():
            for path in table.write(self.out or Path()):
                _say(f"wrote {path}")
        result = {"ended": outcome.ended, "found": outcome.found, "failed": outcome.failed}
        parts = (part for table in tables for part in table.parts())
        show({**result, "tables": [table.to_dict() for table in tables]}, *parts, as_json=self.json)
        _check(outcome)
        return result

    def _data(self, scale: Scale, *, trains: bool) -> tuple[Path, str] | None:
        """Return the folder of the data and its fingerprint; the smoke scale's are made where there are none."""
        folder = self.data
        if folder is None and scale.name == "smoke" and trains and self.recipes and not self.dry_run:
            folder = Store(self.store).open(write=True).folder / "data"
            if not folder.exists():
                _say(f"preparing {folder}")
                in_this_process(["data", "prepare", *SMOKE_DATA, "--out", str(folder)], folder.parent / "data.log")
        return None if folder is None else (folder, TokenData.open(folder).fingerprint)

    def _launch(self, scale: Scale) -> Launch:
        """Return how a run is made: in this process where starting one would take longer than the run."""
        return in_this_process if scale.name == "smoke" and self.jobs == 1 else in_a_process

    def _list(self, made: Plan, measured: Measurements, store: Store, *, known: bool) -> dict[str, Any]:
        """Show every recipe with its number of runs, and how many are done where the data are known."""
        rows, listed = [], {}
        for name, recipe in open_recipes(folder=self.folder).items():
            keys = {key for (of, _, _), key in made.arms.items() if of == name}
            others = {key for (of, _, _), key in measured.keys.items() if of == name}
            done = sum(store.record(key) is not None for key in keys) if known else None
            made_ones = sum(store.measurement(key) is not None for key in others) if known or not keys else None
            listed[name] = {"title": recipe.title, "source": recipe.source.label, "runs": len(keys), "done": done}
            listed[name] |= {"measurements": len(others), "measured": made_ones}
            rows.append([name, recipe.title, recipe.source.label, len(keys), done, len(others), made_ones])
        notes = () if known else ("Name --data to see which of them are done.",)
        head = ["name", "table", "paper", "runs", "done", "measurements", "done"]
        table = Table.of(f"Recipes ({made.scale.name})", head, rows, notes)
        show(listed, table, "`saf run NAME --scale small --data FOLDER` trains what is missing.", as_json=self.json)
        return listed

    def _foretell(self, made: Plan, measured: Measurements) -> dict[str, Any]:
        """Show what the plan would take, in updates, time and memory a run, without training anything."""
        runs = list(made.runs.values())
        rows = [
            [run.title, run.updates_to_do, duration(run.predicted_seconds), f"{run.predicted_bytes / 2**30:.1f} GiB"]
            for run in runs
        ]
        seconds = sum(run.predicted_seconds for run in runs)
        notes = (
            f"{len(runs)} runs, {duration(seconds)} on one GPU that trains at 400 TFLOP/s, compilation left out.",
            "All heads are counted as live; memory is that of an update, foretold from the peak of 124M at 8 x 4,096.",
        )
        table = Table.of(
            f"Plan ({made.scale.name}: {made.scale.text})", ["run", "updates", "time", "memory"], rows, notes
        )
        most = max((run.predicted_bytes for run in runs), default=0.0)
        others = [[each.title, f"saf {each.does}"] for each in measured.planned.values()]
        result = {"runs": len(runs), "seconds": seconds, "bytes": most, "measurements": len(others)}
        tables = [table] * bool(runs) + [Table.of("Measurements, afterwards", ["", "command"], others)] * bool(others)
        show(result, *tables, as_json=self.json)
        return result


def in_this_process(
    arguments: Sequence[str], log: Path, device: str | None = None, stop: StopRequest | None = None
) -> int:
    """Run `saf` with its output in a file, without a process of its own, and return its exit code."""
    from contextlib import redirect_stderr, redirect_stdout

    from saf.cli import main

    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            return main(arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(outcome: Outcome) -> None:
    """Raise an error when a run of the plan failed or a signal stopped it."""
    if outcome.failed:
        listed = "\n  ".join(outcome.failed.values())
        raise SafError(
            f"{len(outcome.failed)} runs did not end:\n  {listed}\nMend the cause, then give the same command"
        )
    if outcome.stopped:
        raise SafError("a signal stopped the plan after a checkpoint; the same command goes on with it")


COMMAND = Run
