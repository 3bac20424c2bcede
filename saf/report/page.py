"""The frame of a page, one HTML file that needs nothing but itself, and the key figures at its top."""

import base64
import hashlib
import json
import platform
import re
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from saf.records.files import to_json
from saf.records.quantities import MISSING
from saf.records.text import html

_WIDTH = 200
"""Pixels of a drawing; a page shows it at most so wide."""


def page(
    *,
    kicker: str,
    headline: str,
    dek: str,
    warning: str,
    key_figures: Sequence[str],
    sections: str,
    footer: str,
    data: Any,
    scripts: Sequence[str],
) -> str:
    """Return a page: parts that are HTML already, the data its scripts draw, and the names of the scripts.

    Elements of the class `script` are shown only where scripts run.
    """
    script = "(() => {\n'use strict';\n" + "\n".join(asset(name) for name in scripts) + "\n})();"
    return Template(asset("page.html")).substitute(
        title=re.sub("<.*?>", "", headline),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        css=asset("page.css"),
        kicker=text(kicker),
        headline=headline,
        dek=dek,
        warning=warning,
        key_figures=f'<div class="key-figures of-{len(key_figures)}">{"".join(key_figures)}</div>' * bool(key_figures),
        sections=sections,
        footer=f"{footer}Everything on this page is in this one file. Python {platform.python_version()}.",
        data=embed(data),
        script=script,
    )


def section(name: str, title: str, content: str) -> str:
    """Return one section with its heading."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'


Value = tuple[str, str]
"""HTML of a value, and the colour of its arm."""


def coloured(value: str, colour: str) -> str:
    """Return a value in the colour of its arm."""
    return f'<span class="of-arm" style="--c:var(--{colour})">{value}</span>'


def of_arms(values: Sequence[Value]) -> str:
    """Return the value of each arm, in their colours where there are several."""
    if len(values) == 1:
        return values[0][0]
    return f'<span class="several">{" ".join(coloured(value, colour) for value, colour in values)}</span>'


def key_figure(name: str, value: str, note: str, drawing: str = "") -> str:
    """Return one key figure: HTML of its value and note, and a small drawing."""
    return (
        f'<div class="key-figure"><h2>{name}</h2><p class="value">{value}</p>{drawing}<p class="note">{note}</p></div>'
    )


def whiskers(estimates: Sequence[tuple[float, float, float, str]], *, start: float = 0.0, label: str) -> str:
    """Return estimates, `(value, low, high, colour)`, with their intervals on an axis that holds `start`."""
    left = min(start, *(low for _, low, _, _ in estimates))
    right = max(start, *(high for _, _, high, _ in estimates))
    margin = 0.12 * ((right - left) or 1.0)
    scale = (_WIDTH - 8) / (right - left + 2 * margin)

    def at(value: float) -> float:
        return 4 + (value - left + margin) * scale

    zero, foot = at(start), 14 * len(estimates) + 8
    parts = [
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{foot - 4}" y2="{foot - 4}"/>',
        f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{foot}"/>',
        f'<text class="tick" x="{min(max(zero, 10), _WIDTH - 10):.1f}" y="{foot + 11}" text-anchor="middle">',
        f"{start:g}</text>",
    ]
    for place, (value, low, high, colour) in enumerate(estimates):
        y, style = 8 + 14 * place, f'style="--c:var(--{colour})"'
        parts.append(f'<line class="whisker" {style} x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot" {style} cx="{at(value):.1f}" cy="{y}" r="5"/>')
    return _svg("".join(parts), label, foot + 14)


def bars(lengths: Sequence[tuple[float, str]]) -> str:
    """Return bars to one scale, below one another, in their colours: the ordinary arm first."""
    longest = max(length for length, _ in lengths)
    parts = [_bar(length / longest, colour, place) for place, (length, colour) in enumerate(lengths)]
    return _svg("".join(parts), "ordinary arm above, frozen arms below", 14 * len(lengths) + 6)


def shares_of(shares: Sequence[tuple[float, str]], words: str) -> str:
    """Return how much of a whole is taken, a bar each in its colour."""
    parts = [_bar(1.0, "faint", place) + _bar(share, colour, place) for place, (share, colour) in enumerate(shares)]
    return _svg("".join(parts), words, 14 * len(shares) + 6)


def _bar(share: float, colour: str, place: int) -> str:
    style = f'style="fill:var(--{colour})"'
    return f'<rect {style} x="0" y="{4 + 14 * place}" width="{_WIDTH * share:.1f}" height="10" rx="2"/>'


def _svg(content: str, label: str, height: int) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height}" style="height:{height}px"'
    return f'<svg class="mini" {size} role="img" aria-label="{label}">{content}</svg>'


def embed(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    plain = json.dumps(to_json(data), separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def asset(name: str) -> str:
    """Return a file of the page's own."""
    return files("saf.report").joinpath("assets", name).read_text(encoding="utf-8")


def text(value: Any) -> str:
    """Return a value as escaped HTML; a dash for None."""
    return MISSING if value is None else html(str(value))
