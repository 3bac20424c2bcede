"""Text from outside, such as names of folders, made safe to show: never markup, never control codes of a terminal."""

import re
import unicodedata
from typing import Any

_UNSHOWN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of control, format, surrogate, line and paragraph characters: terminals obey them, reading order
turns by them, and half a surrogate pair, which a name that is not UTF-8 is read as, cannot be written at all."""
_SPACES = frozenset("\t\n\r\v\f\u0085\u2028\u2029")
_MARKS = re.compile(r"([\\`*\[\]<>|~$])|(?<![^\W_])(_)|(_)(?![^\W_])|(&)(?=#?\w+;)")
"""Characters that Markdown reads as markup, but for underscores within words and lone ampersands."""
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
    marked = _MARKS.sub(lambda match: f"\\{match[0]}", plain(text))
    return _BEGINNING.sub(r"\1\\\2", marked, count=1) if _BEGINNING.match(marked) else marked


def natural_order(name: str) -> list[tuple[int, Any]]:
    """Return a sort key that orders names with numbers as people do: update-8k before update-16k."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts]
