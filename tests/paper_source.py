"""Where the paper's own text has a number: the cell of a table, or the gap of a sentence."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

_ONE = r"[+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e−\d+)?"
NUMBER = re.compile(rf"{_ONE}(?: ± {_ONE}| to {_ONE})?")
"""A number with its sign, and its spread or the other end of its range."""
_MARKUP = (
    (r"---", ""),
    (r"\\times10\^\{-(\d+)\}", r"e−\1"),
    (r"\\(?:textbf|emph|mathrm|qdegrade|qimprove|shortstack(?:\[l\])?|(?:top|mid|bottom)rule|cmidrule\S*)", ""),
    (r"\\ourapproach", "SAF"),
    (r"\\times", "×"),
    (r"\\pm", " ± "),
    (r"\\%", "%"),
    (r"\\\\|\\,|~", " "),
    (r"[${}]", ""),
    (r"--", " to "),
    (r"(?<![\w)])-(?=\d)", "−"),
    (r"\s+", " "),
)


def plain(text: str) -> str:
    """Return what typeset text says, with minus signs and exponents as 1.19e−7."""
    for markup, meant in _MARKUP:
        text = re.sub(markup, meant, text)
    return text.strip()


def bare(quoted: str) -> str:
    """Return the number of a text that quotes one, without its unit and its plus."""
    found = NUMBER.match(quoted.replace("-", "\u2212"))
    assert found is not None, f"{quoted!r} quotes no number"
    return found.group().removeprefix("+")


def environment(text: str, label: str) -> str:
    """Return the table that holds a label."""
    at = text.index(f"\\label{{{label}}}")
    return text[text.rindex("\\begin{table", 0, at) : text.index("\\end{table", at)]


def table(text: str, label: str) -> list[list[str]]:
    """Return the cells of every row of a table, plain; an empty first cell is that of the row above."""
    rows: list[list[str]] = []
    for line in environment(text, label).splitlines():
        if "&" in line:
            cells = [plain(cell) for cell in line.split("&")]
            rows.append([cells[0] or (rows[-1][0] if rows else ""), *cells[1:]])
    return rows


@dataclass(frozen=True)
class Cell:
    """Stand for a number of a table: of the row that begins with these cells, in this column, counted from 0."""

    label: str
    row: tuple[str, ...]
    column: int
    panel: int = 0
    """Which of the rows that begin so, where the panels of a table repeat them."""
    part: int = 0
    """Which of the numbers of the cell."""
    thousand: bool = False
    """Whether the paper has it in thousands of our unit."""

    def read(self, text: str) -> str:
        """Return the number that the paper has there, without its plus."""
        rows = [row for row in table(text, self.label) if tuple(row[: len(self.row)]) == self.row]
        assert len(rows) > self.panel, f"{self.label} has no row {self.row}"
        found = NUMBER.findall(rows[self.panel][self.column])[self.part].removeprefix("+")
        if self.thousand:
            return " ± ".join(f"{1000 * Decimal(one):.0f}" for one in found.split(" ± "))
        return found


@dataclass(frozen=True)
class Said:
    """Stand for a number of a sentence, in which `{}` is its place."""

    sentence: str

    def read(self, text: str) -> str:
        """Return the number that the paper has there, without its plus."""
        before, after = (re.escape(part) for part in self.sentence.split("{}"))
        found = set(re.findall(rf"(?<![\d.]){before}({NUMBER.pattern}){after}", plain(text)))
        assert len(found) == 1, f"the paper has {sorted(found)} where it is to say {self.sentence!r}"
        return found.pop().removeprefix("+")


Place = Cell | Said


def read(places: Place | tuple[Place, ...], text: str) -> list[str]:
    """Return the numbers of one place or of several."""
    return [each.read(text) for each in (places if isinstance(places, tuple) else (places,))]


def quoted_in(text: str) -> list[str]:
    """Return the numbers of a text that quotes some, parted by commas or a slash, in the words of `read`."""
    return [bare(each) for each in re.split(r", |/", text)]


def cells(places: Iterable[Place | tuple[Place, ...]]) -> list[Cell]:
    """Return the cells among places."""
    flat = (each for place in places for each in (place if isinstance(place, tuple) else (place,)))
    return [each for each in flat if isinstance(each, Cell)]
