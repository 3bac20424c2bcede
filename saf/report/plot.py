"""Static figures for documents: an SVG in the page's colours, and panels with scaled axes, dots, lines and cells on it.

They follow the reader's colour scheme: every rule is there for light and for dark.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np

from saf.records.quantities import number
from saf.records.text import html

WIDTH = 980
"""Of a figure, in pixels: that of a page's column of text and figures."""
LIGHT, DARK = 0, 1  # places of the two colours of a pair
_FIXED = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    ".title{font:600 20px Georgia,'Times New Roman',serif}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".mark{stroke-width:1.5;stroke-linecap:round}.ring{fill:none;stroke-width:2}.small{font-size:12px}"
)
_ARMS = ("ordinary", "ordinary-2", "frozen", "frozen-2", "frozen-3")
Kind = Literal["linear", "log", "root"]
Point = tuple[float, float]
COLOURS = ("frozen", "ordinary", "frozen-2", "frozen-3", "ordinary-2", "live")
"""Of groups of dots and lines, by the names of the page's style sheet, in the order in which they are taken."""
SHADES = 24
"""Steps of a heat map's colours: more than an eye tells apart."""
_RAISED = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


def document(
    content: str, *, width: float, height: float, title: str, style: Callable[[int], str] = lambda _: ""
) -> str:
    """Return `content` as an SVG on a page-coloured ground; `style` gives further rules of a scheme."""
    rules = [_rules(scheme) + style(scheme) for scheme in (LIGHT, DARK)]
    sheet = f"{_FIXED}{rules[LIGHT]}@media(prefers-color-scheme:dark){{{rules[DARK]}}}"
    attributes = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html(title)}"'
    paper = f'<rect class="paper" width="{width:g}" height="{height:g}"/>'
    body = f'<g transform="translate(20 22)">{content}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}><style>{sheet}</style>{paper}{body}</svg>\n'


