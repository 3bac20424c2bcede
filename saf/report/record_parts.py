"""What documents and pages say about one record, whatever its kind: paragraphs, tables, notes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saf.records.quantities import MISSING, number
from saf.records.table import Part, Table, markdown_of
from saf.report.benchmarks import KINDS
from saf.report.benchmarks.speed import SPEED_KINDS, unmeasured

UPDATE = SPEED_KINDS["update"]
TITLES = {
    UPDATE.name: UPDATE.title,
    f"{UPDATE.name} memory": UPDATE.memory_title,
    "trainer": "In a Trainer of transformers",
    **{
        section: title
        for name, kind in KINDS.items()
        if name != UPDATE.name
        for section, title in ((name, kind.title), (f"{name} memory", f"{kind.title}: peak memory"))
    },
    "analysis": "Analyses",
}
"""Of the sections of records, in their order: a kind each, and what it measured of memory alone."""
_SAID_ELSEWHERE = ("schema", "kind", "provenance", "settings", "finished", "left_out", "kernels")
"""Entries that the rest of a document says."""
_MOST_ROWS = 40
"""Of one list of entries: a screenful."""


def body_of(record: Mapping[str, Any]) -> list[str]:
    """Return Markdown paragraphs: how it was measured, tables, what to know about them."""
    return [markdown_of(part) for part in parts_of(record)]


def parts_of(record: Mapping[str, Any]) -> list[Part]:
    """Return the paragraphs, each table as such."""
    name = str(record.get("kind"))
    if name in KINDS:
        return KINDS[name].tables(record)
    return [*plain_tables(record), *unmeasured(record)]


def plain_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a record whose kind has none of its own: all single values, and each list of like entries.

    Long arrays are named by their size.
    """
    singles: list[list[str]] = []
    lists: list[Table] = []
    for name, value in _flat({key: value for key, value in record.items() if key not in _SAID_ELSEWHERE}):
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            lists.append(_entries(_spaced(name), value))
        elif value not in ([], None):
            singles.append([_spaced(name), _cell(value)])
    if singles:
        yield Table.of("values", ["", "value"], singles).used()
    yield from lists


def _entries(title: str, entries: Sequence[Mapping[str, Any]]) -> Table:
    """Return a list of objects as a table, a row an object, cut at the most rows that a page shows."""
    flat = [dict(_flat(entry)) for entry in entries[:_MOST_ROWS]]
    head = list(dict.fromkeys(name for entry in flat for name in entry))
    rows = [[_cell(entry.get(name)) for name in head] for entry in flat]
    if len(entries) > _MOST_ROWS:
        rows.append([f"{len(entries) - _MOST_ROWS} more in the file", *([MISSING] * (len(head) - 1))])
    return Table.of(title, [_spaced(name) for name in head], rows).used()


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested objects with its path, such as `("time.seconds", 3.0)`."""
    for name, item in value.items():
        where = f"{path}.{name}" if path else str(name)
        if isinstance(item, Mapping):
            yield from _flat(item, where)
        else:
            yield where, item


def _spaced(name: str) -> str:
    return name.replace("_", " ").replace(".", ": ")


def _cell(value: Any) -> str:
    """Return a value of a record as text; a long list is told by its number of values."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list):
        if len(value) <= 4 and all(isinstance(item, int | float | str) for item in value):
            return ", ".join(map(_cell, value))
        return f"{len(value)} values"
    return str(value)
