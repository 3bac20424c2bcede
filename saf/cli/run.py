"""`saf run`: what a table or figure needs, trained and measured; and which recipes there are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.arguments import at_least
from saf.cli.command import Command
from saf.cli.output import say, show
from saf.cli.scale import AtScale
from saf.data import TokenData
from saf.errors import InputError, SafError
from saf.experiments.dry_run import dry_run
from saf.experiments.examples import Examples, find_examples, smoke_examples, write_smoke_examples
from saf.experiments.execution import Outcome, execute
from saf.experiments.inputs import check_inputs, lacking_text
from saf.experiments.launching import Launch, Stop, in_a_process, last_line
from saf.experiments.limits import Limits
from saf.experiments.many_gpus import Interconnect
from saf.experiments.measuring import Measurements, carry_out, lost_inputs, plan_measurements, ready
from saf.experiments.packing import RESERVE, runs_in_words
from saf.experiments.plan import Plan, notes_of_data, plan
from saf.experiments.rates import Rates
from saf.experiments.recipe import open_recipes
from saf.experiments.render import render
from saf.experiments.scales import Scale
from saf.experiments.store import Store
from saf.records.table import Table
from saf.settings import FLAT
from saf.train.loop import EXIT_STOPPED, StopRequest
from saf.train.observer import duration

SMOKE_DATA = ("python", "--max-bytes", "500000", "--vocab-size", "512", "--seed", "0")
"""What the smoke scale trains on where no data are named."""


@dataclass(kw_only=True)
class Run(Command):
    """Train and measure what recipes lack, each run and measurement once, and print their tables; alone, list them.

    The same command goes on with what stopped or failed; what is there already is never made again. Every GPU that
    CUDA_VISIBLE_DEVICES leaves is used, a process on each.
    Exit code 75: the limit of the command, a signal or a full disk left runs for the same command, given again.
    """

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of recipes; `saf run` alone lists them."""
    at: Annotated[AtScale, FLAT] = field(default_factory=AtScale)
    """At which scale."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the smoke scale makes its own."""
    tasks: Path | None = None
    """Folder of examples to finetune on, in the public sets' own layouts: sst2/train.tsv and dev.tsv, boolq/train.jsonl
    and val.jsonl, quality/train.jsonl and dev.jsonl, gzipped or not; the smoke scale makes its own. Where it has the
    files of all zero-shot tasks, their questions are taken from it, too, in place of the hub's."""
    store: Path = Path("runs/recipes")
    """Folder of the runs and their records; recipes share it."""
    arms: tuple[str, ...] = ()
    """Only these arms or measurements, with what they go on from, are compared with and read."""
    seeds: tuple[int, ...] = ()
    """Seeds instead of the scale's own, of which a recipe takes as many as the paper's table has."""
    dry_run: bool = False
    """Say what would run, when, how long and with how much memory, and stop."""
    limits: Annotated[Limits, FLAT] = field(default_factory=Limits)
    """What the command may use."""
    gpus: Annotated[int | None, at_least(1)] = None
    """How many GPUs --dry-run counts with; those of this machine when not given."""
    nodes: Annotated[int | None, at_least(1)] = None
    """With --dry-run, foretell updates that are shared by --gpus GPUs on each of so many machines."""
    links: Annotated[Interconnect, FLAT] = field(default_factory=Interconnect)
    """What is assumed of those GPUs."""
    folder: Path | None = None
    """Folder of recipes instead of the project's own."""
    out: Path | None = None
    """Also write the tables into this folder: Markdown, LaTeX, CSV, HTML and JSON."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self):
        """Raise InputError for what cannot be used, and for what would have no effect."""
        super().__post_init__()
        if self.dry_run and not self.recipes:
            raise InputError(
                "a dry run is of recipes, and none is named; name some, or leave --dry-run out to list them"
            )
        if self.out is not None and (self.dry_run or not self.recipes):
            raise InputError("--out takes the tables of recipes that were run, and none is; leave it out")
        if self.gpus is not None and not self.dry_run:
            raise InputError("gpus is for a dry run; CUDA_VISIBLE_DEVICES chooses those that a plan uses")
        if self.nodes is not None and not (self.dry_run and self.gpus):
            raise InputError("nodes is for a dry run that counts with GPUs; add --dry-run and --gpus")
        if self.nodes is None and self.links != Interconnect():
            raise InputError("what is said of an interconnect has no effect without nodes; add --nodes")

    def run(self) -> dict[str, Any]:
        """List, plan or carry out, and return what was shown.

        Raises:
            SafError: A run failed; the table shows the others.
        """
        recipes = open_recipes(self.recipes, folder=self.folder)
        scale = self.at.chosen()
        chosen = [recipe.chosen(self.arms, smoke=scale.base == "smoke") for recipe in recipes.values()]
        data = self._data(scale, trains=any(chosen))
        made = plan(
            recipes,
            scale,
            data=data.fingerprint if data else "",
            seeds=self.seeds,
            arms=self.arms,
            vocabulary=data.vocab_size if data else None,
            files=self._examples(scale, finetunes=any(arm.task for each in recipes.values() for arm in each.arms)),
        )
        if data is not None:
            made.folder = data.folder
            made.notes += notes_of_data(made, tokens=data.num_tokens("train"), vocabulary=data.vocab_size)
        made.questions = self.tasks
        measured = plan_measurements(recipes, made, only=self.arms)
        if not self.recipes:
            known = data is not None or scale.base == "smoke"
            return self._list(made, measured, Store(self.store).open(write=False), known=known)
        if self.dry_run:
            made.notes += [lacking] if data and (lacking := lacking_text(made, measured, data)) else []
            where = {"gpus": self.gpus, "nodes": self.nodes, "links": self.links}
            told, tables = dry_run(made, measured, Store(self.store).open(write=False), self.limits, **where)
            show(told, *tables, as_json=self.json)
            return told
        check_inputs(made, measured, data)
        store = Store(self.store).open(write=True)
        with store.hold() as held:
            if scale.speeds is not None:
                store.keep_speeds_(scale.speeds)
            for note in made.notes:
                say(note)
            launch = in_this_process if self.limits.here(made) else partial(in_a_process, held=(held.fileno(),))
            outcome = self._carry_out(made, measured, store, data.folder if data else Path(), launch)
        tables = [render(name, recipe, made, store, measured) for name, recipe in recipes.items()]
        for table in tables if self.out else ():
            for path in table.write(self.out or Path()):
                say(f"wrote {path}")
        result = {"ended": outcome.ended, "found": outcome.found, "failed": outcome.failed, "left": outcome.left}
        parts = (part for table in tables for part in table.parts())
        show({**result, "tables": [table.to_dict() for table in tables]}, *parts, as_json=self.json)
        _check(outcome)
        return result

    def _carry_out(self, made: Plan, measured: Measurements, store: Store, data: Path, launch: Launch) -> Outcome:
        """Train what the store lacks, of it what the budget holds, and measure what reads no run that is left to train.

        What an earlier command left to measure comes first: folders of runs may be lost before the others end.
        """
        began, before, seconds = time.monotonic(), Outcome(), self.limits.command_seconds
        ends = None if seconds is None else began + seconds - RESERVE
        if carry_out(ready(measured, store), store, before, say=say, launch=launch, ends=ends):
            before.stopped = True
            return before
        lost = lost_inputs(measured, store)
        rates, only, lanes = self.limits.rates(made, store), None, self.limits.lanes(made)
        if self.limits.budget_seconds is not None:
            left = store.budget_left_(self.limits.budget_seconds)
            only = self._fitting(made, store, rates, lanes=len(lanes.devices), left=left, lost=lost)
        if lanes.at_once < lanes.jobs:
            say(
                f"--jobs {lanes.jobs}: a GPU's {lanes.memory / 1e9:.0f} GB hold {lanes.at_once} of the largest runs, "
                f"{max(lanes.takes.values()) / 1e9:.1f} GB each; more wait for memory"
            )
        outcome = execute(
            made,
            store,
            data,
            say=say,
            lanes=lanes,
            rates=rates,
            only=only,
            seconds=None if seconds is None else seconds - (time.monotonic() - began),
            launch=launch if lanes.threads is None else partial(launch, threads=lanes.threads),
            lost={key: why for key, why in lost.items() if only is None or key in only},
        )
        if only is not None:
            beyond = {run.key for run in store.missing(made.runs.values())} - {*only, *outcome.failed}
            outcome.left += sorted(beyond - {*outcome.left})
        outcome.failed |= before.failed
        if not outcome.stopped:
            carry_out(measured, store, outcome, say=say, launch=launch, ends=ends)
        outcome.ended[:0] = before.ended
        outcome.found = [key for key in outcome.found if key not in before.ended]
        return outcome

    def _fitting(
        self, made: Plan, store: Store, rates: Rates, *, lanes: int, left: float, lost: Mapping[str, str]
    ) -> list[str]:
        """Return the keys of the runs that the `left` seconds of a budget hold, and say how many they are."""
        missing = store.missing(made.runs.values(), lost)
        stays = self.limits.packing(made, store, rates, lanes=lanes, left=left).stays(missing, made, store.lacks)
        only, again = ([run.key for run in stays[0].runs], len(stays[0].again)) if stays else ([], 0)
        kept = runs_in_words(len(only) - again, len(missing), again)
        say(f"{duration(left)} of the budget are left: {kept} fit; after them a new budget begins")
        return only

    def _data(self, scale: Scale, *, trains: bool) -> TokenData | None:
        """Return the data; the smoke scale's are made where there are none and something is trained."""
        folder = self.data
        if folder is None and scale.base == "smoke" and trains:
            folder = Store(self.store).open(write=self._trains).folder / "data"
            if not self._trains and not folder.exists():
                return None
            if not folder.exists():
                say(f"preparing {folder}")
                log = folder.parent / "data.log"
                with StopRequest() as signalled:
                    failed = in_this_process(["data", "prepare", *SMOKE_DATA, "--out", str(folder)], log)
                if failed:
                    raise SafError(f"the smoke scale's data could not be made: {last_line(log)} (all of it: {log})")
                if signalled.requested:
                    say("a signal stopped the plan before its first run; the same command goes on with it")
                    raise SystemExit(EXIT_STOPPED)
        return None if folder is None else TokenData.open(folder)

    def _examples(self, scale: Scale, *, finetunes: bool) -> dict[str, Examples]:
        """Return the files of examples; the smoke scale's where there are none, made if something is trained."""
        folder = self.tasks
        if folder is None and scale.base == "smoke" and finetunes:
            if not self._trains:
                return smoke_examples()
            folder = write_smoke_examples(Store(self.store).open(write=True).folder / "tasks")
        return {} if folder is None else find_examples(folder)

    @property
    def _trains(self) -> bool:
        """Return whether something is made, not only listed or foretold."""
        return bool(self.recipes) and not self.dry_run

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
        given = f" --tokens {made.scale.tokens}" if made.scale.tokens else ""
        given += "" if made.scale.base == "smoke" else " --data FOLDER"
        told = f"`saf run NAME --scale {made.scale.base}{given}` trains what is missing."
        show(listed, table, told, as_json=self.json)
        return listed


