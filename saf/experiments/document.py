"""The document of all results: runs, benchmarks and analyses of a folder, and tables of recipes from its stores.

A store is what `saf run --store results/NAME` leaves; its `records` and `measurements` alone are to be kept. A table
shows the arms that were run and names those that were not.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from saf.errors import InputError
from saf.experiments.analyses import ANALYSES, draw, tables
from saf.experiments.columns import COLUMNS, PAPER_EXCHANGE
from saf.experiments.figure import figure_picture
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import Plan, plan
from saf.experiments.recipe import Recipe, open_recipes
from saf.experiments.render import Rendered, render, shown
from saf.experiments.scales import Scale, parts_of, read_tokens, scale_named
from saf.experiments.store import Store, data_of
from saf.records.files import write_atomically
from saf.records.paper import Quoted
from saf.records.table import Cell, markdown_of
from saf.report.collection import stores
from saf.report.provenance import link
from saf.report.results import PICTURES, render_results
from saf.report.results_summary import Finding

_ELSEWHERE = (
    "Rows of a scale other than the paper's are of a small model after few tokens, where 1% more tokens lowers "
    "perplexity by several times what it does in the paper's regime: for the most part that is what ours and the "
    f"paper's differ by at matched time. Rows with tokens at {PAPER_EXCHANGE:g} a % take it away, and are the ones to "
    "set beside the paper's."
)
"""What the summary says of changes at matched time that are not of the paper's scale."""


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
    shown: list[str] = []
    findings: list[Finding] = []
    pictures: dict[str, str] = {}
    for folder in stores(results):
        for rendered, planned in _rendered(folder, recipes):
            drawn = _pictures(rendered, folder.name)
            shown += _table(rendered, planned, folder.relative_to(results.parent), drawn)
            findings += _findings(rendered, link(folder, beside, folder.name))
            pictures |= {path: picture for path, (_, picture) in drawn.items()}
    more = {"Recipes": shown} if shown else {}
    analyses = dict.fromkeys(ANALYSES, (tables, draw))
    return render_results(results, beside, name=name, more=more, findings=findings, analyses=analyses) | pictures


def _pictures(rendered: Rendered, store: str) -> dict[str, tuple[str, str]]:
    """Return the titles and SVGs of a recipe's figures and measurements by their paths, figures with numbers alone."""
    figures = ((figure, figure_picture(figure, rendered)) for figure in rendered.recipe.figures)
    drawn = [(figure.name, figure.title, made) for figure, made in figures if made]
    for title, made in rendered.drawings().items():
        drawn.append(("-".join((rendered.name, *re.findall(r"\w+", title))), title, made))
    return {f"{PICTURES}/{store}-{name}.svg": (title, made) for name, title, made in drawn}


def _rendered(folder: Path, recipes: dict[str, Recipe] | None) -> Iterator[tuple[Rendered, Plan]]:
    """Yield the tables of each recipe that one store has a record of, at each scale, with the plan of its own seeds."""
    store = Store(folder).open(write=False)
    recipes = open_recipes() if recipes is None else recipes
    records, recorded, examples = store.every_record(), store.recorded(), store.examples()
    measures = any(folder.glob("measurements/*.json"))
    alone: set[tuple[str, str]] = set()
    for name in sorted({str(record["settings"]["scale"]) for record in records}):
        own = [record for record in records if record["settings"]["scale"] == name]
        data = data_of(own)
        seeds = sorted({int(record["settings"]["seed"]) for record in own})
        for fingerprint in data:
            made = plan(recipes, scale_of(name, store), data=fingerprint, seeds=seeds, examples=examples)
            found: list[tuple[Rendered, Plan, set[str]]] = []
            for title, recipe in recipes.items():
                there = {(arm, seed) for (of, arm, seed), key in made.arms.items() if of == title and key in recorded}
                matched = made.scale.speeds is None or any(arm.match for arm in recipe.arms)
                # One arm, such as a parent that other recipes share, is no table.
                if not matched or (recipe.arms and len({arm for arm, _ in there}) <= (0 if measures else 1)):
                    continue
                at = made.scale if recipe.arms else scale_named(made.scale.base)  # without arms there is no length
                if (title, at.name) in alone:
                    continue
                alone |= set() if recipe.arms else {(title, at.name)}
                # Each with its own seeds: what another recipe was run with is not lacking here.
                one = {title: recipe}
                kept = sorted({seed for _, seed in there}) or seeds
                of = plan(one, at, data=fingerprint, seeds=kept, examples=examples)
                rendered = render(title, recipe, of, store, plan_measurements(one, of))
                # Arms of its lesser table alone are no table.
                if (recipe.columns and len(rendered.ran) > 1 and any(rendered.headline())) or rendered.measured:
                    names = {arm.name for arm in rendered.ran}
                    keys = {key for (_, arm, _), key in of.arms.items() if arm in names}
                    found.append((rendered, of, keys & recorded))
            yield from _unlike(found)


