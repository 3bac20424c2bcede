"""Numbers, names and `Table` in the form that people read, on a terminal or as Markdown. Every command prints by it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

# --- quantities; a dash for a missing one

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number at `digits` significant digits, with thousands separators."""
    if value is None:
        return MISSING
    if value == int(value) and abs(value) < 1e15:  # larger ones have digits that nothing measured
        return f"{int(value):,}"
    shown = f"{value:.{digits}g}"
    if "e" not in shown:
        shown = f"{float(shown):,}".removesuffix(".0")
    return shown.replace("-", "\u2212")


def signed(value: float | None, decimals: int = 2, unit: str = "%") -> str:
    """Return a change with its sign, "+0.21%"; the minus is the typographic one."""
    if value is None:
        return MISSING
    shown = f"{abs(value):.{decimals}f}"
    sign = "+" if value > 0 else "\u2212"
    if float(shown) == 0:
        sign = ""  # rounded to zero it is neither
    return f"{sign}{shown}{unit}"


def percent(share: float | str) -> str:
    """Return a share in percent, "25%"; JSON's keys have it as text."""
    return f"{100 * float(share):g}%"


def correlation(value: float | None) -> str:
    """Return a correlation at three decimals."""
    return MISSING if value is None else f"{value:.3f}".replace("-", "\u2212")


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it, from seconds."""
    if value is None:
        return MISSING
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs" if value > 0 else "0 s"
    if value < 1:
        return f"{value * 1e3:.4g} ms"
    if value < 120:  # "90 s" rather than "1.5 min"; minutes go up to two hours likewise
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def byte_size(value: float | None) -> str:
    """Return a size in GiB, MiB, KiB or bytes, from bytes.

    >>> byte_size(4_830_000_000), byte_size(45_000_000), byte_size(65_536), byte_size(512)
    ('4.50 GiB', '43 MiB', '64 KiB', '512 bytes')
    """
    if value is None:
        return MISSING
    if value >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.{0 if value >= 10 * unit else 2}f} {name}"
    return f"{value:.0f} bytes"


def change_percent(before: float | None, after: float | None) -> float | None:
    """Return 100 (after / before - 1), None when one is missing."""
    return None if not before or after is None else 100.0 * (after / before - 1.0)


# --- text from outside, such as names of folders, without markup or control codes

_MARKS = re.compile(r"([\\`*\[\]<>|~$])|(?<![^\W_])(_)|(_)(?![^\W_])|(&)(?=#?\w+;)")
"""Characters that Markdown reads as markup, but for underscores within words and lone ampersands."""
_BEGINNING = re.compile(r"(\d*)([#+\-=>:.)])(?=\s|$|[#=\-])")
"""The beginning of a heading, a list, a rule or a quotation at the start of a line."""


def plain(text: str) -> str:
    """Return the text on one line; control codes and characters that no terminal shows become U+FFFD."""

    def shown(character: str) -> str:
        if character.isprintable():
            return character
        return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"

    return "".join(map(shown, text))


def escape_markdown(text: str) -> str:
    """Return Markdown that reads as the text."""
    marked = _MARKS.sub(lambda match: f"\\{match[0]}", plain(text))
    return _BEGINNING.sub(r"\1\\\2", marked, count=1) if _BEGINNING.match(marked) else marked


def natural_order(name: str) -> list[tuple[int, Any]]:
    """Return a sort key that orders names with numbers as people do: update-8k before update-16k."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts]


# --- tables

