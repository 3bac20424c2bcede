"""The figure of zero-shot tasks: how accuracy changes with the share of frozen heads."""

from collections.abc import Mapping
from typing import Any

from saf.records.quantities import number
from saf.report.plot import COLOURS, WIDTH, Panel, Scale, document, label, legend, style

Record = Mapping[str, Any]


def zero_shot(record: Record) -> str:
    """Return a panel for each task, and one for their mean: the change in points by rate, a line a score.

    Of models frozen elsewhere each is a dot, at the share of its heads that is frozen.
    """
    title = f"Zero-shot accuracy of {record['model']}: change from ordinary attention, points"
    groups: dict[str, list[Record]] = {}
    for arm in record["arms"]:
        groups.setdefault(arm["score"] or arm["name"], []).append(arm)
    colours = dict(zip(groups, COLOURS * (1 + len(groups) // len(COLOURS)), strict=False))
    parts = [label(0, 22, title, css="title")]
    parts += legend(0, 50, [(f"dot-{css}", name.replace("_", " ")) for name, css in colours.items()])
    panels = [*record["ordinary"]["tasks"], None]
    across = Scale.of([0.0, *(_share(arm) for arm in record["arms"])])
    for place, task in enumerate(panels):
        changes = {name: [(_share(arm), _change(arm, task)) for arm in arms] for name, arms in groups.items()}
        upward = Scale.of([0.0, *(change for points in changes.values() for _, change in points)])
        panel = Panel(46 + (place % 3) * 325, 100 + (place // 3) * 250, 270, 160, across, upward)
        name = "mean change" if task is None else f"{task}, {number(_accuracy(record, task), 2)}% ordinary"
        parts += panel.frame(name, across="heads frozen, %")
        parts.append(panel.line([(across.low, 0.0), (across.high, 0.0)], "live thin light"))
        for group, points in changes.items():
            css = colours[group]
            parts += [panel.line([(0.0, 0.0), *points], css), *panel.dots(points, f"dot-{css}")]
    return document("".join(parts), width=WIDTH, height=100 + 250 * -(-len(panels) // 3), title=title, style=style)


def _share(arm: Record) -> float:
    """Return the share of heads that an arm has frozen, in percent; earlier records tell what it asked for alone."""
    return 100.0 * (arm["rate"] if arm.get("share") is None else arm["share"])


def _change(arm: Record, task: str | None) -> float:
    """Return an arm's change of a task, or the mean of all, in points."""
    return 100.0 * (arm["mean_difference"] if task is None else arm["tasks"][task]["change"]["difference"])


def _accuracy(record: Record, task: str) -> float:
    return 100.0 * record["ordinary"]["tasks"][task]["accuracy"]
