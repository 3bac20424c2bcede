"""How commands show results: a table for people, or JSON alone for machines."""

import json
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.table import Table

from saf.records.files import to_json

LONGEST_WORD = 20
"""Characters of a word that tables keep whole; longer ones, hashes and paths, are folded where space is short."""

ANY_WIDTH = 10_000


def show(result: Mapping[str, Any], *tables: Table | str, as_json: bool) -> None:
    """Print `result` as JSON and nothing else, or the tables and lines for people."""
    if as_json:
        print(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    for table in tables:
        console = Console(highlight=False)
        if isinstance(table, str):
            console.print(table, markup=False, soft_wrap=True)
        else:
            _fit_(table, console)
            console.print(table, crop=False)


def _fit_(table: Table, console: Console) -> None:
    """Break headings over columns of single words, and widen the console, where a table of `columns` is too wide."""
    if table.__rich_measure__(console, console.options.update(width=ANY_WIDTH)).maximum <= console.width:
        return
    for column in table.columns:
        if column.no_wrap and column.min_width:
            column.header = "\n".join(wrap(str(column.header), column.min_width, break_long_words=False))
    console.width = max(console.width, sum((column.min_width or 1) + 3 for column in table.columns) + 1)


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """Return a table of names and values; rows without a value are left out."""
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, _cell(value))
    return table


def columns(title: str, head: list[str], rows: list[list[Any]]) -> Table:
    """Return a table with a heading for each column; all but the first align to the right.

    Where the terminal is too narrow cells break between words, headings to their columns' width; a table of many
    columns is wider than the terminal rather than having its numbers split.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    cells = [list(map(_cell, row)) for row in rows]
    for number, name in enumerate(head):
        column = [row[number] for row in cells]
        whole = max(map(len, " ".join([name, *column]).split()), default=1)
        table.add_column(
            name,
            justify="right" if number else "left",
            overflow="fold",
            min_width=min(whole, LONGEST_WORD),
            no_wrap=whole <= LONGEST_WORD and not any(" " in cell for cell in column),
        )
    for row in cells:
        table.add_row(*row)
    return table


def machine(provenance: Mapping[str, Any]) -> str:
    """Return the line of a benchmark's record that says where it was made."""
    versions = provenance["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if versions.get(name)]
    driver = [f"driver {provenance['driver']}"] if provenance["driver"] else []
    return ", ".join([provenance["device"], *named, *driver])


def _cell(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))
