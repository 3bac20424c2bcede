"""The document of all results: the tables of recipes at the committed scales, then runs, benchmarks and analyses."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.analyses import ANALYSES, svg
from experiments.figures import draw
from experiments.recipe import recipe
from experiments.scales import scale_named
from experiments.tables import METRICS, RecipeTable, Record, markdown, measured_table, read_records
from saf.records.files import write_atomically
from saf.records.paper import Quoted
from saf.records.result import read_result
from saf.records.table import Cell, Part, Table, markdown_of
from saf.records.text import markdown as escaped
from saf.report.provenance import link
from saf.report.record_parts import body_of
from saf.report.results import PICTURES, render_results
from saf.report.results_summary import Finding

SHOWN = {
    "small-75M": ("matched_time",),
    "small-75M-high-rates": ("matched_time",),
    "small-75M-own-clock": ("matched_time",),
    "small-75M-cold-cache": ("matched_time",),
    "small-75M-warm-cache": ("matched_time",),
    "small": ("matched_time",),
    "small-75M-ideas": ("better", "selectors"),
    "small-75M-scores": ("better",),
    "small-75M-controls": ("fixed_token_controls", "timing", "trainability"),
    "small-75M-4k": ("fixed_token_controls", "timing"),
    "small-75M-patterns": ("rates_and_patterns", "timing"),
    "small-75M-representation": ("representation",),
    "small-75M-branched": ("schedules",),
    "small-75M-analyses": ("joint_cost", "schedules", "stability"),
    "small-75M-distributions": ("distributions",),
    "small-75M-stages": ("stages",),
}
"""Recipes by the committed scale that has their runs; one whose rows all stand in another's table is left out."""
_ELSEWHERE = (
    "Rows of a scale other than the paper's are of a small model after few tokens, where 1% more tokens lowers "
    "perplexity by several times what it does in the paper's regime: set the rows with tokens at 0.14 a % beside the "
    "paper's."
)


def write_document(results: Path, out: Path) -> list[Path]:
    """Write the document and its pictures, which lie in `images` beside it; return the paths."""
    made = render_document(results, out.parent, name=out.name)
    return [write_atomically(out.parent / name, text.encode()) for name, text in made.items()]


def render_document(results: Path, beside: Path, *, name: str = "results.md") -> dict[str, str]:
    """Return what files in the folder `beside` should hold: the document, and its pictures."""
    parts: list[str] = []
    findings: list[Finding] = []
    pictures: dict[str, str] = {}
    for scale, recipes in SHOWN.items():
        records = read_records(results, scale)
        for each in recipes if records else ():
            table = RecipeTable(each, recipe(each), scale, records)
            parts += _section(table, results / scale, pictures)
            findings += _findings(table, link(results / scale, beside, scale))
    analyses = dict.fromkeys(ANALYSES, (analysis_parts, svg))
    more = {"Recipes": parts} if parts else {}
    return render_results(results, beside, name=name, more=more, findings=findings, analyses=analyses) | pictures


def analysis_parts(record: Record) -> list[Part]:
    """Return the paragraphs and tables of an analysis's record."""
    return [
        part
        if isinstance(part, str)
        else Table.of(part.attrs["title"], list(part.columns), part.to_numpy().tolist(), part.attrs["notes"])
        for part in ANALYSES[record["kind"]].tables(record)
    ]


def measured_records(table: RecipeTable, folder: Path) -> dict[str, list[Record]]:
    """Return the records of a recipe's measurements at a scale, by measurement."""
    found: dict[str, list[Record]] = {}
    base = scale_named(table.scale).base
    for each in table.recipe.measurements:
        place = each.file(folder, table.name, base, 0).parent
        if files := sorted(path for path in place.glob("*.json") if path.stem.partition("-")[0] in ("seed", "once")):
            found[each.name] = [read_result(path) for path in files]
    return found


def _section(table: RecipeTable, folder: Path, pictures: dict[str, str]) -> Iterator[str]:
    """Yield the Markdown of one recipe at one scale, and add its pictures."""
    yield f"### {table.name}, {table.scale}"
    measured = measured_records(table, folder)
    drawn = {figure.name: (figure.title, draw(figure, table)) for figure in table.recipe.figures}
    for name, records in measured.items():
        if records[0]["kind"] in ANALYSES:
            drawn[name.replace(" ", "-")] = (name, svg(records[0]))
    for name, (title, picture) in drawn.items():
        if picture is not None:
            path = f"{PICTURES}/{table.scale}-{table.name}-{name}.svg"
            pictures[path] = picture
            yield Cell(text=title, link=path, picture=True).markdown()
    yield from document_parts(table, measured)
    seeds = " ".join(map(str, table.seeds))
    yield f"```sh\npython -m experiments {table.name} --scale {table.scale} --data DATA --seeds {seeds}\n```"


def document_parts(table: RecipeTable, measured: Mapping[str, list[Record]]) -> Iterator[str]:
    """Yield the Markdown of a recipe's tables and measurements."""
    for title, shown in table.tables():
        yield f"**{escaped(title)}**"
        yield markdown(shown)
    numbers = measured_table(table.recipe, measured)
    if len(numbers):
        yield f"**{escaped(table.recipe.title)}, measured ({escaped(table.scale)})**"
        yield markdown(numbers)
    yield "\n".join(f"- {escaped(note)}" for note in table.notes())
    for name, records in measured.items():
        for record in records:
            seed = (record.get("experiment") or {}).get("seed")
            yield f"<details><summary>{name}{'' if seed is None else f', seed {seed}'}</summary>"
            yield from map(markdown_of, analysis_parts(record)) if record["kind"] in ANALYSES else body_of(record)
            yield "</details>"


def _findings(table: RecipeTable, source: Cell) -> Iterator[Finding]:
    """Yield changes of perplexity at matched time for the summary, of frozen heads and of the same heads pruned."""
    if table.name != "matched_time" or table.overtrained():
        return
    kinds = {"mean": "", "pruned": ", these heads pruned"}
    for row in table.headline():
        k, operation, *rest = row.arm.split("-")
        if operation not in kinds or rest[1:] != ["time"]:
            continue
        for metric, worth in (("delta", ""), ("paper_exchange", ", with tokens at 0.14 a %")):
            if (value := table.values.get((row.label, metric))) is None:
                continue
            quoted = row.paper.get(metric)
            yield Finding(
                what=f"perplexity, %, matched time{worth}{kinds[operation]}",
                where=f"{k.upper()} tokens, {table.scale}",
                rate=int(rest[0]) / 100,
                ours=value.text(METRICS[metric]),
                quoted=Quoted(quoted, table.recipe.source) if quoted else None,
                date=_date(table),
                source=source,
                note="" if table.scale == "paper" else _ELSEWHERE,
            )


def _date(table: RecipeTable) -> str:
    dates: list[Any] = [record["provenance"].get("date") for record in table.records.values()]
    return max(map(str, dates))
