"""Numbers as text for people, and text as safe HTML."""

import re
from html import escape
from typing import Any

MISSING = "–"


def text(value: Any) -> str:
    """Return a value as escaped HTML."""
    return MISSING if value is None else escape(str(value))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number at `digits` significant digits, with thousands separators."""
    if value is None:
        return MISSING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    rounded = f"{value:.{digits}g}"
    return (rounded if "e" in rounded else f"{float(rounded):,}".removesuffix(".0")).replace("-", "\u2212")


def signed(value: float | None, decimals: int = 2, unit: str = "%") -> str:
    """Return a change with its sign, "+0.21%"; the minus is the typographic one."""
    if value is None:
        return MISSING
    shown = f"{abs(value):.{decimals}f}"
    sign = "" if float(shown) == 0 else "+" if value > 0 else "\u2212"
    return f"{sign}{shown}{unit}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return MISSING
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.4g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def gibibytes(value: float | None) -> str:
    """Return a memory size in GiB or MiB."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def change_percent(before: float | None, after: float | None) -> float | None:
    """Return 100 (after / before - 1), None when one is missing."""
    return None if not before or after is None else 100.0 * (after / before - 1.0)


def inline(words: str) -> str:
    """Return Markdown's bold and code as HTML."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text(words))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)


def table(head: list[str], rows: list[list[str]], *, caption: str) -> str:
    """Return an HTML table of cells that are already HTML; the first column names the row."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
