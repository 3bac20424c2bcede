"""Writing a report about benchmarks: one HTML file with bars of speedup against every baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.files import read_json, write_atomically
from saf.report import bench_words as words
from saf.report.bars_html import memory_panel, speed_panels
from saf.report.measured import Group, Record, groups_of, is_speeds, shape
from saf.report.origin import NAMES, version
from saf.report.page import page, section
from saf.report.speeds import protocol
from saf.report.words import MISSING, gibibytes, seconds, table, text

_MOST_KERNELS = 14


def read_records(files: Sequence[Path]) -> list[Record]:
    """Read records of `saf bench update`, `prefill` or `op`; raise InputError for anything else."""
    records = []
    for file in files:
        record = read_json(file)
        if not is_speeds(record):
            raise InputError(
                f"{file} is no record of `saf bench update`, `prefill` or `op`; see `saf report --results`"
            )
        records.append(record)
    return records


def write_bench_report(files: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page about benchmark records and return its path.

    `out` is the .html file, or a folder to put `report.html` in. Raises InputError for files that are no records.
    """
    if not files:
        raise InputError("a report needs at least one file of `saf bench`")
    target = out if out.suffix == ".html" else out / "report.html"
    return write_atomically(target, render(read_records(files), [file.name for file in files]).encode())


def render(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page as text; `names` are those of the files."""
    own = [groups_of(record, file=name * (len(names) > 1)) for record, name in zip(records, names, strict=True)]
    groups = [group for part in own for group in part]
    dates = [str(record["environment"].get("date") or "") for record in records]
    return page(
        kicker=" · ".join(names),
        headline=words.headline(groups, records),
        dek=words.dek(groups, records),
        warning=words.warning(own, records),
        tiles=words.tiles(groups, records),
        sections=_sections(records, names, own),
        footer=f"Measured {text(max(dates))}. " if max(dates) else "",
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
    parts.append(section("provenance", "Provenance", _provenance(records, names)))
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


def _provenance(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return device, versions, source and command of every file, and its settings to open."""
    told = _columns([_facts(record) for record in records], names, "Where these numbers come from")
    settings = _columns([record["settings"] for record in records], names, "What the benchmarks were asked for")
    return f'{told}<details class="numbers"><summary>All settings</summary>{settings}</details>'


def _columns(columns: Sequence[Mapping[str, Any]], names: Sequence[str], caption: str) -> str:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[text(key.replace("_", " ")), *(_cell(column.get(key)) for column in columns)] for key in keys]
    return table(["", *(text(name) for name in names)], rows, caption=caption)


def _facts(record: Record) -> dict[str, Any]:
    environment = dict(record["environment"])
    versions, peak = environment.pop("versions", None) or {}, environment.pop("peak", None) or {}
    told = {f"{NAMES.get(key, key)} version": value and version(key, value) for key, value in versions.items()}
    if size := environment.pop("memory_bytes", None):
        environment["device memory"] = gibibytes(size)
    return {**environment, **told, "peak rates": peak.get("source"), "took": seconds(record["seconds"])}


def _cell(value: Any) -> str:
    if value is None or value == []:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return text(", ".join(map(str, value)))
    if isinstance(value, str) and len(value) == 64:
        return f'<code title="{text(value)}">{text(value[:12])}</code>'
    return f"<code>{text(value)}</code>" if isinstance(value, str) else text(value)
