"""Tables of a record whose kind has none of its own: its single values, and its lists of like entries."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saf.records.quantities import MISSING, number
from saf.records.table import Table

_TOLD_ELSEWHERE = ("schema", "kind", "provenance", "settings", "finished", "left_out", "kernels")
_MOST_ROWS = 40


def tables(record: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Yield named tables: one of all single values, one for each list of mappings; long arrays are told by size."""
    singles: list[list[str]] = []
    lists: list[tuple[str, Table]] = []
    for name, value in _flat({key: value for key, value in record.items() if key not in _TOLD_ELSEWHERE}):
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            lists.append((_words(name), _entries(value)))
        elif value not in ([], None):
            singles.append([_words(name), _cell(value)])
    if singles:
        yield "values", Table.of("", ["", "value"], singles).used()
    yield from lists


def _entries(entries: Sequence[Mapping[str, Any]]) -> Table:
    flat = [dict(_flat(entry)) for entry in entries[:_MOST_ROWS]]
    head = list(dict.fromkeys(name for entry in flat for name in entry))
    rows = [[_cell(entry.get(name)) for name in head] for entry in flat]
    if len(entries) > _MOST_ROWS:
        rows.append([f"{len(entries) - _MOST_ROWS} more in the file", *([MISSING] * (len(head) - 1))])
    return Table.of("", [_words(name) for name in head], rows).used()


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        where = f"{path}.{name}" if path else str(name)
        if isinstance(item, Mapping):
            yield from _flat(item, where)
        else:
            yield where, item


def _words(name: str) -> str:
    return name.replace("_", " ").replace(".", ": ")


def _cell(value: Any) -> str:
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
