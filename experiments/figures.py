"""The figures of recipes, by matplotlib: numbers of a table as lines, a panel beside another, the paper's as rings."""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from experiments.recipe import Figure
from experiments.tables import RecipeTable, Value

STYLE: Any = {
    **{"svg.fonttype": "none", "svg.hashsalt": "saf", "font.size": 9, "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False},
}


def draw(figure: Figure, table: RecipeTable) -> str | None:
    """Return a figure as SVG; None where no line has two numbers. Bars are standard errors or 95% intervals."""
    labels = {row.arm: row for row in table.recipe.rows}
    points = {
        panel: {
            line: {tick: table.values.get((labels[arm].label, metric)) for tick, (arm, metric) in ticks.items()}
            for line, ticks in lines.items()
        }
        for panel, lines in figure.panels.items()
    }
    points = {panel: lines for panel, lines in points.items() if any(any(ticks.values()) for ticks in lines.values())}
    if not any(sum(v is not None for v in ticks.values()) > 1 for lines in points.values() for ticks in lines.values()):
        return None
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(8, 3.4), layout="constrained")
        axes = canvas.subplots(1, len(points), squeeze=False, sharey=figure.alike)[0]
        for axis, (panel, lines) in zip(axes, points.items(), strict=True):
            paper = {
                line: {t: _paper(labels[arm].paper.get(metric)) for t, (arm, metric) in ticks.items()}
                for line, ticks in figure.panels[panel].items()
            }
            _panel(axis, lines, paper, joined=figure.joined)
            axis.set_title(panel)
            axis.set_xlabel(figure.across)
        canvas.suptitle(figure.title)
        handles, names = axes[0].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)))
        return _svg(canvas)


def draw_costs(costs: Mapping[str, Mapping[int, float]]) -> str:
    """Return curves of time a token (ns) over context length, log axes, each with its name beside its end, as SVG."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(6.4, 3.2), layout="constrained")
        axis = canvas.subplots()
        for number, (name, points) in enumerate(costs.items()):
            axis.loglog(list(points), list(points.values()), "o-", markersize=4, color=f"C{number}")
            end = (max(points), points[max(points)])
            axis.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", color=f"C{number}")
        lengths = sorted({length for points in costs.values() for length in points})
        axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 4)
        axis.set_xlabel("context, tokens")
        axis.set_ylabel("forward and backward, ns a token")
        return _svg(canvas)


def _svg(canvas: Canvas) -> str:
    text = io.StringIO()
    canvas.savefig(text, format="svg", metadata={"Date": None})
    return re.sub(r" +$", "", text.getvalue(), flags=re.MULTILINE)


def _panel(
    axis: Axes,
    lines: Mapping[str, Mapping[str, Value | None]],
    paper: Mapping[str, Mapping[str, float | None]],
    *,
    joined: bool,
) -> None:
    ticks = list(dict.fromkeys(tick for line in lines.values() for tick in line))
    for number, (name, values) in enumerate(lines.items()):
        aside = 0.0 if joined else 0.14 * (number - (len(lines) - 1) / 2)
        known = {tick: value for tick, value in values.items() if value is not None}
        if not known:
            continue
        places = [ticks.index(tick) + aside for tick in known]
        reach = [value.reach or (value.mean, value.mean) for value in known.values()]
        off = [[v.mean - r[0] for v, r in zip(known.values(), reach, strict=True)]]
        off += [[r[1] - v.mean for v, r in zip(known.values(), reach, strict=True)]]
        means = [value.mean for value in known.values()]
        style = {"fmt": "o-" if joined else "o", "markersize": 4, "color": f"C{number}", "label": name}
        axis.errorbar(places, means, yerr=off, **style)  # pyright: ignore[reportArgumentType]
        quoted = {tick: value for tick, value in paper[name].items() if value is not None}
        if quoted:
            axis.plot(
                *([ticks.index(tick) + aside for tick in quoted], list(quoted.values()), "o"),
                color=f"C{number}",
                markerfacecolor="none",
                markersize=7,
                label=f"{name}, paper",
            )
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_xlim(-0.5, len(ticks) - 0.5)


def _paper(text: str | None) -> float | None:
    """Return the number that a quotation of the paper begins with."""
    match = re.match(r"[+-]?[\d,]*\.?\d+", (text or "").replace("\u2212", "-"))
    return float(match[0].replace(",", "")) if match else None
