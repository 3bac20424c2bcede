"""How commands show results: a table for people, or JSON alone for machines."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from saf.files import to_json


def show(result: Mapping[str, Any], *tables: Table | str, as_json: bool) -> None:
    """Print `result` as JSON and nothing else, or the tables and lines for people."""
    if as_json:
        print(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    for table in tables:
        if isinstance(table, str):
            console.print(table, markup=False, soft_wrap=True)
        else:
            console.print(table)


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
    """Return a table with a heading for each column; all but the first align to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def megabytes(size: int) -> str:
    """Return a file size in MB."""
    return f"{size / 1e6:,.1f} MB"


def machine(environment: Mapping[str, Any]) -> str:
    """Return the line of a benchmark's record that says where it was made."""
    versions = environment["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if versions.get(name)]
    driver = [f"driver {environment['driver']}"] if environment["driver"] else []
    return ", ".join([environment["device"], *named, *driver])


def _cell(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))
