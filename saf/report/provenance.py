"""Where a result comes from, in words: device, versions, source, command; as Markdown, and as a section of a page."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saf.records.provenance import clock_words
from saf.records.quantities import MISSING, gibibytes, seconds
from saf.records.table import Cell, Table
from saf.records.text import markdown, markdown_block
from saf.report.page import text

Record = Mapping[str, Any]
NAMES = {"cuda": "CUDA", "cudnn": "cuDNN", "python": "Python"}
_SHOWN = ("saf", "python", "torch", "triton", "cuda", "cudnn")


def device_and_versions(provenance: Mapping[str, Any] | None) -> str:
    """Return "NVIDIA H200, torch 2.11.0, ..."; "not recorded" for a file that does not tell."""
    if not provenance or not (provenance.get("device") or provenance.get("versions")):
        return "device and versions not recorded"
    versions = provenance.get("versions") or {}
    parts = [f"{NAMES.get(name, name)} {version(name, versions[name])}" for name in _SHOWN if versions.get(name)]
    if provenance.get("driver"):
        parts.append(f"driver {provenance['driver']}")
    return ", ".join([str(provenance.get("device") or "device not recorded"), *parts])


def source(provenance: Mapping[str, Any]) -> str:
    """Return commit and hash of the code that measured, and the day."""
    commit, code, date = (provenance.get(key) for key in ("commit", "source_hash", "date"))
    parts = [f"commit {commit[:12]}" if commit else "no commit recorded"]
    if code:
        parts.append(f"source {code[:12]}")
    if date:
        parts.append(f"measured {date[:10]}")
    return ", ".join(parts)


def version(name: str, number: str) -> str:
    """Return a version in its usual form: cuDNN tells 91900 for 9.19.0."""
    if name == "cudnn" and number.isdigit() and int(number) >= 90000:
        return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"
    return number


def origin_of(file: Path, beside: Path, provenance: Mapping[str, Any] | None) -> list[str]:
    """Return Markdown: the file, its device and versions, its code, and its command as a block.

    `beside` is the folder of the document that links to `file`.
    """
    words = [device_and_versions(provenance)]
    if provenance:
        words += [*filter(None, [clock_words(provenance)]), source(provenance)]
    lines = [f"{link(file, beside).markdown()}: {markdown('; '.join(words))}."]
    command = (provenance or {}).get("command")
    return [*lines, markdown_block(str(command)) if command else "Command not recorded."]


def link(file: Path, beside: Path, name: str | None = None) -> Cell:
    """Return a link from a document in the folder `beside`, named by the path if not otherwise."""
    target = Path(os.path.relpath(file, beside)).as_posix()
    return Cell(text=name or target.removeprefix("../"), link=target)


def provenance_section(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return device, versions, source and command of every file, and its settings to open."""
    facts = _columns([_facts(record) for record in records], names, "Where these numbers come from")
    settings = _columns([record["settings"] for record in records], names, "What the benchmarks were asked for")
    return f'{facts}<details class="numbers"><summary>All settings</summary>{settings}</details>'


def measured_on(records: Sequence[Record]) -> str:
    """Return a sentence with the latest date of measuring; nothing when none is recorded."""
    latest = max(str(record["provenance"].get("date") or "") for record in records)
    return f"Measured {text(latest)}. " if latest else ""


def _columns(columns: Sequence[Mapping[str, Any]], names: Sequence[str], caption: str) -> str:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key.replace("_", " "), *(_cell(column.get(key)) for column in columns)] for key in keys]
    return Table.of(caption, ["", *names], rows).html()


def _facts(record: Record) -> dict[str, Any]:
    """Return where a record comes from, flat and by readable names, ready to be a table."""
    provenance = dict(record["provenance"])
    checkpoints, data = provenance.pop("checkpoints"), provenance.pop("data")
    versions, peak = provenance.pop("versions", None) or {}, provenance.pop("peak", None) or {}
    named = {f"{NAMES.get(key, key)} version": value and version(key, value) for key, value in versions.items()}
    if size := provenance.pop("memory_bytes", None):
        provenance["device memory"] = gibibytes(size)
    if clocks := clock_words(provenance):
        provenance["clocks"] = clocks
    named |= {f"checkpoint, {role}": value for role, value in checkpoints.items()}
    named |= {f"data, {role}": value for role, value in data.items()}
    return {**provenance, **named, "peak rates": peak.get("source"), "took": seconds(record["seconds"])}


def _cell(value: Any) -> str | Cell:
    """Return a value of the provenance as a cell: strings as code, lists joined, a dash for nothing."""
    if value is None or value == []:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return Cell.code_of(value) if isinstance(value, str) else str(value)
