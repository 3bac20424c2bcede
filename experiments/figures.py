"""Functions that draw the figures of recipes, speedups and costs by length; `svg` writes each drawing as SVG.

A recipe's figure shows numbers of its table as lines, one panel a group; rings are the paper's numbers.
"""

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from experiments.recipe import Figure
from experiments.tables import RecipeTable

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "saf",  # the same picture has the same ids
    "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def svg(draw: Callable[[], Canvas]) -> str:
    """Return as SVG what a function draws."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        canvas = draw()
        for axis in canvas.axes:
            axis.minorticks_off()  # they take a third of the time
        # No date: the same numbers give the same file, which `make check` compares.
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a point is fine enough.
    text = re.sub(r"(\.\d\d)\d+", r"\1", file.getvalue())
    return re.sub(r" +$", "", text[text.index("<svg") :], flags=re.MULTILINE)


def recipe_figure(figure: Figure, table: RecipeTable) -> str | None:
    """Return a recipe's figure as SVG; None where no line has two numbers. Bars are standard errors or intervals."""
    labels = {row.arm: row.label for row in table.recipe.rows}
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for panel, lines in figure.panels.items():
        for name, ticks in lines.items():
            points = table.summary.loc[[(labels[arm], metric) for arm, metric in ticks.values()]].assign(tick=[*ticks])
            panels.setdefault(panel, {})[name] = points.set_index("tick")
    counts = {panel: [points["mean"].count() for points in lines.values()] for panel, lines in panels.items()}
    if not any(count > 1 for counted in counts.values() for count in counted):
        return None
    return svg(lambda: _drawn(figure, {panel: panels[panel] for panel in panels if any(counts[panel])}))


def _drawn(figure: Figure, panels: Mapping[str, Mapping[str, pd.DataFrame]]) -> Canvas:
    canvas = Canvas(figsize=(8, 3.4), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=figure.share_y)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, (name, points) in enumerate(lines.items()):
            # Points that no line connects are drawn side by side, or their intervals would hide each other.
            offset = 0.0 if figure.continuous else 0.14 * (number - (len(lines) - 1) / 2)
            _draw_line(axis, points, name, f"C{number}", offset, connected=figure.continuous)
        ticks = list(next(iter(lines.values())).index)
        axis.set(title=title, xlabel=figure.xlabel, xlim=(-0.5, len(ticks) - 0.5))
        axis.set_xticks(range(len(ticks)), ticks)
        axis.grid(alpha=0.3)
    canvas.suptitle(figure.title)
    handles, names = axes[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    return canvas


def _draw_line(axis: Axes, points: pd.DataFrame, name: str, colour: str, offset: float, *, connected: bool) -> None:
    """Draw one line of a panel, `offset` to the right of its ticks, and the paper's numbers as rings."""
    points = points.assign(x=[place + offset for place in range(len(points))])
    known: Any = points[points["mean"].notna()]
    error = known["standard_error"].fillna(0)
    bars = [(known["mean"] - known["low"]).fillna(error), (known["high"] - known["mean"]).fillna(error)]
    style = {"fmt": "o-" if connected else "o", "markersize": 4, "color": colour, "label": name}
    if len(known):
        axis.errorbar(known["x"], known["mean"], yerr=bars, **style)  # pyright: ignore[reportArgumentType]
        numbers = points["paper"].str.replace("\u2212", "-").str.extract(r"^([+-]?[\d,]*\.?\d+)")[0]
        quoted = numbers.str.replace(",", "").astype(float)
        if quoted.notna().any():
            rings = {"color": colour, "markerfacecolor": "none", "markersize": 7, "label": f"{name}, paper"}
            axis.plot(points["x"][quoted.notna()], quoted.dropna(), "o", **rings)


def speedups_figure(tables: Mapping[str, pd.DataFrame]) -> str | None:
    """Return the speedups of frozen heads in tables of benchmarks as SVG, a panel a table; None where there are none.

    Other tables are left out. The paper's ranges get no ring.
    """
    panels = {}
    for title, table in tables.items():
        own = table[table.index.str.contains("frozen")].filter(regex="^speedup|^paper$")
        # Such as 1.07× or 1.047 ± 0.005×; a refused one has no number.
        numbers = own.apply(lambda column: column.str.extract(r"^([\d.]+)(?=×| ±)")[0].astype(float))
        if any(name.startswith("speedup") for name in numbers):
            panels[title] = numbers

    def draw() -> Canvas:
        canvas = Canvas(figsize=(4.2 * len(panels), 1 + 0.2 * max(map(len, panels.values()))), layout="constrained")
        axes = canvas.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, points) in zip(axes, panels.items(), strict=True):
            for name, values in points.items():
                style: Any = {"mfc": "none", "ms": 8} if name == "paper" else {}
                axis.plot(values, [*points.index], ls="", marker="o", color="C0", **style)
            axis.axvline(1, color="grey", lw=0.8)
            axis.set(title=title, xlabel="speedup; rings: paper", ylim=(len(points) - 0.5, -0.5))
        return canvas

    return svg(draw) if panels else None


def costs_figure(costs: Mapping[str, Mapping[int, float]]) -> str:
    """Return curves of time a token (ns) over context length, log axes, each with its name at its end, as SVG."""

    def draw() -> Canvas:
        canvas = Canvas(figsize=(6.4, 3.2), layout="constrained")
        axis = canvas.subplots()
        for number, (name, points) in enumerate(costs.items()):
            axis.loglog(list(points), list(points.values()), "o-", markersize=4, color=f"C{number}")
            end = (max(points), points[max(points)])
            axis.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", color=f"C{number}")
        lengths = sorted({length for points in costs.values() for length in points})
        axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        axis.set(xlabel="context, tokens", ylabel="forward and backward, ns a token")
        axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 4)
        axis.grid(alpha=0.3)
        return canvas

    return svg(draw)
