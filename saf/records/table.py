"""One table and its three writers: for a terminal, as Markdown, as HTML.

Every measurement states its table once, beside itself; commands, documents and pages write it in their own way.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import Any

from saf.records.quantities import MISSING

LONGEST_WORD = 20
"""Characters of a word that a terminal's table keeps whole; longer ones, hashes and paths, fold where it is narrow."""
ANY_WIDTH = 10_000
"""Columns of a console wide enough for every table, to ask how wide one would like to be."""
_NOT_NUMBERS = (MISSING, "refused", "plotted")
"""What may stand in a column of numbers without making it one of words."""
_NUMBER = re.compile(r"[+\u2212-]?\d[\d,.e\u2212-]*(×|%| ?[a-zµA-Z]{1,4})?( (to|of|with|±|\(|[+\u2212\d]).*)?")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Hold the text of a cell with its markers, which each writer shows as far as it can."""

    text: str
    strong: bool = False
    """It asks for attention."""
    code: bool = False
    """It is a name or a command: set in a fixed width, and never read as Markdown."""
    aside: str = ""
    """What stands smaller behind it."""
    whole: str = ""
    """What `text` is short for; HTML shows it under the pointer."""
    arm: str = ""
    """The kind of arm it names, `ordinary` or `frozen`; HTML shows it by the arm's colour."""

    @classmethod
    def code_of(cls, value: str) -> "Cell":
        """Return a cell of a name or command; a SHA-256 is shortened to twelve digits."""
        return cls(text=value[:12], code=True, whole=value) if len(value) == 64 else cls(text=value, code=True)

    def __str__(self) -> str:
        return f"{self.text} {self.aside}" if self.aside else self.text


@dataclass(frozen=True, kw_only=True)
class Table:
    """Hold a title, a heading for each column, rows of cells, and notes below; cells without a value are `MISSING`.

    The first column names the row. A table without headings is a list of names and values.
    """

    title: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str | Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
    ) -> "Table":
        """Return a table of any values: None is written as missing, whole numbers with thousands separators."""
        cells = tuple(tuple(map(_cell, row)) for row in rows)
        return cls(title=title, columns=tuple(columns), rows=cells, notes=tuple(notes))

    @classmethod
    def facts(cls, title: str, values: Mapping[str, Any]) -> "Table":
        """Return a table of names and values without headings; names whose value is None are left out."""
        return cls.of(title, (), [[name, value] for name, value in values.items() if value is not None])

    def used(self, *, keep: Sequence[str] = ()) -> "Table":
        """Return the table without the columns that hold nothing; those named in `keep` stay."""
        kept = [
            number
            for number, name in enumerate(self.columns)
            if name in keep or any(row[number] != MISSING for row in self.rows)
        ]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[number] for number in kept), rows=rows)

    def without(self, columns: Sequence[str]) -> "Table":
        """Return the table without the columns named, those of them that it has."""
        kept = [number for number, name in enumerate(self.columns) if name not in columns]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[number] for number in kept), rows=rows)

    def titled(self, title: str) -> "Table":
        """Return the same table under another title."""
        return replace(self, title=title)

    def markdown(self) -> str:
        """Return Markdown: the title in bold, the table, and a list of the notes.

        The first column and columns of words align left, columns of numbers right.
        """
        columns = self.columns or ("",) * (len(self.rows[0]) if self.rows else 2)
        rule = ["---:" if number and self._numeric(number) else "---" for number in range(len(columns))]
        lines = [_markdown_line(row) for row in (columns, rule, *self.rows)]
        parts = [f"**{self.title}**" if self.title else "", "\n".join(lines), "\n".join(f"- {n}" for n in self.notes)]
        return "\n\n".join(filter(None, parts))

    def html(self) -> str:
        """Return an HTML table whose caption is the title, in a box that scrolls, with the notes below; all escaped."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        head = f"<thead><tr>{head}</tr></thead>" if head else ""
        rows = "".join(
            f'<tr><th scope="row">{_html(first)}</th>{"".join(f"<td>{_html(cell)}</td>" for cell in rest)}</tr>'
            for first, *rest in self.rows
        )
        notes = "".join(f'<p class="small">{escape(note)}</p>' for note in self.notes)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title or "Table")}">'
            f"<table>{caption}{head}<tbody>{rows}</tbody></table></div>{notes}"
        )

    def print(self) -> None:
        """Print the table on the terminal; all columns but the first align to the right.

        Where the terminal is too narrow cells break between words, headings to their columns' width; a table of many
        columns is wider than the terminal rather than having its numbers split.
        """
        from rich.console import Console

        console = Console(highlight=False)
        table = self.__rich__()
        wished = table.__rich_measure__(console, console.options.update(width=ANY_WIDTH)).maximum
        if wished > console.width:
            for column in table.columns:
                if column.no_wrap and column.min_width:
                    column.header = "\n".join(wrap(str(column.header), column.min_width, break_long_words=False))
            console.width = max(console.width, sum((column.min_width or 1) + 3 for column in table.columns) + 1)
        console.print(table, crop=False)

    def __rich__(self) -> Any:
        from rich.markup import escape as plain
        from rich.table import Table as RichTable

        table = RichTable(
            title=plain(self.title),
            title_justify="left",
            title_style="bold",
            caption=plain("\n".join(self.notes)) or None,
            caption_justify="left",
            show_header=bool(self.columns),
        )
        if not self.columns:
            table.add_column(style="dim")
            table.add_column(overflow="fold")
        for number, name in enumerate(self.columns):
            cells = [str(row[number]) for row in self.rows]
            longest = max(map(len, " ".join([name, *cells]).split()), default=1)
            table.add_column(
                plain(name),
                justify="right" if number else "left",
                overflow="fold",
                min_width=min(longest, LONGEST_WORD),
                no_wrap=longest <= LONGEST_WORD and not any(" " in cell for cell in cells),
            )
        for row in self.rows:
            table.add_row(*(_terminal(cell) for cell in row))
        return table

    def _numeric(self, number: int) -> bool:
        texts = [str(row[number]) for row in self.rows]
        return all(text in _NOT_NUMBERS or _NUMBER.fullmatch(text) for text in texts)


def _cell(value: Any) -> str | Cell:
    if isinstance(value, Cell):
        return value
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _terminal(cell: str | Cell) -> str:
    from rich.markup import escape as plain

    shown = plain(str(cell))
    return f"[bold]{shown}[/bold]" if isinstance(cell, Cell) and cell.strong else shown


def _markdown_line(cells: Sequence[str | Cell]) -> str:
    return "| " + " | ".join(_markdown(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _markdown(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return cell
    shown = f"`{cell.text.replace('`', chr(39))}`" if cell.code else cell.text
    return " ".join(filter(None, [f"**{shown}**" if cell.strong else shown, cell.aside]))


def _html(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    shown = escape(cell.text)
    if cell.code:
        whole = f' title="{escape(cell.whole)}"' if cell.whole else ""
        shown = f"<code{whole}>{shown}</code>"
    if cell.strong:
        shown = f"<strong>{shown}</strong>"
    if cell.arm:
        shown = f'<span class="arm {escape(cell.arm)}">{shown}</span>'
    return f"{shown} <small>{escape(cell.aside)}</small>" if cell.aside else shown


Part = str | Table
"""What a document is made of: a paragraph or list of notes as Markdown, or a table."""
