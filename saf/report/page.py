"""The frame of a report: one HTML file that needs nothing but itself."""

import base64
import hashlib
import json
import platform
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from saf.records.files import to_json
from saf.records.quantities import MISSING


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


def embed(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    plain = json.dumps(to_json(data), separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def asset(name: str) -> str:
    """Return a file of the page's own."""
    return files("saf.report").joinpath("assets", name).read_text(encoding="utf-8")


def text(value: Any) -> str:
    """Return a value as escaped HTML; a dash for None."""
    return MISSING if value is None else escape(str(value))


def inline(words: str) -> str:
    """Return Markdown's bold and code as HTML."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text(words))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)