def in_this_process(
    arguments: Sequence[str],
    log: Path,
    device: str | None = None,
    stop: Stop | None = None,
    *,
    compiles_anew: bool = False,
) -> int:
    """Run `saf` with its output in a file, without a process of its own, and return its exit code.

    What `compiles_anew` asks for makes no difference: the smoke scale compiles nothing.
    """
    from contextlib import redirect_stderr, redirect_stdout

    from saf.cli import main
    from saf.experiments.analyses import analyze

    analysis = arguments[0] == "analyze"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            return analyze(arguments[1:]) if analysis else main(arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1


def _check(outcome: Outcome) -> None:
    """Raise SafError for what failed; exit with code 75 where the same command is to be given again."""
    if outcome.failed:
        listed = "\n  ".join(outcome.failed.values())
        raise SafError(
            f"what failed, {len(outcome.failed)} in all:\n  {listed}\nMend the cause, then give the same command"
        )
    if outcome.stopped:
        say("a signal stopped the plan after a checkpoint; the same command goes on with it")
    elif outcome.left and not outcome.advanced:
        raise SafError(
            f"{len(outcome.left)} runs are left, and none got further within these limits, which the same command "
            "would not change: give it more time (--command-minutes), or make room on the disk"
        )
    elif outcome.left:
        say(f"{len(outcome.left)} runs are left within these limits; the same command goes on with them")
    if outcome.stopped or outcome.left:
        raise SystemExit(EXIT_STOPPED)


COMMAND = Run