def colour(name: str, scheme: int) -> str:
    """Return a value of the page's own style sheet."""
    sheet = files("saf.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    return re.findall(rf"--{name}:\s*([^;]+);", sheet)[scheme].strip()


def arm_rules(arms: Sequence[str], scheme: int) -> str:
    """Return the rules that give arms their colours."""
    return "".join(f".{arm}{{stroke:{colour(arm, scheme)}}}.{arm}-text{{fill:{colour(arm, scheme)}}}" for arm in arms)


def label(x: float, y: float, content: str, *, css: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html(content)}</text>'


def _rules(scheme: int) -> str:
    words = f"text{{fill:{colour('soft', scheme)}}}.title,.name{{fill:{colour('ink', scheme)}}}"
    lines = f".rule{{stroke:{colour('rule', scheme)}}}.event{{stroke:{colour('ink', scheme)};stroke-dasharray:2 3}}"
    return f"{arm_rules(_ARMS, scheme)}{words}.paper{{fill:{colour('paper', scheme)}}}{lines}"


@dataclass(frozen=True)
class Scale:
    """Place values from `low` to `high` on an axis; `root` spreads small values of either sign, as square roots do."""

    low: float
    high: float
    kind: Kind = "linear"

    @classmethod
    def of(cls, values: Iterable[float | None], kind: Kind = "linear", *, margin: float = 0.06) -> "Scale":
        """Return a scale that holds all values; a logarithmic one when asked for and all of them are positive."""
        known = [value for value in values if value is not None and math.isfinite(value)] or [0.0]
        if kind == "log" and min(known) <= 0:
            kind = "linear"
        low, high = (_bend(kind, value) for value in (min(known), max(known)))
        wide = margin * ((high - low) or 1.0)
        return cls(_unbend(kind, low - wide), _unbend(kind, high + wide), kind)

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at `low` and 1 at `high`."""
        low, high, at = (_bend(self.kind, each) for each in (self.low, self.high, value))
        return (at - low) / ((high - low) or 1.0)

    def ticks(self, most: int = 5, *, around: float = 0.0) -> list[float]:
        """Return about so many round values within the scale; a linear one's lie at round distances from `around`."""
        if self.kind == "linear":
            return _round_values(self.low, self.high, most, around)
        if self.kind == "root":
            largest = max(abs(self.low), abs(self.high))
            sizes = [10.0 ** (math.floor(math.log10(largest)) - below) for below in (0, 1)]
            found = sorted({0.0, *sizes, *(-size for size in sizes)})
            return [value for value in found if self.low <= value <= self.high] or [self.low, self.high]
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        if len(powers) >= 2:
            return [10.0**power for power in powers[:: -(-len(powers) // most)]]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
        inside = [value for value in fine if self.low <= value <= self.high] or [self.low, self.high]
        return inside[:: -(-len(inside) // most)]


def _bend(kind: Kind, value: float) -> float:
    if kind == "log":
        return math.log10(value)
    return math.copysign(math.sqrt(abs(value)), value) if kind == "root" else value


def _unbend(kind: Kind, value: float) -> float:
    if kind == "log":
        return 10.0**value
    return math.copysign(value * value, value) if kind == "root" else value


def _round_values(low: float, high: float, most: int, around: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(power * size for size in (0.1, 0.2, 0.25, 0.5, 1, 2, 5) if (high - low) / (power * size) <= most)
    first, last = math.ceil((low - around) / step - 1e-9), math.floor((high - around) / step + 1e-9)
    return [round(around + index * step, 12) for index in range(first, last + 1)]


def tick_name(value: float) -> str:
    """Return a tick as text, small powers of ten as such."""
    if 0 < abs(value) < 1e-3:
        power = round(math.log10(abs(value)))
        if math.isclose(abs(value), 10.0**power):
            return ("\u2212" if value < 0 else "") + f"10{str(power).translate(_RAISED)}"
    return number(value, 2)


def decimal_names(ticks: Sequence[float], *, least: int = 0) -> list[str]:
    """Return ticks as text, all with the decimals that the finest of them needs, and with no fewer than `least`."""
    exact = (decimals for decimals in range(least, 12) if all(round(tick, decimals) == tick for tick in ticks))
    decimals = next(exact, 12)
    return [f"{tick:.{decimals}f}".replace("-", "\u2212") for tick in ticks]


@dataclass(frozen=True)
class Panel:
    """Draw in a rectangle of the figure with two axes; the vertical one grows upwards."""

    x: float
    y: float
    width: float
    height: float
    across: Scale
    upward: Scale

    def at(self, point: Point) -> Point:
        """Return where a point lies in the figure."""
        return self.right(point[0]), self.y + (1 - self.upward.share(point[1])) * self.height

    def right(self, value: float) -> float:
        """Return how far right in the figure a value of the horizontal axis lies."""
        return self.x + self.across.share(value) * self.width

    def frame(self, title: str, *, across: str = "", ticks: tuple[bool, bool] = (True, True)) -> list[str]:
        """Return title, grid lines and ticks, with the name of the horizontal axis below it."""
        bottom = self.y + self.height
        parts = [label(self.x, self.y - 12, title, css="name")] if title else []
        parts.append(
            f'<line class="rule" x1="{self.x:.1f}" x2="{self.x + self.width:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
        )
        for value in self.upward.ticks() if ticks[1] else ():
            y = self.at((self.across.low, value))[1]
            parts.append(
                f'<line class="grid" x1="{self.x:.1f}" x2="{self.x + self.width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(label(self.x - 6, y + 4, tick_name(value), css="small", anchor="end"))
        if ticks[0]:
            values = self.across.ticks(max(2, round(self.width / 70)))
            parts += self.foot(values, [tick_name(value) for value in values])
        if across:
            parts.append(label(self.x + self.width / 2, bottom + 33, across, css="small", anchor="middle"))
        return parts

    def foot(self, ticks: Sequence[float], names: Sequence[str]) -> list[str]:
        """Return the names of the horizontal axis's ticks, each below its own."""
        bottom = self.y + self.height + 16
        named = zip(ticks, names, strict=True)
        return [label(self.right(tick), bottom, name, css="small", anchor="middle") for tick, name in named]

    def upright(self, value: float, css: str) -> str:
        """Return a line as high as the panel at a value of the horizontal axis."""
        x = self.right(value)
        bottom = self.y + self.height
        return f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.y:.1f}" y2="{bottom:.1f}"/>'

    def dots(self, points: Iterable[Point | None], css: str, *, radius: float = 3) -> list[str]:
        """Return a dot for each point; None is left out."""
        placed = (self.at(point) for point in points if point is not None)
        return [f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in placed]

    def line(self, points: Sequence[Point], css: str) -> str:
        """Return a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        return f'<polyline class="line {css}" points="{path}"/>'

    def steps(self, values: Sequence[float], css: str) -> str:
        """Return the distribution function of values given at evenly spaced shares, ascending."""
        shares = np.linspace(0, 1, len(values))
        inside = [(max(value, self.across.low), share) for value, share in zip(values, shares, strict=True)]
        return self.line(inside, css)


def legend(x: float, y: float, names: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line of dots with their names, `(css, name)` each."""
    parts = []
    for css, name in names:
        parts.append(f'<circle class="{css}" cx="{x + 4:.1f}" cy="{y - 4:.1f}" r="4"/>')
        parts.append(label(x + 14, y, name, css="small"))
        x += 32 + 6.4 * len(name)
    return parts


def cell(x: float, y: float, size: float, css: str) -> str:
    """Return one square of a heat map."""
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}" rx="2"/>'


def style(scheme: int) -> str:
    """Return the rules of dots, lines and cells, in the page's colours."""
    rules = [f".dot-{name}{{fill:{colour(name, scheme)}}}.{name}{{stroke:{colour(name, scheme)}}}" for name in COLOURS]
    rules += [f".open-{name}{{fill:none;stroke:{colour(name, scheme)};stroke-width:1.3}}" for name in COLOURS]
    rules += [f".s{index}{{fill:rgb({','.join(map(str, shade))})}}" for index, shade in enumerate(shades(scheme))]
    faint = colour("faint", scheme)
    return (
        f"{''.join(rules)}.grid{{stroke:{faint}}}.blank{{fill:{faint}}}.thin{{stroke-width:1.2}}.light{{opacity:.55}}"
    )


def shades(scheme: int) -> list[list[int]]:
    """Return the red, green and blue of each of a heat map's colours, from low to high."""
    stops = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in colour("score-ramp", scheme).split()])
    at = np.linspace(0, len(stops) - 1, SHADES)
    channels = [np.interp(at, range(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.stack(channels, 1).round().astype(int).tolist()
