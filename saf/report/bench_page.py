"""Writing a report about benchmarks: one HTML file with bars of speedup, or tables where no arms were timed."""

from collections.abc import Sequence
from pathlib import Path

from saf.bench.recorder import SCHEMA
from saf.errors import InputError
from saf.files import read_json, write_atomically
from saf.report import bench_words as words
from saf.report.bars_html import memory_panel, speed_panels
from saf.report.measured import Group, Record, groups_of, is_speeds, shape
from saf.report.page import page, section
from saf.report.protocol import protocol
from saf.report.provenance import measured_on, provenance
from saf.report.table_page import render_tables
from saf.report.words import MISSING, table, text

_MOST_KERNELS = 14


def read_records(files: Sequence[Path]) -> list[Record]:
    """Read records of `saf bench`; raise InputError for anything else."""
    records = []
    for file in files:
        record = read_json(file)
        if record.get("schema") != SCHEMA:
            raise InputError(f"{file} is no record of `saf bench`; `saf report --results FOLDER` shows every result")
        records.append(record)
    return records


def write_bench_report(files: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page about benchmark records and return its path: bars when all timed arms, or tables.

    `out` is the .html file, or a folder to put `report.html` in. Raises InputError for files that are no records.
    """
    if not files:
        raise InputError("a report needs at least one file of `saf bench`")
    target = out if out.suffix == ".html" else out / "report.html"
    records = read_records(files)
    made = render if all(map(is_speeds, records)) else render_tables
    return write_atomically(target, made(records, [file.name for file in files]).encode())


def render(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page with bars as text; `names` are those of the files."""
    own = [groups_of(record, file=name * (len(names) > 1)) for record, name in zip(records, names, strict=True)]
    groups = [group for part in own for group in part]
    return page(
        kicker=" · ".join(names),
        headline=words.headline(groups, records),
        dek=words.dek(groups, records),
        warning=words.warning(own, records),
        tiles=words.tiles(groups, records),
        sections=_sections(records, names, own),
        footer=measured_on(records),
        data={},
        scripts=("theme.js",),
    )


def _sections(records: Sequence[Record], names: Sequence[str], own: Sequence[Sequence[Group]]) -> str:
    parts = []
    groups = [group for part in own for group in part]
    if groups:
        told = dict.fromkeys(protocol(record, part) for record, part in zip(records, own, strict=True) if part)
        intro = "".join(f"<p>{text(each)}</p>" for each in told)
        parts.append(section("speed", "How fast each arm is", intro + speed_panels(groups)))
    memory = [record for record in records if record["memory"]]
    if memory:
        panels = "".join(memory_panel(record) for record in memory)
        parts.append(section("memory", "Peak memory", panels))
    kernels = "".join(_kernels(record) for record in records)
    if kernels:
        parts.append(section("kernels", "What ran", kernels))
    parts.append(section("provenance", "Provenance", provenance(records, names)))
    return "\n".join(parts)


def _kernels(record: Record) -> str:
    """Return, for each point, the longest kernels of every arm side by side."""
    points: dict[str, list[Record]] = {}
    for entry in record["kernels"]:
        points.setdefault(", ".join(filter(None, [entry.get("part"), shape(entry["point"])])), []).append(entry)
    parts = []
    for point, entries in points.items():
        times = [{kernel["name"]: kernel["ms"] for kernel in entry["kernels"]} for entry in entries]
        longest = {name: max(each.get(name, 0.0) for each in times) for each in times for name in each}
        names = sorted(longest, key=lambda name: -longest[name])[:_MOST_KERNELS]
        rows = [
            [f"<code>{text(name)}</code>", *(f"{each[name]:.3g}" if name in each else MISSING for each in times)]
            for name in names
        ]
        shown = table(["kernel", *(text(entry["arm"]) for entry in entries)], rows, caption="Milliseconds in one pass")
        parts.append(f'<details class="numbers"><summary>{text(point)}: longest kernels</summary>{shown}</details>')
    return "".join(parts)
