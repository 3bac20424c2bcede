"""Text from outside, such as names of folders and files, as each writer may show it: never markup, never control codes.

What is written passes through here: `plain` for a terminal, `markdown` and `html` for documents and pages.
"""

import re
import unicodedata
from html import escape
from typing import Any

_UNSHOWN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of control, format, surrogate, line and paragraph characters: terminals obey them, reading order
turns by them, and half a surrogate pair, which a name that is not UTF-8 is read as, cannot be written at all."""
_SPACES = frozenset("\t\n\r\v\f\u0085\u2028\u2029")
_MARKS = re.compile(r"([\\`*\[\]<>|~$])|(?<![^\W_])(_)|(_)(?![^\W_])|(&)(?=#?\w+;)")
"""Characters that Markdown reads as markup, underscores within words and lone ampersands apart."""
_BEGINNING = re.compile(r"(\d*)([#+\-=>:.)])(?=\s|$|[#=\-])")
"""What begins a heading, a list, a rule or a quotation at the start of a line."""


def plain(text: str) -> str:
    """Return the text on one line; characters that cannot be shown become the replacement character."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if each in _SPACES else "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) in _UNSHOWN else each
        for each in text
    )


def markdown(text: str) -> str:
    """Return Markdown that reads as the text."""
    marked = _MARKS.sub(lambda found: f"\\{found[0]}", plain(text))
    return _BEGINNING.sub(r"\1\\\2", marked, count=1) if _BEGINNING.match(marked) else marked


def markdown_code(text: str) -> str:
    """Return a code span of Markdown that reads as the text, within a table too."""
    shown = plain(text).replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    room = " " * (shown[:1] == "`" or shown[-1:] == "`")
    return f"{ticks}{room}{shown}{room}{ticks}"


def markdown_block(text: str) -> str:
    """Return a block of shell commands of Markdown, fenced by more backticks than the text has in a row."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}sh\n" + "\n".join(map(plain, text.split("\n"))) + f"\n{fence}"


def html(text: str) -> str:
    """Return HTML that reads as the text, in an element or an attribute; of XML too."""
    return escape(plain(text))


def natural_order(name: str) -> list[tuple[int, Any]]:
    """Return what sorts names with numbers as people do: update-8k before update-16k."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts]
