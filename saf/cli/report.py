"""`saf report`: one page about runs, the tables of recipes, or one document of all results."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.command import Command
from saf.cli.output import show
from saf.cli.scale import AtScale
from saf.data import TokenData
from saf.errors import InputError, did_you_mean
from saf.experiments.document import recorded_seeds, scale_of, write_document
from saf.experiments.examples import find_examples, is_of_files
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import open_recipes, recipe_files
from saf.experiments.render import render
from saf.experiments.scales import Scale
from saf.experiments.store import Store
from saf.records.files import naming_unsealed
from saf.records.paths import Kind, expect
from saf.report.models.page import write_model_report
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture
from saf.settings import FLAT


@dataclass(kw_only=True)
class Report(Command):
    """Write one self-contained HTML page: about runs, or a model with frozen heads.

    Names of recipes instead: their tables, from the records that `saf run` left. With --results, a document of every
    result in a folder, in tables beside the paper's.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, the first ordinary one is what frozen ones are compared with; a folder of a model of transformers,
    perhaps with the evaluations of the model before and after; or names of recipes."""
    at: Annotated[AtScale, FLAT] = field(default_factory=AtScale)
    """Which runs of a recipe."""
    store: Path = Path("runs/recipes")
    """Of a recipe's records."""
    data: Path | None = None
    """Which data's runs of a recipe, where the store has several."""
    tasks: Path | None = None
    """Which examples runs of a recipe were finetuned on, or which questions were asked, where the store has several."""
    seeds: tuple[int, ...] = ()
    """Which seeds of a recipe; when none are named, all that the store has records of; with --data the scale's own."""
    results: Path | None = None
    """A folder of results, in place of runs; its tables go to --out, a Markdown file, with pictures beside it."""
    out: Path | None = None
    """An .html file, or a folder for report.html; if not given, the last run's folder. Of
    recipes the folder for their tables as Markdown, LaTeX, CSV, HTML and JSON."""
    picture: Path | None = None
    """Also write the head map and the curves as one .svg file."""
    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> dict[str, Any]:
        """Write the page, the tables or the document and return where they are."""
        with naming_unsealed([*self.runs, *([self.results] if self.results else [])]):
            return self._written_down()

    def _written_down(self) -> dict[str, Any]:
        """Write what is asked for and return where it is."""
        if self.results is not None:
            return self._document(self.results)
        named = bool(self.runs) and not any(path.exists() for path in self.runs)
        return (
            self._tables()
            if named and all(len(path.parts) == 1 and not path.suffix for path in self.runs)
            else self._page()
        )

    def _document(self, results: Path) -> dict[str, Any]:
        """Write docs/results.md or its like from a folder of results, with its pictures."""
        if self.runs or self.picture:
            raise InputError("--results stands for itself: leave out runs and --picture, its pictures are always made")
        self._refuse_of_recipes("a document of results")
        if self.out is None:
            raise InputError("--results needs --out, the Markdown file to write (docs/results.md)")
        document, *pictures = write_document(results, self.out)
        result = {"document": str(document), "pictures": [str(path) for path in pictures]}
        show(result, str(document), *result["pictures"], as_json=self.json)
        return result

    def _refuse_of_recipes(self, what: str) -> None:
        """Raise InputError for a setting that says which records of recipes are meant, beside what reads none."""
        given, unset = ({**vars(each), **vars(each.at)} for each in (self, Report()))
        of_recipes = ("scale", "tokens", "match_speed", "store", "data", "tasks", "seeds")
        if idle := [name for name in of_recipes if given[name] != unset[name]]:
            flag = idle[0].replace("_", "-")
            raise InputError(f"--{flag} is of tables of recipes, and has no effect on {what}; leave it out")

    def _tables(self) -> dict[str, Any]:
        """Show the tables of recipes, and write them where --out says."""
        names, known = tuple(map(str, self.runs)), recipe_files()
        if known.keys().isdisjoint(names):
            raise InputError(
                f"{names[0]!r} is no run and no recipe here; expected folders of runs, or recipes, which `saf run` "
                f"lists{did_you_mean(names[0], known)}"
            )
        recipes = open_recipes(names)
        if self.picture:
            raise InputError("--picture is of runs; tables of recipes have none by itself, leave it out")
        if self.out and self.out.suffix in (".html", ".md", ".tex", ".csv", ".json"):
            raise InputError(f"a recipe's tables are several files; expected --out to be a folder, got {self.out.name}")
        store = Store(self.store).open(write=False)
        trains = any(recipe.arms for recipe in recipes.values())
        data = TokenData.open(self.data).fingerprint if self.data else store.fingerprint() if trains else ""
        files = find_examples(self.tasks) if self.tasks else None
        reads = any(arm.task and is_of_files(arm.task) for recipe in recipes.values() for arm in recipe.arms)
        scale = self._scale(store)
        reads |= any(each.asks(scale.base) for recipe in recipes.values() for each in recipe.measurements)
        # Records of other recipes are read for what these ones need alone.
        examples = store.examples() if reads and not files else None
        planned = partial(plan, recipes, scale, data=data, files=files, examples=examples)
        scan = trains and not self.seeds and not self.data
        made = planned(seeds=recorded_seeds(lambda seeds: planned(seeds=seeds), scale, store) if scan else self.seeds)
        made.questions = self.tasks
        measured = plan_measurements(recipes, made)
        rendered = [render(name, recipe, made, store, measured) for name, recipe in recipes.items()]
        written = [path for table in rendered for path in (table.write(self.out) if self.out else ())]
        result = {"tables": [table.to_dict() for table in rendered], "files": list(map(str, written))}
        parts = (part for table in rendered for part in table.parts())
        show(result, *parts, *result["files"], as_json=self.json)
        return result

    def _scale(self, store: Store) -> Scale:
        """Return the scale, which may be named as records name it: its speeds are in the store."""
        if "-" not in self.at.scale:
            return self.at.chosen()
        if self.at.tokens or self.at.match_speed:
            raise InputError(f"--scale {self.at.scale} names tokens and speeds; leave out --tokens and --match-speed")
        return scale_of(self.at.scale, store)

    def _page(self) -> dict[str, Any]:
        """Write the page about runs, and a picture where one is asked for."""
        if not self.runs:
            raise InputError("nothing to report on; name run folders, or --results FOLDER")
        self._refuse_of_recipes("a page")
        if self.out and self.out.suffix in (".md", ".tex", ".csv", ".json", ".pdf", ".svg") and not self.out.is_dir():
            raise InputError(
                f"a page is HTML; expected --out to be an .html file or a folder, got {self.out.name} (tables of "
                "recipes are made as Markdown, LaTeX and CSV, too; --picture makes an .svg)"
            )
        first, *others = self.runs
        if expect(first, Kind.RUN, Kind.TRANSFORMERS) is Kind.TRANSFORMERS:
            return self._model(first, others)
        for path in self.runs:
            expect(path, Kind.RUN)
        page = write_report(self.runs, self.out or self.runs[-1])
        return self._written(page, write_picture(self.runs, self.picture) if self.picture else None)

    def _model(self, folder: Path, evaluations: list[Path]) -> dict[str, Any]:
        """Write the page about a model of transformers, and what two evaluations tell of it."""
        if self.picture:
            raise InputError("--picture is of runs; a page about a model has none, leave it out")
        for path in evaluations:
            expect(path, Kind.EVALUATION)
        return self._written(write_model_report(folder, evaluations, self.out or folder))

    def _written(self, page: Path, drawn: Path | None = None) -> dict[str, Any]:
        """Show where a page and its picture are, and return it."""
        result: dict[str, Any] = {"report": str(page), "bytes": page.stat().st_size}
        lines = [f"{page}  ({result['bytes'] / 1e3:,.0f} kB; open it in a browser)"]
        if drawn is not None:
            result["picture"] = str(drawn)
            lines.append(result["picture"])
        show(result, *lines, as_json=self.json)
        return result


COMMAND = Report
