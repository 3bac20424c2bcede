"""The page of a recipe: how its arms differ, drawn with the paper's numbers beside ours, and its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saf.experiments.columns import COLUMNS
from saf.experiments.figure import figure_html
from saf.experiments.recipe import Arm
from saf.records.table import html_of, quoted_number
from saf.records.text import html
from saf.report.page import page, section, text
from saf.report.plot import WIDTH, Panel, Scale, decimal_names, label

if TYPE_CHECKING:
    from saf.experiments.render import Rendered

_NAMES, _ROW, _FOOT = 350, 26, 40
"""Pixels: the widest name of an arm, from row to row, and what stands below the last one."""
_LONGEST_NAME = 52
"""Letters of a name that fit there at 13 pixels, 6.6 pixels a letter; longer ones end in an ellipsis."""


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """Hold one row of the figure: ours with what it may be off by, and the paper's number."""

    name: str
    colour: str
    ours: float | None
    reach: tuple[float, float] | None
    paper: float | None


def recipe_page(rendered: "Rendered") -> str:
    """Return a page of HTML that needs nothing but itself: a figure of changes where arms were run, then the tables."""
    recipe, tables = rendered.recipe, rendered.tables()
    total = len(recipe.arms) + len(recipe.measurements)
    run = len(rendered.values) + len(rendered.measured)
    told = f"{run} of {total} arms and measurements were run, at the scale {rendered.scale}."
    drawn = _figure(rendered)
    figures = [section("changes", *drawn)] if drawn else []
    for figure in recipe.figures:
        if (curves := figure_html(figure, rendered)) is not None:
            figures.append(section(figure.name, text(figure.title), f'<div class="scroll">{curves}</div>'))
    *first, every = [html_of(table.titled("")) for table in tables] or [""]
    # What is asked comes first, its drawing behind it.
    sections = [*(section("headline", "In short", table) for table in first), *figures]
    sections += [section("table", "Every number", every)] if every else []
    if measured := rendered.measurements():
        drawings = "".join(f'<div class="scroll">{made}</div>' for made in rendered.drawings().values())
        sections.append(section("measured", "What was measured", "".join(map(html_of, measured)) + drawings))
    missing = [each.name for each in recipe.arms if each.name not in rendered.values]
    missing += [each.name for each in recipe.measurements if each.name not in rendered.measured]
    if missing:
        names = "".join(f"<li>{html(name)}</li>" for name in missing)
        listed = f'<details class="numbers"><summary>{len(missing)} to open</summary><ul>{names}</ul></details>'
        sections.append(section("missing", "What was not run", listed))
    warning = "".join(f'<div class="warning" role="note">{text(draft)}</div>' for draft in rendered.drafts)
    return page(
        kicker=f"{rendered.name} · {rendered.scale}",
        headline=text(recipe.title),
        dek=f"{text(told)} The paper’s numbers are those of {text(recipe.source.label)}: "
        f"{text(recipe.source.conditions)}.",
        warning=warning,
        key_figures=(),
        sections="\n".join(sections),
        footer="".join(f"{text(line)} " for line in rendered.origin),
        data={},
        scripts=("theme.js",),
    )


def _figure(rendered: "Rendered") -> tuple[str, str] | None:
    """Return the title and the HTML of the figure of the recipe's first signed column; None where it has no numbers."""
    columns = [name for name in rendered.recipe.columns if COLUMNS[name].signed]
    marks = [_mark(rendered, arm, columns[0]) for arm in rendered.headline()] if columns else []
    marks = [mark for mark in marks if mark.ours is not None]
    if not marks:
        return None
    column = COLUMNS[columns[0]]
    seeds = max(value.seeds for arm in rendered.headline() if (value := rendered.values[arm.name].get(columns[0])))
    off = "the standard error over seeds" if seeds > 1 else "95% over held-out windows or questions, one seed"
    quoted = " Hollow diamonds are the paper’s numbers." * any(mark.paper is not None for mark in marks)
    words = f'<p class="intro">Dots are ours, lines {off}.{quoted}</p>'
    title = f"{column.title[0].upper()}{column.title[1:]}"
    return text(title), f'{words}<div class="scroll">{_drawing(marks, title)}</div>'


def _mark(rendered: "Rendered", arm: Arm, column: str) -> _Mark:
    """Return the row of one arm."""
    value = rendered.values.get(arm.name, {}).get(column)
    return _Mark(
        name=arm.name,
        colour=_colour(arm, {each.name: each for each in rendered.recipe.arms}),
        ours=None if value is None else value.mean,
        reach=None if value is None else value.reach,
        paper=quoted_number(arm.paper.get(column)),
    )


def _colour(arm: Arm, arms: Mapping[str, Arm]) -> str:
    """Return the colour of an arm: of pruned heads, frozen ones or none; a finetuned arm has its parent's."""
    edits = any(name.startswith("freeze.") for name in arm.settings)
    if arm.task and not edits and arm.parent:
        return _colour(arms[arm.parent], arms)
    if arm.settings.get("freeze.operation") == "prune":
        return "pruned"
    return "frozen" if arm.heads or edits else "ordinary"


def _drawing(marks: Sequence[_Mark], title: str) -> str:
    """Return the figure as an SVG in the page's colours."""
    values = [0.0, *(each for mark in marks for each in (mark.ours, mark.paper, *(mark.reach or ())))]
    scale = Scale.of(values)
    panel = Panel(_NAMES, 8, WIDTH - _NAMES - 20, _ROW * len(marks), scale, Scale(0, len(marks)))
    ticks = scale.ticks(6)
    parts = [panel.upright(tick, "rule") for tick in ticks] + [panel.upright(0.0, "zero")]
    parts += panel.foot(ticks, decimal_names(ticks))
    for place, mark in enumerate(marks):
        y = panel.y + _ROW * (place + 0.5)
        name = mark.name if len(mark.name) <= _LONGEST_NAME else f"{mark.name[: _LONGEST_NAME - 1]}…"
        parts.append(label(_NAMES - 14, y + 4, name, css="name", anchor="end"))
        style = f'style="--c:var(--{mark.colour})"'
        if mark.reach:
            low, high = map(panel.right, mark.reach)
            parts.append(f'<line class="whisker" {style} x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if mark.paper is not None:
            x = panel.right(mark.paper)
            parts.append(f'<path class="paper-mark" {style} d="M{x:.1f} {y - 6:.1f}l6 6-6 6-6-6z"/>')
        if mark.ours is not None:
            parts.append(f'<circle class="dot" {style} cx="{panel.right(mark.ours):.1f}" cy="{y:.1f}" r="5"/>')
    size = f'viewBox="0 0 {WIDTH} {panel.height + _FOOT:g}"'
    return f'<svg class="arms" {size} role="img" aria-label="{html(title)} of each arm">{"".join(parts)}</svg>'
