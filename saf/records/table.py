"""Parts of what is shown, with three writers each: for a terminal, as Markdown, as HTML.

Every measurement states its paragraphs, tables and notes once, beside itself; commands, documents and pages write them
in their own way. All of it is text: nothing in a cell, a title or a note is read as markup of any writer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any
from urllib.parse import quote

from saf.records.quantities import MISSING
from saf.records.text import html, markdown, markdown_code, plain

LONGEST_WORD = 24
"""Characters of a word that a terminal's table keeps whole; longer ones, hashes and paths, fold where it is narrow."""
ANY_WIDTH = 10_000
"""Columns of a console wide enough for every table, to ask how wide one would like to be."""
_NOT_NUMBERS = (MISSING, "refused", "plotted", "not run")
"""What may stand in a column of numbers without making it one of words."""
_NUMBER = re.compile(r"[+\u2212-]?\d[\d,.e\u2212-]*(×|%| ?[a-zµA-Z]{1,4})?( (to|of|with|±|\(|[+\u2212\d]).*)?")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Hold the text of a cell with its markers, which each writer shows as far as it can."""

    text: str
    strong: bool = False
    """It asks for attention."""
    code: bool = False
    """It is a name or a command: set in a fixed width."""
    aside: str = ""
    """What stands smaller behind it."""
    whole: str = ""
    """What `text` is short for; HTML shows it under the pointer."""
    arm: str = ""
    """The colour of the arm that it names, such as `ordinary` or `frozen-2`; HTML shows it, as the figures do."""
    link: str = ""
    """Where the file that it names lies, seen from the document; a terminal leaves it out."""
    picture: bool = False
    """The file is a picture, to be shown in a document."""

    @classmethod
    def code_of(cls, value: str) -> "Cell":
        """Return a cell of a name or command; a SHA-256 is shortened to twelve digits."""
        return cls(text=value[:12], code=True, whole=value) if len(value) == 64 else cls(text=value, code=True)

    def __str__(self) -> str:
        return f"{self.text} {self.aside}" if self.aside else self.text

    def markdown(self) -> str:
        """Return Markdown, within a table too."""
        shown = markdown_code(self.text) if self.code else markdown(self.text)
        shown = f"{'!' * self.picture}[{shown}]({self._address})" if self.link else shown
        return " ".join(filter(None, [f"**{shown}**" if self.strong else shown, markdown(self.aside)]))

    def html(self) -> str:
        """Return HTML."""
        shown = html(self.text)
        if self.code:
            whole = f' title="{html(self.whole)}"' if self.whole else ""
            shown = f"<code{whole}>{shown}</code>"
        if self.link:
            shown = f'<a href="{self._address}">{shown}</a>'
        if self.strong:
            shown = f"<strong>{shown}</strong>"
        if self.arm:
            shown = f'<span class="arm" style="--c:var(--{html(self.arm)})">{shown}</span>'
        return f"{shown} <small>{html(self.aside)}</small>" if self.aside else shown

    @property
    def _address(self) -> str:
        return quote(self.link, errors="surrogateescape")


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
    def facts(cls, title: str, values: Mapping[str, Any], notes: Sequence[str] = ()) -> "Table":
        """Return a table of names and values without headings; names whose value is None are left out."""
        return cls.of(title, (), [[name, value] for name, value in values.items() if value is not None], notes)

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

    @classmethod
    def stacked(cls, title: str, tables: Sequence[tuple["str | Cell", "Table"]]) -> "Table":
        """Return the rows of several tables below one another, a last column "in" naming where each comes from."""
        columns = tuple(dict.fromkeys(name for _, table in tables for name in table.columns))
        rows = []
        for name, table in tables:
            for row in table.rows:
                cells = dict(zip(table.columns, row, strict=True))
                rows.append((*(cells.get(column, MISSING) for column in columns), name))
        notes = tuple(dict.fromkeys(note for _, table in tables for note in table.notes))
        return cls(title=title, columns=(*columns, "in"), rows=tuple(rows), notes=notes)

    def titled(self, title: str) -> "Table":
        """Return the same table under another title."""
        return replace(self, title=title)

    def markdown(self) -> str:
        """Return Markdown: the title in bold, the table, and a list of the notes.

        The first column and columns of words align left, columns of numbers right.
        """
        columns = self.columns or ("",) * (len(self.rows[0]) if self.rows else 2)
        rule = ["---:" if number and self._numeric(number) else "---" for number in range(len(columns))]
        lines = [_markdown_line(map(_markdown, row)) for row in (columns, *self.rows)]
        lines.insert(1, _markdown_line(rule))
        title = f"**{markdown(self.title)}**" if self.title else ""
        return "\n\n".join(filter(None, [title, "\n".join(lines), Notes(self.notes).markdown()]))

    def html(self) -> str:
        """Return an HTML table whose caption is the title, in a box that scrolls, with the notes below."""
        head = "".join(f'<th scope="col">{html(name)}</th>' for name in self.columns)
        head = f"<thead><tr>{head}</tr></thead>" if head else ""
        opened = ['<td class="number">' if self._numeric(place) else "<td>" for place in range(1, len(self.columns))]
        opened = opened or ["<td>"] * (len(self.rows[0]) - 1 if self.rows else 0)
        rows = "".join(
            f'<tr><th scope="row">{_html(first)}</th>'
            f"{''.join(f'{td}{_html(cell)}</td>' for td, cell in zip(opened, rest, strict=True))}</tr>"
            for first, *rest in self.rows
        )
        notes = "".join(f'<p class="small">{html(note)}</p>' for note in self.notes)
        caption = f"<caption>{html(self.title)}</caption>" if self.title else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{html(self.title or "Table")}">'
            f"<table>{caption}{head}<tbody>{rows}</tbody></table></div>{notes}"
        )

    def print(self) -> None:
        """Print the table on the terminal; columns of numbers align to the right.

        Where the terminal is too narrow cells break between words, headings to their columns' width; a table of many
        columns is wider than the terminal rather than having its numbers split.
        """
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        # A title and notes of a narrow table would be as narrow.
        table, width = replace(self, title="", notes=()).__rich__(), console.width
        wished = table.__rich_measure__(console, console.options.update(width=ANY_WIDTH)).maximum
        if wished > console.width:
            for column in table.columns:
                if column.no_wrap and column.min_width:
                    column.header = Text("\n".join(wrap(str(column.header), column.min_width, break_long_words=False)))
            console.width = max(console.width, sum((column.min_width or 1) + 3 for column in table.columns) + 1)
        if self.title:
            console.print(Text(plain(self.title), style="bold"), width=width)
        if self.rows or not self.columns:
            console.print(table, crop=False)
        for note in self.notes:
            console.print(Text(plain(note), style="dim italic"), width=width)

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(plain(self.title)) if self.title else None,
            title_justify="left",
            title_style="bold",
            caption=Text("\n".join(map(plain, self.notes))) if self.notes else None,
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
                Text(plain(name)),
                justify="right" if number and self._numeric(number) else "left",
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
    """Return a value as a cell: a dash for None, thousands set apart in whole numbers."""
    if isinstance(value, Cell):
        return value
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _terminal(cell: str | Cell) -> Any:
    from rich.text import Text

    return Text(plain(str(cell)), style="bold" if isinstance(cell, Cell) and cell.strong else "")


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(cell: str | Cell) -> str:
    return markdown(cell) if isinstance(cell, str) else cell.markdown()


def _html(cell: str | Cell) -> str:
    return html(cell) if isinstance(cell, str) else cell.html()


@dataclass(frozen=True)
class Notes:
    """Hold what to read numbers by, a line each."""

    lines: Sequence[str]

    def markdown(self) -> str:
        """Return a list of Markdown."""
        return "\n".join(f"- {markdown(line)}" for line in self.lines)

    def html(self) -> str:
        """Return a list of HTML."""
        return f"<ul>{''.join(f'<li>{html(line)}</li>' for line in self.lines)}</ul>"

    def print(self) -> None:
        """Print a list on the terminal."""
        print("\n".join(f"- {plain(line)}" for line in self.lines))


Part = str | Notes | Table
"""What a document is made of; a string is a paragraph."""


def markdown_of(part: Part) -> str:
    """Return a part as Markdown."""
    return markdown(part) if isinstance(part, str) else part.markdown()


def html_of(part: Part) -> str:
    """Return a part as HTML."""
    return f"<p>{html(part)}</p>" if isinstance(part, str) else part.html()
