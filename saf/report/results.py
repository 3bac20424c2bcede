"""The document of all results: one section a file or a folder of runs, every number read from them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from saf.analysis import ANALYSES
from saf.bench.harness.measured import shape
from saf.bench.kinds import compares_arms
from saf.errors import InputError
from saf.records.files import read_json, write_atomically
from saf.records.result import is_result, with_header
from saf.records.run import RecordedRun
from saf.report.analyses import FIGURES, analysis_figure
from saf.report.benchmarks.bars import bars_picture
from saf.report.provenance import origin_of
from saf.report.record_parts import TITLES, body_of
from saf.report.results_summary import natural_order, summary_table
from saf.report.runs.training import training

PICTURES = "images"


@dataclass(frozen=True)
class File:
    """Hold one JSON record."""

    path: Path
    record: Mapping[str, Any]

    @property
    def section(self) -> str:
        """Return its section: the kind of a benchmark, "memory" when it timed nothing, "analysis", "other"."""
        if self.record.get("kind") in ANALYSES:
            return "analysis"
        if compares_arms(self.record) and not self.record["rows"]:
            return "memory"
        return str(self.record.get("kind", "other"))


def write_results(results: Path, out: Path) -> list[Path]:
    """Write the document and its pictures, which lie in `images` beside it; return the paths."""
    if out.suffix != ".md":
        raise InputError(f"tables are written as Markdown; expected --out to end in .md, got {out.name}")
    return [
        write_atomically(out.parent / name, content.encode())
        for name, content in render_results(results, out.parent, name=out.name).items()
    ]


def render_results(results: Path, beside: Path, *, name: str = "results.md") -> dict[str, str]:
    """Return what files in the folder `beside` should hold: the document `name`, and its pictures.

    Raises InputError when `results` is no folder, holds no result, or holds a JSON file that cannot be read.
    """
    trainings, files = find(results)
    if not trainings and not files:
        raise InputError(f"{results} holds no results: no run folder and no JSON record")
    pictures = {}
    sections = {title: [file for file in files if file.section == kind] for kind, title in _sections(files)}
    summary = summary_table(
        trainings, [(file.path.stem, file.record) for chosen in sections.values() for file in chosen]
    )
    parts = [_INTRODUCTION]
    if summary.rows:
        parts += ["## Summary", summary.markdown()]
    if trainings:
        parts.append("## Training")
    for folder, runs in trainings.items():
        parts.append(_folded(folder.relative_to(results).as_posix(), *training(folder, runs, beside)))
    for title, chosen in sections.items():
        parts.append(f"## {title}")
        kind = chosen[0].section
        if kind in ("update", "prefill") and (picture := bars_picture([file.record for file in chosen])):
            pictures[f"{PICTURES}/bench-{kind}.svg"] = picture
            parts.append(f"![Speedup of each arm over ordinary attention]({PICTURES}/bench-{kind}.svg)")
        for file in chosen:
            drawn = _figure(file)
            if drawn:
                pictures[f"{PICTURES}/{file.path.stem}.svg"] = drawn
            parts.append(_file(file, beside, pictured=drawn is not None))
    return {name: "\n\n".join(parts) + "\n", **pictures}


def find(results: Path) -> tuple[dict[Path, list[RecordedRun]], list[File]]:
    """Return the runs by the folder that holds them, and every other JSON record, in order."""
    if not results.is_dir():
        raise InputError(f"{results} is not a folder of results")
    folders = sorted({path.parent for path in results.rglob("config.json")}, key=_by_name)
    trainings: dict[Path, list[RecordedRun]] = {}
    for folder in folders:
        trainings.setdefault(folder.parent, []).append(RecordedRun.open(folder))
    files = []
    for path in sorted(results.rglob("*.json"), key=_by_name):
        if not any(folder in path.parents for folder in folders):
            record = read_json(path)
            files.append(File(path, with_header(record) if is_result(record) else record))
    return trainings, files


def _by_name(path: Path) -> list[tuple[int, Any]]:
    return natural_order(path.as_posix())


def _sections(files: Iterable[File]) -> Iterator[tuple[str, str]]:
    kinds = dict.fromkeys(file.section for file in files)
    for kind, title in TITLES.items():
        if kind in kinds:
            yield kind, title
    for kind in sorted(kinds.keys() - TITLES.keys()):
        yield kind, kind.replace("_", " ").capitalize()


def _file(file: File, beside: Path, *, pictured: bool) -> str:
    """Return what is said about one file."""
    stem, provenance = file.path.stem, file.record.get("provenance") or {}
    rows = [] if file.section == "analysis" else file.record.get("rows") or []
    points = dict.fromkeys(shape(row["point"]) for row in rows if row.get("point"))
    facts = [", ".join(points), f"measured {str(provenance['date'])[:10]}" if provenance.get("date") else ""]
    content = [*origin_of(file.path, beside, provenance), *body_of(file.record)]
    if pictured:
        content.append(f"![{stem}]({PICTURES}/{stem}.svg)")
    return _folded(stem, facts, content)


def _folded(name: str, facts: Iterable[str], content: Iterable[str]) -> str:
    """Return Markdown folded away under its name and a line of facts: a kind's section fits on a screen."""
    summary = escape("; ".join(filter(None, facts)) or "tables")
    return "\n\n".join([f"### {name}", f"<details><summary>{summary}</summary>", *content, "</details>"])


def _figure(file: File) -> str | None:
    """Return the figure of an analysis; None for other records, and kinds without one."""
    return analysis_figure(file.record) if file.section == "analysis" and file.record["kind"] in FIGURES else None


_INTRODUCTION = """# Results

<!-- Rendered: saf report --results results --out docs/results.md. Do not edit; `make check` compares. -->

Every number below is read from a file under `results` and rendered by
`saf report --results results --out docs/results.md`; `make check` fails when this page and the files disagree. The
summary has each main number once, the newest where it was measured twice; under a file's name stand its conditions,
command and all its tables. Words: [glossary](glossary.md); what was tried, losses included: [log](log.md).

A speedup is the baseline's time over the arm's, the median over alternating pairs: above 1 the arm is faster. The free
bound is the speedup if mixing in frozen heads cost nothing, "of the bound" how much of the time saved then is saved. A
point is written context x sequences (x micro-batches of an update).

Beside each time stand the TFLOP/s reached and the floor, which is the roofline bound. Both count the work that this
very model or layer cannot do without; mixing in a frozen head is 2/7 of a live head's, forward and backward.

The paper's numbers stand beside ours where it has some, by the name of the table in its source. Its systems figures are
of GH200, one fused launch a layer, against flash attention; its text does not say whether models were compiled. Ours
name their baseline. So compare signs and trends, not digits."""
