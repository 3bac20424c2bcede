"""The document of all results: the newest of each point, a section a kind, every number read from the files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saf.errors import InputError
from saf.records.table import Cell, Part, Table, markdown_of
from saf.records.text import markdown
from saf.report.benchmarks import KINDS
from saf.report.benchmarks.speed import missing_lines
from saf.report.collection import File, find, newest
from saf.report.provenance import device_and_versions, link, origin_of
from saf.report.record_parts import TITLES, body_of
from saf.report.results_summary import Finding, summary_table
from saf.report.runs.training import training

Analysis = tuple[Callable[[Any], list[Part]], Callable[[Any], str]]
PICTURES = "images"


def render_results(
    results: Path,
    beside: Path,
    *,
    name: str = "results.md",
    more: Mapping[str, Sequence[str]] | None = None,
    findings: Iterable[Finding] = (),
    analyses: Mapping[str, Analysis] = MappingProxyType({}),
) -> dict[str, str]:
    """Return what files in the folder `beside` should hold: the document `name`, and its pictures.

    `more` are sections of Markdown that stand after those of runs, by title; `findings` what the summary has of them.
    `analyses` have, by the kind of a record, the functions that return its parts and its picture.

    Raises InputError when `results` is no folder, holds no result, or holds a JSON file that cannot be read.
    """
    trainings, every = find(results, analyses)
    if not trainings and not every and not more:
        raise InputError(f"{results} holds no results: no run folder and no JSON record")
    files = newest(every)
    pictures: dict[str, str] = {}
    sections = {title: [file for file in files if file.section == kind] for kind, title in _sections(files)}
    summary = summary_table(
        [(link(folder, beside, _name(folder, results)), runs) for folder, runs in trainings.items()],
        [(link(file.path, beside, file.name), file.record) for chosen in sections.values() for file in chosen],
        findings,
    )
    parts = [_INTRODUCTION]
    if summary.rows:
        parts += ["## Summary", str(markdown_of(summary))]
    if trainings:
        parts.append("## Training")
    for folder, runs in trainings.items():
        content, commands = training(folder, runs, beside)
        parts += [f"### {markdown(_name(folder, results))}", *content, _folded("commands", [commands])]
    for title, content in (more or {}).items():
        parts += [f"## {markdown(title)}", *content]
    for title, chosen in sections.items():
        parts += [f"## {markdown(title)}", *_section(chosen, beside, pictures, analyses)]
    return {name: "\n\n".join(parts) + "\n", **pictures}


def _name(folder: Path, results: Path) -> str:
    return folder.relative_to(results).as_posix()


def _sections(files: Iterable[File]) -> Iterator[tuple[str, str]]:
    """Yield the kind and title of every section that has files: known kinds in their order, then others by name."""
    kinds = dict.fromkeys(file.section for file in files)
    for kind, title in TITLES.items():
        if kind in kinds:
            yield kind, title
    for kind in sorted(kinds.keys() - TITLES.keys()):
        yield kind, kind.replace("_", " ").capitalize()


def _section(
    files: Sequence[File], beside: Path, pictures: dict[str, str], analyses: Mapping[str, Analysis]
) -> Iterator[str]:
    """Yield the Markdown of the files of one section, and add its pictures to `pictures`."""
    kind = KINDS.get(str(files[0].record.get("kind")))
    if kind is None:
        for file in files:
            yield from _file(file, beside, pictures, analyses)
        return
    named = [(link(file.path, beside, file.name), file.record) for file in files]
    yield from filter(None, map(markdown_of, kind.overview(named)))
    yield _folded(f"{_count(len(files))}: conditions and commands", _origins(files, beside, kind.conditions))


def _file(file: File, beside: Path, pictures: dict[str, str], analyses: Mapping[str, Analysis]) -> Iterator[str]:
    """Yield the Markdown of one file that has a part of its section to itself, its figure too."""
    yield f"### {markdown(file.name)}"
    yield from origin_of(file.path, beside, file.provenance)
    if not file.is_analysis:
        yield from body_of(file.record)
    else:
        parts, draw = analyses[file.record["kind"]]
        yield from map(markdown_of, parts(file.record))
        drawn = f"{PICTURES}/{file.path.stem}.svg"
        pictures[drawn] = draw(file.record)
        yield Cell(text=file.name, link=drawn, picture=True).markdown()


def _origins(files: Sequence[File], beside: Path, conditions: Callable[[Any], str]) -> Iterator[str]:
    """Yield on which machine, how, and by what commands files were measured, and what they lack."""
    yield from _once(files, lambda file: f"{device_and_versions(file.provenance)}.")
    yield from _once(files, lambda file: conditions(file.record))
    rows = []
    for file in files:
        told = file.provenance
        commit, code = (str(told[key])[:12] if told.get(key) else None for key in ("commit", "source_hash"))
        command = Cell(text=str(told["command"]), code=True) if told.get("command") else None
        rows.append([link(file.path, beside, file.name), str(told.get("date"))[:10], commit, code, command])
    yield Table.of("", ["file", "measured", "commit", "source", "command"], rows).markdown()
    yield from _once(files, lambda file: " ".join(missing_lines(file.record)))


def _once(files: Sequence[File], tell: Callable[[File], str]) -> Iterator[str]:
    """Yield each thing that is told of files, once, with the names of those it is told of where that is not all."""
    told: dict[str, list[str]] = {}
    for file in files:
        told.setdefault(tell(file), []).append(file.name)
    for words, names in told.items():
        if words:
            yield markdown(words if len(names) == len(files) else f"{', '.join(names)}: {words}")


def _folded(title: str, content: Iterable[str]) -> str:
    """Return Markdown folded away under its title."""
    return "\n\n".join([f"<details><summary>{escape(title)}</summary>", *content, "</details>"])


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


_INTRODUCTION = """# Results

<!-- Rendered: python -m experiments results. Do not edit; `make check` compares. -->

Every number below is read from a file under `results` and rendered by `python -m experiments results`; `make check`
fails when this page and the files disagree, and names a file of whose measurements all stand newer in another. Of each
point, arm and baseline the newest measurement is shown; where benchmarks ran on several devices, rows of another than
most say so. Floors, kernels and profiles are in the files. Words: [glossary](glossary.md); what was tried, losses
included: [log](log.md).

A speedup is the baseline's time over the arm's, the median over alternating pairs: above 1 the arm is faster. The free
bound is the speedup if mixing in frozen heads cost nothing, "of the bound" how much of the time saved then is saved. A
point is written context x sequences (x micro-batches of an update). TFLOP/s count the work that this very model or
layer cannot do without; mixing in a frozen head is 2/7 of a live head's, forward and backward.

The paper's numbers stand beside ours where it has some, by the name of the table in its source. Its systems figures are
of GH200, one fused launch a layer, against flash attention; its text does not say whether models were compiled. Ours
name their baseline. So compare signs and trends, not digits."""
