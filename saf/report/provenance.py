"""The part of a page that tells where benchmark records come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from saf.records.quantities import MISSING, gibibytes, seconds
from saf.records.table import Cell, Table
from saf.report.measured import Record
from saf.report.origin import NAMES, version
from saf.report.page import text


def provenance_section(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return device, versions, source and command of every file, and its settings to open."""
    told = _columns([_facts(record) for record in records], names, "Where these numbers come from")
    settings = _columns([record["settings"] for record in records], names, "What the benchmarks were asked for")
    return f'{told}<details class="numbers"><summary>All settings</summary>{settings}</details>'


def measured_on(records: Sequence[Record]) -> str:
    """Return a sentence with the latest date of measuring; nothing when none is recorded."""
    latest = max(str(record["provenance"].get("date") or "") for record in records)
    return f"Measured {text(latest)}. " if latest else ""


def _columns(columns: Sequence[Mapping[str, Any]], names: Sequence[str], caption: str) -> str:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key.replace("_", " "), *(_cell(column.get(key)) for column in columns)] for key in keys]
    return Table.of(caption, ["", *names], rows).html()


def _facts(record: Record) -> dict[str, Any]:
    provenance = dict(record["provenance"])
    checkpoints, data = provenance.pop("checkpoints"), provenance.pop("data")
    versions, peak = provenance.pop("versions", None) or {}, provenance.pop("peak", None) or {}
    told = {f"{NAMES.get(key, key)} version": value and version(key, value) for key, value in versions.items()}
    if size := provenance.pop("memory_bytes", None):
        provenance["device memory"] = gibibytes(size)
    told |= {f"checkpoint, {role}": value for role, value in checkpoints.items()}
    told |= {f"data, {role}": value for role, value in data.items()}
    return {**provenance, **told, "peak rates": peak.get("source"), "took": seconds(record["seconds"])}


def _cell(value: Any) -> str | Cell:
    if value is None or value == []:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return Cell.code_of(value) if isinstance(value, str) else str(value)
