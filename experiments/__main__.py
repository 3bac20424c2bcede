"""`python -m experiments`: list the recipes of the paper's tables, train and measure what they lack, show them."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from experiments.inputs import Inputs, check, smoke_inputs
from experiments.measurements import Maker
from experiments.recipe import Recipe, all_recipes, recipes_for
from experiments.records import read_records
from experiments.results import document, recipe_blocks, show, write_pages
from experiments.run import Key, Outcome, Run, execute, plan
from experiments.scales import SCALES, Scale, scale_named
from experiments.tables import RecipeTable, check_recipe, latex
from saf.cli.output import print_progress
from saf.errors import InputError, SafError
from saf.records.files import write_atomically
from saf.records.table import byte_size
from saf.train.loop import EXIT_STOPPED

DEFAULT_SCALE = "small"
RECIPES_PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"


@dataclass(kw_only=True)
class Experiments:
    """Train and measure what recipes lack and show their tables; without a name, list the recipes.

    The same command resumes what stopped or failed; ended runs stay as they are. `python -m experiments results`
    renders the pages of results, `python -m experiments keep` copies records of runs to be committed. Exit
    code 75 says that a signal stopped a run after a checkpoint.
    """

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE ...]")] = ()
    """Names of recipes, or tables and figures of the paper: table-8, figure-3, tab:timing-main."""
    scale: str = ""
    """Size of the runs: smoke, small, 124m-84M, converged or paper (docs/experiments.md). small-75M also sets tokens
    of a run, small-75M-again names another series of the same runs. Without one it is small, and for --show the scale
    that has most rows."""
    arms: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[ARM ...]")] = ()
    """Train only these arms, whether the recipes name them or not, with those they need; or measure only these."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="[SEED ...]")] = ()
    """Seeds of every recipe. By default the scale's, of which a recipe takes as many as the paper's table has."""
    out: Path = Path("runs")
    """Folder of the runs: OUT/SCALE/ARM/seed-SEED. All recipes share it."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder made by `saf data prepare`; the smoke scale prepares its own."""
    tasks: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of examples to finetune on: sst2/train.tsv and dev.tsv, boolq/train.jsonl and val.jsonl,
    quality/train.jsonl and dev.jsonl, gzipped or not; the smoke scale makes its own."""
    questions: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the zero-shot tasks' public files; the hub's questions where none is named."""
    jobs: int = 1
    """Number of runs at a time, each in a process of its own and on the next GPU. One run trains in this process."""
    dry_run: bool = False
    """Only list the missing runs with their tokens and memory, and totals."""
    tokens_per_second: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None
    """Rate of ordinary training by which --dry-run turns tokens into hours; docs/experiments.md says how to read it."""
    show: bool = False
    """Only show the tables of the runs in --out; --out results has the committed ones."""
    tables: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Also write tables into this folder: Markdown, LaTeX, CSV, and figures as SVG."""

    def run(self) -> int:
        if not self.recipes and not self.arms:
            _list_recipes()
            return 0
        scale = scale_named(self.scale or DEFAULT_SCALE)
        # Two numbers of the paper may be of one recipe.
        chosen = [*{each.name: each for word in self.recipes for each in recipes_for(word)}.values()]
        for each in chosen:
            check_recipe(each)
        if self.show:
            self._show_recorded(chosen)
            return 0
        runs = plan(self._wanted(scale, chosen), scale, self.out)
        if self.dry_run:
            _list(runs, self.tokens_per_second)
            return 0
        inputs = Inputs(data=self.data, tasks=self.tasks, questions=self.questions)
        if scale.base == "smoke":
            torch.set_num_threads(1)  # its tensors are too small to share: two threads take longer than one
            inputs = smoke_inputs(self.out / "smoke-inputs", inputs)
        elif runs:
            # Finetuned runs record the fingerprint of their examples instead.
            pretrained = [run.record() for run in runs.values() if run.arm.task is None]
            check(inputs, scale, [record for record in pretrained if record is not None])
        outcome = execute(runs, inputs, jobs=self.jobs)
        if not outcome.stopped:
            self._measure(scale, chosen, runs, inputs, outcome)
        records = read_records(self.out, scale.name)
        for each in chosen:
            self._show(RecipeTable(each, scale.name, records))
        for title, problem in outcome.failed.items():
            print_progress(f"{title} {problem}")
        return EXIT_STOPPED if outcome.stopped else int(bool(outcome.failed))

    def _seeds(self, scale: Scale, each: Recipe | None = None) -> tuple[int, ...]:
        return self.seeds or scale.seeds[: each.seeds if each else None]

    def _wanted(self, scale: Scale, chosen: list[Recipe]) -> list[Key]:
        """Return arms and seeds. An arm whose rows all show the first seed alone has one run."""
        if self.arms:
            measurements = {each.name: each for one in chosen for each in one.measurements}
            named: list[str] = []
            for name in self.arms:
                measurement = measurements.get(name)
                if measurement is not None and measurement.smoke is None and scale.base == "smoke":
                    raise InputError(f"the smoke scale leaves out {name!r}; name another --scale")
                named += [name] if measurement is None else measurement.arms(scale.base)
            return [(arm, seed) for arm in named for seed in self._seeds(scale)]
        rows = [row for each in chosen for row in each.rows]
        several_seeds = {row.arm.partition("@")[0] for row in rows if not row.first_seed}
        one_seed = {row.arm.partition("@")[0] for row in rows if row.first_seed} - several_seeds
        wanted: list[Key] = []
        for each in chosen:
            for arm in each.arms(scale.base):
                seeds = self._seeds(scale, each)
                wanted += [(arm, seed) for seed in (seeds[:1] if arm in one_seed else seeds)]
        return wanted

    def _measure(
        self, scale: Scale, chosen: list[Recipe], runs: dict[Key, Run], inputs: Inputs, outcome: Outcome
    ) -> None:
        """Make the missing measurements one at a time; one whose runs have failed is a failure of its own."""
        for each in chosen:
            for seed in self._seeds(scale, each):
                where: dict[str, Any] = {"scale": scale, "seed": seed, "runs": runs, "inputs": inputs, "root": self.out}
                maker = Maker(recipe=each.name, measurements=each.measurements, **where)
                for one in each.measurements:
                    wanted = one.name in self.arms if self.arms else scale.base != "smoke" or one.smoke is not None
                    if wanted and (problem := maker.make(one)):
                        outcome.failed[f"{each.name}, {one.name} (seed {seed})"] = problem

    def _show(self, table: RecipeTable) -> None:
        blocks = list(recipe_blocks(table, self.out / table.scale))
        show(blocks)
        if words := table.runs_in_words():
            print(f"\n{words}")
        if self.tables:
            stem = f"{table.scale}-{table.recipe.name}"
            frames = [frame for block in blocks for frame in block.tables]
            files = {f"{stem}.md": document(blocks), f"{stem}.tex": "\n".join(map(latex, frames))}
            files[f"{stem}.csv"] = table.csv()
            files |= {block.picture[1]: block.picture[2] for block in blocks if block.picture}
            written = [write_atomically(self.tables / file, text.encode()) for file, text in files.items() if text]
            print(f"\nAll rows and metrics: {', '.join(map(str, written))}.")
        elif any(block.page is not None and len(block.page) for block in blocks):
            print("\nAll rows and metrics, and LaTeX: --tables FOLDER.")

    def _show_recorded(self, chosen: list[Recipe]) -> None:
        """Show recipes at their scale, or each at the one with most of its rows, and name further scales.

        Raises InputError where nothing can be shown.
        """
        scales = sorted(path.name for path in self.out.glob("*") if path.name.partition("-")[0] in SCALES)
        records, shown = {scale: read_records(self.out, scale) for scale in scales}, False
        for each in chosen:
            tables = {scale: RecipeTable(each, scale, records[scale]) for scale in scales}
            # Rows and measurements that have records.
            counts = {scale: tables[scale].recorded() + len(each.measured(self.out / scale, scale)) for scale in scales}
            full = sorted(filter(counts.get, scales), key=lambda one: (-counts[one], -len(records[one])))
            scale = self.scale or next(iter(full), DEFAULT_SCALE)
            if scale in full:
                self._show(tables[scale])
                shown = True
            else:
                pages = ", ".join(_pages(each)) or "none"
                print(f"\n{each.numbered_title}: no runs of it in {self.out / scale}; pages of ours: {pages}")
            if others := [one for one in full if one != scale]:
                print(f"\nOther scales in {self.out} with results of it: {', '.join(others)}.")
        if not shown:
            committed = "" if self.out.name == "results" else "; committed runs are in results: --out results"
            raise InputError(f"{self.out} has nothing to show{committed}")


def _pages(own: Recipe) -> list[str]:
    """Return the pages of docs/results that docs/recipes.md names for a recipe."""
    lines = [line for line in RECIPES_PAGE.read_text().splitlines() if f"`{own.name}`" in line]
    return sorted({f"docs/{page}" for line in lines for page in re.findall(r"\[ours\]\((\S+?)\)", line)})


def _list_recipes() -> None:
    for name, own in all_recipes().items():
        place = "" if own.numbered_title != own.title else f" ({(*own.repeats, 'ours')[0]})"
        print(f"{name:24} {own.numbered_title}{place}")


def _list(runs: dict[Key, Run], rate: float | None) -> None:
    missing = [run for run in runs.values() if run.record() is None]
    print(f"{'run':52} {'updates':>9} {'tokens':>16} {'memory':>10}")
    by_context: dict[int, list[int]] = {}
    for run in missing:
        if run.arm.task is not None:
            print(f"{run.title:52} {run.arm.task}")
            continue
        tokens, memory = run.cost
        by_context.setdefault(int(run.settings["length"]), []).append(tokens)
        print(f"{run.title:52} {run.own_updates:9,} {tokens:16,} {byte_size(memory):>10}")
    print(f"{len(runs)} runs, {len(missing)} of them missing")
    totals = {f"at {context:,} tokens of context": tokens for context, tokens in sorted(by_context.items())}
    if len(totals) != 1:
        totals["in all"] = [each for tokens in by_context.values() for each in tokens]
    for where, tokens in totals.items():
        hours = "" if rate is None else f", {sum(tokens) / rate / 3600:,.1f} hours at {rate:,.0f} tokens a second"
        print(f"pretraining {where}: {len(tokens)} runs, {sum(tokens):,} tokens{hours}")
    if tuned := sum(run.arm.task is not None for run in missing):
        print(f"finetuning: {tuned} runs, whose tokens are known once their epochs are chosen")


@dataclass(kw_only=True)
class Results:
    """Render the pages of results with their pictures, and every cell of their tables as CSV."""

    results: Path = Path("results")
    """Folder of committed results."""
    docs: Path = Path("docs")
    """Folder whose results/ and images/ the pages and pictures go to."""

    def run(self) -> int:
        print(*write_pages(self.results, self.docs), sep="\n")
        return 0


@dataclass(kw_only=True)
class Keep:
    """Copy the records of ended runs and measurements into the folder of committed results."""

    scale: str
    """Scale whose runs are copied."""
    out: Path = Path("runs")
    """Folder of the runs."""
    results: Path = Path("results")
    """Folder of committed results: RESULTS/SCALE/ARM/seed-SEED.json."""

    def run(self) -> int:
        copied, here = 0, f"{self.out.resolve().parent}/"
        for path in sorted((self.out / self.scale).glob("**/*.json")):
            run = path.name == "result.json" and path.parent.parent.parent == self.out / self.scale
            # A killed measurement may have left seed-1337.partial.json.
            measured = path.parent.parent.name == "measurements" and path.name.count(".") == 1
            if not (run or measured):
                continue
            place = path.parent.with_suffix(".json") if run else path
            target = self.results / place.relative_to(self.out)
            # Committed records are never replaced; their paths on this machine are cut off.
            if not target.exists():
                write_atomically(target, path.read_text().replace(here, "").encode())
                copied += 1
        print(f"{copied} records copied to {self.results / self.scale}")
        return 0


def main(words: list[str]) -> int:
    """Run a command and return its exit status; a user's mistake is one line."""
    commands: dict[str, Any] = {"results": Results, "keep": Keep}
    command, rest = (commands[words[0]], words[1:]) if words[:1] and words[0] in commands else (Experiments, words)
    try:
        code = tyro.cli(command, args=rest, prog="python -m experiments").run()
        sys.stdout.flush()
        return code
    except (InputError, SafError) as error:
        print_progress(f"error: {error}")
        return 2
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a folder without permission: no fault of the program's
        print_progress(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