def recorded_seeds(planned: Callable[[tuple[int, ...]], Plan], scale: Scale, store: Store) -> tuple[int, ...]:
    """Return the seeds of which a store has a record of some planned run, at a scale.

    Args:
        planned: Makes the plan of some seeds.
        scale: The plan's.
        store: Where records lie.

    Raises InputError, naming what there is, where there are records of other scales alone.
    """
    told: dict[str, set[int]] = {}
    for record in store.every_record():
        told.setdefault(str(record["settings"]["scale"]), set()).add(int(record["settings"]["seed"]))
    if told and scale.name not in told:
        there = [f"{name} (seeds {', '.join(map(str, sorted(seeds)))})" for name, seeds in sorted(told.items())]
        which = f"name one that it has, --scale {'; '.join(there)}"
        raise InputError(f"{store.folder} has no record of the scale {scale.name}; {which}")
    return tuple(
        seed
        for seed in sorted(told.get(scale.name, ()))
        if any(store.records(key) for key in planned((seed,)).arms.values())
    )


def _unlike(found: list[tuple[Rendered, Plan, set[str]]]) -> Iterator[tuple[Rendered, Plan]]:
    """Yield tables with their plans, but for those whose every run stands in another one: recipes share arms."""
    for place, (rendered, made, keys) in enumerate(found):
        others = ((other, at) for at, (_, _, other) in enumerate(found) if at != place)
        if rendered.measured or not any(keys < other or (keys == other and at < place) for other, at in others):
            yield rendered, made


def _findings(rendered: Rendered, source: Cell) -> Iterator[Finding]:
    """Yield what the summary has of a recipe: changes of perplexity at matched time, of frozen heads and pruned ones.

    They are those of arms that differ from the ordinary one by the share of their heads alone, and of those that have
    these arms' heads pruned. Rows in which longer training is a loss are none.
    """
    plain = {
        arm.name: float(arm.settings["freeze.rate"])
        for arm in rendered.recipe.arms
        if arm.match and not arm.on_own_clock and arm.settings.keys() - {"match_clock"} == {"freeze.rate"}
    }
    shares = {
        **{arm: ("", rate) for arm, rate in plain.items()},
        **{arm.name: (", these heads pruned", plain[arm.heads]) for arm in rendered.recipe.arms if arm.heads in plain},
    }
    ways = {"delta": "", "paper_exchange": f", {COLUMNS['paper_exchange'].title.removesuffix(', %')}"}
    for arm in filter(lambda arm: arm.name in shares.keys() - rendered.overtrained, rendered.headline()):
        (how, rate), (at, measured, _) = shares[arm.name], rendered.scale.partition("-speeds-")
        is_set = scale_named(parts_of(at)[0]).set_speed is not None
        clocks = "" if measured else ", at a set speed" if is_set else ", by their own clocks"
        for column, worth in ways.items():
            value, quoted = rendered.values[arm.name].get(column), arm.paper.get(column)
            if value is None:
                continue
            yield Finding(
                what=f"perplexity, %, matched time{worth}{how}",
                where=f"{arm.context:,} tokens, {at}{clocks}",
                rate=rate,
                ours=str(shown(COLUMNS[column], value)),
                quoted=Quoted(quoted, rendered.recipe.source) if quoted else None,
                date=rendered.date,
                source=source,
                note="" if at.partition("-")[0] == "paper" else _ELSEWHERE,
            )


def _table(rendered: Rendered, made: Plan, store: Path, drawn: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the Markdown of one recipe's figures and tables, and the command that makes them."""
    at = made.scale
    yield f"### {rendered.name}, {rendered.scale}"
    for path, (title, _) in drawn.items():
        yield Cell(text=title, link=path, picture=True).markdown()
    yield from filter(None, map(markdown_of, rendered.parts()))
    told: dict[str, list[str]] = {"scale": [at.base], "tokens": [at.tokens] if at.tokens else []}
    told |= {"store": [store.as_posix()], "data": ["DATA"], "seeds": list(map(str, made.seeds))}
    if at.speeds is not None:
        told["match-speed"] = list(dict.fromkeys(each.source for each in at.speeds.found))
        told["match-charge-seconds"] = [f"{at.speeds.charge_seconds:g}"]
    words = (word for flag, values in told.items() if values for word in (f"--{flag}", *values))
    yield f"```sh\n{shlex.join(['saf', 'run', rendered.name, *words])}\n```"


def scale_of(name: str, store: Store) -> Scale:
    """Return the scale that a record names, such as small or small-60M, or small-60M-speeds-0123abcd.

    Raises InputError for one that there is not, or whose speeds the store does not have.
    """
    base, tokens, speeds = parts_of(name)
    scale = scale_named(base).resized(read_tokens(tokens) if tokens else None)
    return scale.at_speeds(store.speeds(speeds)) if speeds else scale
