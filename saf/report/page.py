"""The frame of a page, one HTML file that needs nothing but itself, and the key figures at its top."""

import base64
import hashlib
import json
import platform
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
    key_figures: str,
    sections: str,
    footer: str,
    data: Any,
    scripts: Sequence[str],
) -> str:
    """Return a page: parts that are HTML already, the data its scripts draw, and the names of the scripts."""
    script = "(() => {\n'use strict';\n" + "\n".join(asset(name) for name in scripts) + "\n})();"
    return Template(asset("page.html")).substitute(
        title=headline.replace("<em>", "").replace("</em>", ""),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        css=asset("page.css"),
        kicker=text(kicker),
        headline=headline,
        dek=dek,
        warning=warning,
        key_figures=key_figures,
        sections=sections,
        footer=f"{footer}Everything on this page is in this one file. Python {platform.python_version()}.",
        data=embed(data),
        script=script,
    )


def section(name: str, title: str, content: str) -> str:
    """Return one section with its heading."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'


def key_figure(name: str, value: str, note: str, drawing: str = "") -> str:
    """Return one key figure: HTML of its value and note, and a small drawing."""
    return (
        f'<div class="key-figure"><h2>{name}</h2><p class="value">{value}</p>{drawing}<p class="note">{note}</p></div>'
    )


def whisker(value: float, low: float, high: float, *, start: float = 0.0, label: str) -> str:
    """Return an estimate and its interval on an axis that holds `start`."""
    left, right = min(start, low), max(start, high)
    margin = 0.12 * ((right - left) or 1.0)
    scale = (_WIDTH - 8) / (right - left + 2 * margin)
    zero, point, first, last = (4 + (x - left + margin) * scale for x in (start, value, low, high))
    parts = [
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="14" y2="14"/>',
        f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="3" y2="22"/>',
        f'<text class="tick" x="{min(max(zero, 10), _WIDTH - 10):.1f}" y="33" text-anchor="middle">{start:g}</text>',
        f'<line class="whisker" x1="{first:.1f}" x2="{last:.1f}" y1="14" y2="14"/>',
        f'<circle class="dot" cx="{point:.1f}" cy="14" r="5"/>',
    ]
    return _svg("".join(parts), label)


def bars(ordinary: float, frozen: float) -> str:
    """Return two bars to one scale, the ordinary arm above the frozen one."""
    longest = max(ordinary, frozen)
    widths = [_WIDTH * value / longest for value in (ordinary, frozen)]
    parts = [
        f'<rect class="fill-{name}" x="0" y="{y}" width="{width:.1f}" height="10" rx="2"/>'
        for name, y, width in (("ordinary", 4, widths[0]), ("frozen", 18, widths[1]))
    ]
    return _svg("".join(parts), "ordinary arm above, frozen arm below")


def share_of(share: float, words: str) -> str:
    """Return how much of a whole is taken."""
    parts = [
        f'<rect class="fill-rest" x="0" y="9" width="{_WIDTH}" height="12" rx="2"/>',
        f'<rect class="fill-frozen" x="0" y="9" width="{_WIDTH * share:.1f}" height="12" rx="2"/>',
    ]
    return _svg("".join(parts), words)


def _svg(content: str, label: str) -> str:
    return f'<svg class="mini" viewBox="0 0 {_WIDTH} 34" role="img" aria-label="{label}">{content}</svg>'


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