LONGEST_WORD = 24
"""Characters of a word that is never split; longer ones, hashes and paths, fold where the terminal is narrow."""
LONGEST_NUMBER = 40
"""Characters of a number with its interval that are never split."""
BETWEEN = 3
"""Characters between columns: a bar and two spaces."""
ANY_WIDTH = 10_000
"""Columns of a console wide enough for every table."""
_NOT_NUMBERS = (MISSING, "refused", "plotted", "not run")
"""Words that a column of numbers may contain."""
_NUMBER = re.compile(r"[+\u2212-]?\d[\d,.e\u2212-]*(×|%| ?[a-zµA-Z]{1,4})?( (to|of|with|±|\(|[+\u2212\d]).*)?")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, column headings, rows of text and notes below; the first column names the row.

    A table without headings is a list of names and values. Nothing in it is read as markup.
    """

    title: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], notes: Iterable[str] = ()
    ) -> "Table":
        """Return a table of any values: None becomes a dash, whole numbers get thousands separators."""
        return cls(
            title=title,
            columns=tuple(columns),
            rows=tuple(tuple(map(_text, row)) for row in rows),
            notes=tuple(notes),
        )

    @classmethod
    def facts(cls, title: str, values: Mapping[str, Any], notes: Sequence[str] = ()) -> "Table":
        """Return a table of names and values without headings; names whose value is None are left out."""
        return cls.of(title, (), [[name, value] for name, value in values.items() if value is not None], notes)

    def used(self) -> "Table":
        """Return the table without empty columns."""
        used = [number for number in range(len(self.columns)) if any(row[number] != MISSING for row in self.rows)]
        rows = tuple(tuple(row[number] for number in used) for row in self.rows)
        return replace(self, columns=tuple(self.columns[number] for number in used), rows=rows)

    def is_numeric(self, number: int) -> bool:
        """Return whether a column holds numbers, which align to the right."""
        return all(row[number] in _NOT_NUMBERS or _NUMBER.fullmatch(row[number]) for row in self.rows)

    def markdown(self) -> str:
        """Return Markdown: the title in bold, the table, and a list of the notes."""
        columns = self.columns or ("",) * (len(self.rows[0]) if self.rows else 2)
        rule = ["---:" if number and self.is_numeric(number) else "---" for number in range(len(columns))]
        lines = [f"| {' | '.join(map(escape_markdown, row))} |" for row in (columns, *self.rows)]
        lines.insert(1, f"| {' | '.join(rule)} |")
        title = f"**{escape_markdown(self.title)}**" if self.title else ""
        notes = "\n".join(f"- {escape_markdown(note)}" for note in self.notes)
        return "\n\n".join(filter(None, [title, "\n".join(lines), notes]))

    def print(self, console: Any = None) -> None:
        """Print the table on the terminal, or on another console of rich.

        Where the terminal is too narrow, texts and headings break between words; numbers and their intervals do not.
        Columns that do not fit even so follow in further tables with the names of the rows.
        """
        from rich.console import Console
        from rich.text import Text

        console = console or Console(highlight=False)
        width = console.width
        if self.title:
            console.print(Text(plain(self.title), style="bold"))
        for part in self._parts(width) if self.rows else ():
            # A column alone may be wider than the terminal, rather than having its numbers split.
            console.width = max(width, sum(part._widths()) + 1)
            console.print(part._rich(console), crop=False)
            console.width = width
        for note in self.notes:
            console.print(Text(plain(note), style="dim italic"))

    def _parts(self, width: int) -> Iterator["Table"]:
        """Yield the table, or where it cannot be that narrow tables of some columns each, with the rows' names."""
        names, *others = self._widths() or [0]
        if names + sum(others) < width or not others:
            yield self
            return
        names = max(names, min(max(len(row[0]) for row in self.rows), width // 2) + BETWEEN)
        groups, room = [], 0
        for number, needed in enumerate(others, start=1):
            if needed > room:
                groups.append([0])
                room = width - names - 1
            groups[-1].append(number)
            room -= needed
        for group in groups:
            rows = [tuple(row[number] for number in group) for row in self.rows]
            filled = tuple(row for row in rows if any(cell != MISSING for cell in row[1:]))
            yield Table(columns=tuple(self.columns[number] for number in group), rows=filled)

    def _widths(self) -> list[int]:
        return [self._least(number) + BETWEEN for number in range(len(self.columns))]

    def _least(self, number: int) -> int:
        """Return the least width of a column: of its longest word, or of its longest cell where they do not break."""
        cells = [row[number] for row in self.rows]
        if not self._is_whole(number):
            cells = " ".join(cells).split()
        longest = max(map(len, [*cells, *self.columns[number].split()]), default=1)
        return longest if self._is_whole(number) else min(longest, LONGEST_WORD)

    def _is_whole(self, number: int) -> bool:
        """Return whether cells of a column never break: those of numbers with their intervals, and single words."""
        cells = [row[number] for row in self.rows]
        if number and self.is_numeric(number):
            return max(map(len, cells), default=0) <= LONGEST_NUMBER
        return not any(" " in cell or len(cell) > LONGEST_WORD for cell in cells)

    def _rich(self, console: Any) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(show_header=bool(self.columns))
        if not self.columns:
            table.add_column(style="dim")
            table.add_column(overflow="fold")
        for number, name in enumerate(self.columns):
            table.add_column(
                Text(plain(name)),
                justify="right" if number and self.is_numeric(number) else "left",
                overflow="fold",
                min_width=self._least(number),
                no_wrap=self._is_whole(number),
            )
        for row in self.rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        if table.__rich_measure__(console, console.options.update(width=ANY_WIDTH)).maximum > console.width:
            for number, column in enumerate(table.columns):
                if column.no_wrap:  # rich narrows only the others: the lines of this heading break here
                    lines = wrap(str(column.header), self._least(number), break_long_words=False)
                    column.header = Text("\n".join(lines))
        return table


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


Part = str | Table
"""A part of a command's output; a string is a paragraph."""


def markdown_of(part: Part) -> str:
    """Return a part as Markdown."""
    return escape_markdown(part) if isinstance(part, str) else part.markdown()
