"""Static pictures for documents: one SVG each, in the page's colours, following the reader's colour scheme."""

import re
from collections.abc import Callable
from html import escape
from importlib.resources import files

LIGHT, DARK = 0, 1
_FIXED = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    ".title{font:600 20px Georgia,'Times New Roman',serif}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".mark{stroke-width:1.5;stroke-linecap:round}.ring{fill:none;stroke-width:2}.small{font-size:12px}"
)


def document(
    content: str, *, width: float, height: float, title: str, style: Callable[[int], str] = lambda _: ""
) -> str:
    """Return `content` as an SVG on a page-coloured ground; `style` gives further rules of a scheme."""
    rules = [_rules(scheme) + style(scheme) for scheme in (LIGHT, DARK)]
    sheet = f"{_FIXED}{rules[LIGHT]}@media(prefers-color-scheme:dark){{{rules[DARK]}}}"
    attributes = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"'
    paper = f'<rect class="paper" width="{width:g}" height="{height:g}"/>'
    body = f'<g transform="translate(20 22)">{content}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}><style>{sheet}</style>{paper}{body}</svg>\n'


def colour(name: str, scheme: int) -> str:
    """Return a value of the page's own style sheet."""
    sheet = files("saf.report").joinpath("page.css").read_text(encoding="utf-8")
    return re.findall(rf"--{name}:\s*([^;]+);", sheet)[scheme].strip()


def label(x: float, y: float, content: str, *, css: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _rules(scheme: int) -> str:
    arms = [f".{arm}{{stroke:{colour(arm, scheme)}}}.{arm}-text{{fill:{colour(arm, scheme)}}}" for arm in _ARMS]
    words = f"text{{fill:{colour('soft', scheme)}}}.title,.name{{fill:{colour('ink', scheme)}}}"
    lines = f".rule{{stroke:{colour('rule', scheme)}}}.event{{stroke:{colour('ink', scheme)};stroke-dasharray:2 3}}"
    return f"{''.join(arms)}{words}.paper{{fill:{colour('paper', scheme)}}}{lines}"


_ARMS = ("ordinary", "frozen")
