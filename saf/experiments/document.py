"""The document of all results: runs, benchmarks and analyses of a folder, and tables of recipes from its stores.

A store is what `saf run --store results/NAME` leaves; its `records` and `measurements` alone are to be kept. A table
shows the arms that were run and says how many were not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import Recipe, Scale, open_recipes, read_tokens, scale_named
from saf.experiments.render import Rendered, render
from saf.experiments.store import Store, data_of
from saf.records.files import write_atomically
from saf.records.result import read_result
from saf.records.table import markdown_of
from saf.report.collection import stores
from saf.report.results import render_results


def write_document(results: Path, out: Path) -> list[Path]:
    """Write the document and its pictures, which lie in `images` beside it; return the paths.

    Raises InputError when `out` is no Markdown file, and as `render_document` does.
    """
    if out.suffix != ".md":
        raise InputError(f"tables are written as Markdown; expected --out to end in .md, got {out.name}")
    return [
        write_atomically(out.parent / name, content.encode())
        for name, content in render_document(results, out.parent, name=out.name).items()
    ]


def render_document(
    results: Path, beside: Path, *, name: str = "results.md", recipes: dict[str, Recipe] | None = None
) -> dict[str, str]:
    """Return what files in the folder `beside` should hold: the document `name`, and its pictures.

    Tables are those of `recipes`, the project's own when None.

    Raises InputError when `results` is no folder, holds no result, or holds a JSON file that cannot be read.
    """
    tables = [part for folder in stores(results) for part in _store(folder, results, recipes)]
    return render_results(results, beside, name=name, more={"Recipes": tables} if tables else {})


def _store(folder: Path, results: Path, recipes: dict[str, Recipe] | None) -> Iterator[str]:
    """Yield the Markdown of one store: a table for each recipe that has a record at some scale, and its command."""
    store = Store(folder).open(write=False)
    recipes = open_recipes() if recipes is None else recipes
    records = [read_result(path) for path in sorted(folder.glob("records/*.json"))]
    for name in sorted({str(record["settings"]["scale"]) for record in records}):
        own = [record for record in records if record["settings"]["scale"] == name]
        data = data_of(own)
        seeds = sorted({int(record["settings"]["seed"]) for record in own})
        for fingerprint in data:
            made = plan(recipes, _scale(name, store), data=fingerprint, seeds=seeds, examples=store.examples())
            measured = plan_measurements(recipes, made)
            for title, recipe in recipes.items():
                if made.scale.speeds is not None and not any(arm.match for arm in recipe.arms):
                    continue
                rendered = render(title, recipe, made, store, measured)
                # A parent alone, which other recipes need too, is no table.
                if (recipe.columns and len(rendered.values) > 1) or rendered.measured:
                    yield from _table(rendered, made.scale, seeds, store.folder.relative_to(results.parent))


def _table(rendered: Rendered, at: Scale, seeds: list[int], store: Path) -> Iterator[str]:
    """Yield the Markdown of one recipe's tables, the arms that were run alone, and the command that makes them."""
    yield f"### {rendered.name}, {rendered.scale}"
    yield from filter(None, map(markdown_of, rendered.done().parts()))
    told: dict[str, Any] = {"scale": at.base, "tokens": _tokens(at.name), "store": store.as_posix(), "data": "DATA"}
    told["seeds"] = " ".join(map(str, seeds))
    if at.speeds is not None:
        told["match-speed"] = " ".join(dict.fromkeys(each.source for each in at.speeds.found))
        told["match-charge-seconds"] = f"{at.speeds.charge_seconds:g}"
    flags = " ".join(f"--{flag} {value}" for flag, value in told.items() if value)
    yield f"```sh\nsaf run {rendered.name} {flags}\n```"


def _tokens(name: str) -> str:
    """Return the tokens that a scale's name tells of, or nothing."""
    parts = name.partition("-speeds-")[0].split("-")
    return parts[1] if len(parts) > 1 else ""


def _scale(name: str, store: Store) -> Scale:
    """Return the scale that a record names, such as small or small-60M, or small-60M-speeds-0123abcd."""
    tokens, speeds = _tokens(name), name.partition("-speeds-")[2]
    scale = scale_named(name.partition("-")[0]).resized(read_tokens(tokens) if tokens else None)
    return scale.at_speeds(store.speeds(speeds)) if speeds else scale
