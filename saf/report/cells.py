"""Tables as plain text: a heading and rows of cells, which a page and a document each write in their own way."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saf.report.paper import Source
from saf.report.words import MISSING

_NO_NUMBER = (MISSING, "refused", "plotted")
_NUMBER = re.compile(r"[+\u2212-]?\d[\d,.e\u2212-]*(×|%| ?[a-zµA-Z]{1,4})?( (to|of|with|±|\(|[+\u2212\d]).*)?")


@dataclass(frozen=True)
class Cells:
    """A table; cells without a value hold `MISSING`."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]], *, keep: Sequence[str] = ()) -> "Cells":
        """Return a table without the columns that hold nothing; those named in `keep` stay."""
        used = [
            number for number, name in enumerate(head) if name in keep or any(row[number] != MISSING for row in rows)
        ]
        return cls(tuple(head[i] for i in used), tuple(tuple(row[i] for i in used) for row in rows))


@dataclass(frozen=True)
class Analysis:
    """A table with the conditions of its numbers, and where the paper has the like."""

    title: str
    conditions: str
    tables: Mapping[str, Cells]
    """By caption; the first one needs none."""
    source: Source | None


Part = str | Cells
"""What a document is made of: a paragraph, caption or list of notes as Markdown, or a table."""


def percent(rate: str) -> str:
    """Return a share as text, from the text that JSON has for it."""
    return f"{100 * float(rate):g}%"


def correlation(value: float | None) -> str:
    """Return a correlation as text."""
    return MISSING if value is None else f"{value:.3f}".replace("-", "\u2212")


def markdown(table: Cells) -> str:
    """Return a Markdown table; the first column and columns of words align left, columns of numbers right."""
    columns = zip(*table.rows, strict=True) if table.rows else ([""] for _ in table.head)
    rule = [_rule(number, cells) for number, cells in enumerate(columns)]
    return "\n".join(_line(cells) for cells in (table.head, rule, *table.rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _rule(number: int, cells: Sequence[str]) -> str:
    numbers = all(cell in _NO_NUMBER or _NUMBER.fullmatch(cell) for cell in cells)
    return "---:" if number and numbers else "---"
