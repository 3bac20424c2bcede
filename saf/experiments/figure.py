"""A figure of a recipe: numbers of its table as lines, a panel beside another, the paper's as rings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saf.experiments.columns import RECALL, recall_name
from saf.records.table import quoted_number
from saf.records.text import html
from saf.report.plot import COLOURS, WIDTH, Panel, Scale, document, label, legend, style

if TYPE_CHECKING:
    from saf.experiments.render import Rendered

Place = tuple[str, str]
"""An arm and a column: where a number stands in the table."""
_TOP, _HEIGHT, _FOOT, _LEFT, _RIGHT, _GAP = 96, 300, 66, 50, 50, 60
"""Pixels: above panels, of a panel, below it, left and right of all, and between two."""
_ASIDE = 0.07
"""Of the way to the next tick: how far dots that no line joins stand from one another."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Describe a figure by where its numbers stand in the table."""

    name: str
    """Of its file."""
    title: str
    across: str
    """What the horizontal axis is."""
    panels: Mapping[str, Mapping[str, Mapping[str, Place]]]
    """By the title of a panel, the name of a line, and the name of a tick, from left to right."""
    alike: bool = True
    """Whether all panels have one vertical axis; otherwise each has its own."""
    joined: bool = True
    """Whether ticks are steps of one quantity, so that a line joins them; others stand side by side."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Return where all its numbers stand."""
        return tuple(place for lines in self.panels.values() for line in lines.values() for place in line.values())


@dataclass(frozen=True, kw_only=True)
class _Dot:
    """Hold one number of a line: at which tick, what it may be off by, and the paper's."""

    tick: int
    ours: float | None
    reach: tuple[float, float] | None
    paper: float | None


def recall_figure(learnt: Mapping[str, str], replaced: Mapping[str, str]) -> Figure:
    """Return the figure of recall by pairs in 512 tokens: fig:mqar-generalisation.

    Args:
        learnt: Arms that learnt recall with their heads, by the names of their lines.
        replaced: Arms whose heads were replaced afterwards, untrained.
    """
    tests = {str(pairs): recall_name(length, pairs) for length, pairs in RECALL if length == RECALL[0][0]}
    panels = {"learnt with these heads": learnt, "heads replaced after learning, untrained": replaced}
    return Figure(
        name="recall",
        title="Recall in 512 tokens, %, of models that learnt 8 pairs",
        across="pairs",
        panels={
            title: {line: {tick: (arm, test) for tick, test in tests.items()} for line, arm in arms.items()}
            for title, arms in panels.items()
        },
    )


def figure_picture(figure: Figure, rendered: "Rendered") -> str | None:
    """Return a figure as an SVG for documents; None where no line of it has two numbers."""
    content = _content(figure, rendered)
    if content is None:
        return None
    title = label(0, 22, figure.title, css="title")
    return document(title + content, width=WIDTH, height=_size() + 24, title=figure.title, style=style)


def figure_html(figure: Figure, rendered: "Rendered") -> str | None:
    """Return a figure as an SVG in a page's colours; None where no line of it has two numbers."""
    content = _content(figure, rendered)
    if content is None:
        return None
    size = f'viewBox="0 30 {WIDTH} {_size() - 30}"'
    return f'<svg class="arm-lines" {size} role="img" aria-label="{html(figure.title)}">{content}</svg>'


def _size() -> int:
    return _TOP + _HEIGHT + _FOOT


def _content(figure: Figure, rendered: "Rendered") -> str | None:
    """Return the legend and the panels; None where no line has two numbers."""
    panels = {title: _lines(lines, rendered) for title, lines in figure.panels.items()}
    every = [dots for lines in panels.values() for dots in lines.values()]
    if not any(sum(dot.ours is not None for dot in dots) > 1 for dots in every):
        return None
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = dict(zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False))
    listed = [(f"dot-{colours[name]}", name) for name in names]
    if any(dot.paper is not None for dots in every for dot in dots):
        listed.append((f"open-{COLOURS[0]}", "the paper's"))
    upward = {title: Scale.of(_values(every if figure.alike else lines.values())) for title, lines in panels.items()}
    width = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    parts = legend(0, 50, listed)
    if off := _told_reaches(figure, rendered):
        parts.append(label(0, _size() - 4, f"Upright lines: {off}.", css="small"))
    for place, (title, lines) in enumerate(panels.items()):
        ticks = list(dict.fromkeys(tick for line in figure.panels[title].values() for tick in line))
        panel = Panel(
            _LEFT + place * (width + _GAP), _TOP, width, _HEIGHT, Scale(-0.3, len(ticks) - 0.7), upward[title]
        )
        parts += panel.frame(title, across=figure.across, ticks=(False, True))
        parts += panel.foot([float(at) for at in range(len(ticks))], ticks)
        for at, (name, dots) in enumerate(lines.items()):
            aside = 0.0 if figure.joined else _ASIDE * (at - (len(lines) - 1) / 2)
            parts += _drawn(panel, dots, colours[name], aside=aside, joined=figure.joined)
    return "".join(parts)


def _told_reaches(figure: Figure, rendered: "Rendered") -> str:
    """Return what a figure's numbers may be off by, in words; "" where it has none that is known."""
    places = (place for lines in figure.panels.values() for line in lines.values() for place in line.values())
    found = [rendered.values.get(arm, {}).get(column) for arm, column in places]
    of_seeds = {value.error is not None for value in found if value is not None and value.reach is not None}
    windows = "95% over held-out windows or questions"
    over = {True: "standard error over seeds", False: f"of one seed {windows}" if True in of_seeds else windows}
    return "; ".join(over[kind] for kind in sorted(of_seeds, reverse=True))


def _values(lines: Iterable[Sequence[_Dot]]) -> list[float | None]:
    """Return all that an axis has to hold."""
    return [value for dots in lines for dot in dots for value in (dot.ours, dot.paper, *(dot.reach or ()))]


def _lines(lines: Mapping[str, Mapping[str, Place]], rendered: "Rendered") -> dict[str, list[_Dot]]:
    """Return the numbers of a panel's lines, those without any left out."""
    ticks = list(dict.fromkeys(tick for line in lines.values() for tick in line))
    arms = {arm.name: arm for arm in rendered.recipe.arms}
    found = {}
    for name, line in lines.items():
        dots = []
        for tick, (arm, column) in line.items():
            value = rendered.values.get(arm, {}).get(column)
            paper = quoted_number(arms[arm].paper.get(column))
            ours, reach = (None, None) if value is None else (value.mean, value.reach)
            dots.append(_Dot(tick=ticks.index(tick), ours=ours, reach=reach, paper=paper))
        if any(dot.ours is not None for dot in dots):
            found[name] = dots
    return found


def _drawn(panel: Panel, dots: Sequence[_Dot], colour: str, *, aside: float, joined: bool) -> list[str]:
    """Return our numbers, what each may be off by, and the paper's."""
    ours = [(dot.tick + aside, dot.ours) for dot in dots if dot.ours is not None]
    parts = [panel.line(ours, colour)] if joined else []
    parts += panel.dots(ours, f"dot-{colour}", radius=4)
    for dot in dots:
        if dot.ours is not None and dot.reach is not None:
            parts.append(panel.line([(dot.tick + aside, each) for each in dot.reach], f"{colour} thin"))
    paper = [(dot.tick + aside, dot.paper) for dot in dots if dot.paper is not None]
    return parts + panel.dots(paper, f"open-{colour}")
