"""Figures of training runs by matplotlib, as SVG: its colours are CSS variables that follow light and dark mode."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from saf.patterns import CompactPattern
from saf.records.run import RecordedRun
from saf.records.table import plain

PALETTE = {
    "paper": ("#fbfaf6", "#10161c"),
    "panel": ("#ffffff", "#172029"),
    "ink": ("#17212b", "#e8edf1"),
    "soft": ("#55606b", "#9fadb9"),
    "rule": ("#dcd8cd", "#2c3843"),
    "ordinary": ("#b4561a", "#f0a268"),
    "ordinary-2": ("#8a6d1f", "#d8be6a"),
    "frozen": ("#0a6c9c", "#62c6ee"),
    "frozen-2": ("#5a4fb8", "#aaa2f5"),
    "frozen-3": ("#14806a", "#5fd0b4"),
    "pruned": ("#a8326e", "#f08fbd"),
    "pruned-2": ("#7d4a9c", "#c99be8"),
}
"""Colours of the page by name: light, dark. Light ones are all different: `svg` replaces each by its variable."""
COLOUR = {name: light for name, (light, _) in PALETTE.items()}
STYLE: Any = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), COLOUR["soft"]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.edgecolor": COLOUR["rule"],
    "axes.titlecolor": COLOUR["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "figure.dpi": 72,
    "font.size": 9.5,
    "svg.fonttype": "none",  # text stays text: smaller, can be searched, and takes the page's font
}
WIDTH, HEIGHT = 6.2, 3.3
"""Inches of a figure: 446 pixels wide, so that its words can be read on a page 400 pixels wide."""
LARGEST_CELL = 0.62
"""Largest width of a head in the map, in inches: a small model's map is no larger than the table next to it."""
CURVE_POINTS, SMOOTH_POINTS = 400, 40
"""Points of the thin curve of losses and of the smooth one, each the mean of its share of the updates."""
CELL = 24
"""Pixels across one head's pattern in the head map."""
# Pixels cannot be CSS variables: these colours show on light and on dark, and opacity carries the value.
_BLUE, _ORANGE = (0.15, 0.53, 0.74), (0.84, 0.52, 0.22)
_FULL_BLUE = 2.0
"""A pattern is fully blue where attention is this many powers of ten above uniform attention."""


def svg(draw: Callable[[Axes], None], *, name: str, height: float = HEIGHT) -> str:
    """Return the figure of `draw` as an SVG element; `name` makes its ids differ from those of other figures."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):  # with a salt ids are equal in every run, too
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]  # no XML declaration within HTML
    # Groups are numbered alike in every figure, and nothing refers to them; ids of clip paths stay.
    element = re.sub(r' id="[\w.]+_\d+"', "", element)
    # Metadata has addresses of the web, which a page that asks for nothing should not name.
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", element)
    for css, light in COLOUR.items():
        element = element.replace(light, f"var(--{css})")
    # Without a size of its own a figure follows the width of the page.
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'class="figure" role="img"', element, count=1)


def arm_colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Choose each run's colour by its name in PALETTE; arms beyond the colours of their kind share them."""
    kinds = [run.arm if run.arm in PALETTE else "frozen" for run in runs]  # a frozen run may have pruned heads too
    colours = {kind: [name for name in PALETTE if name.partition("-")[0] == kind] for kind in kinds}
    return [colours[kind][kinds[:place].count(kind) % len(colours[kind])] for place, kind in enumerate(kinds)]


def variables(scheme: int) -> str:
    """Return the CSS variables of a scheme: 0 light, 1 dark."""
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in PALETTE.items())


# --- heads


def head_map(run: RecordedRun, *, name: str) -> str:
    """Return the map of heads: the pattern of each frozen one, the score of each live one.

    The larger of layers and heads runs across, so that the map is never taller than wide.
    """
    layers, heads = shape_of(run)
    across, down = max(layers, heads), min(layers, heads)
    return svg(lambda axis: _draw_map(axis, run), height=0.6 + down * min(LARGEST_CELL, WIDTH / across), name=name)


def shape_of(run: RecordedRun) -> tuple[int, int]:
    """Return how many layers a run's model has, and how many heads a layer."""
    if run.freeze_report:
        return len(run.freeze_report["scores"]), len(run.freeze_report["scores"][0])
    return int(run.config["model"]["num_layers"]), int(run.config["model"]["num_heads"])


def _draw_map(axis: Axes, run: RecordedRun) -> None:
    layers, heads = shape_of(run)
    freeze = run.freeze_report or {}
    cells = np.zeros((layers, heads, CELL, CELL, 4))  # red, green, blue, opacity
    inner = cells[:, :, 1:-1, 1:-1]  # a pixel on every side stays empty, between the heads
    inner[..., :3] = _ORANGE
    inner[..., 3] = 0.08  # so that a live head without a score can be seen
    if freeze:
        inner[..., 3] += 0.5 * _score_ranks(freeze["scores"])[:, :, None, None]
    for layer, head in run.pruned_heads:
        inner[layer, head] = 0.0
    for layer, head in run.frozen_heads:
        inner[layer, head] = (*_BLUE, 0.8)
    for (layer, head), picture in zip(freeze.get("heads", ()), patterns(run), strict=False):
        inner[layer, head, ..., 3] = picture
    turned = layers > heads
    grid = cells.transpose(1, 0, 2, 3, 4) if turned else cells
    rows, columns = grid.shape[:2]
    # One picture of all heads: a small model's map has 16 of them, a large one's a thousand.
    canvas = grid.transpose(0, 2, 1, 3, 4).reshape(rows * CELL, columns * CELL, 4)
    axis.imshow(canvas, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), interpolation="nearest", aspect="equal")
    for kind, some in (("frozen", run.frozen_heads), ("pruned", run.pruned_heads)):
        for layer, head in some:
            x, y = (layer, head) if turned else (head, layer)
            axis.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, ec=COLOUR[kind], lw=0.9))
            if kind == "pruned":
                axis.plot([x - 0.3, x + 0.3], [y - 0.3, y + 0.3], color=COLOUR[kind], lw=1)
    for layer, head, _ in freeze.get("rejected", ()):
        axis.plot(*((layer, head) if turned else (head, layer)), "x", color=COLOUR["ordinary"], markersize=6)
    axis.set_xticks(range(0, columns, max(1, columns // 12)))
    axis.set_yticks(range(0, rows, max(1, rows // 12)))
    axis.set(xlabel="layer" if turned else "head", ylabel="head" if turned else "layer", anchor="W")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _score_ranks(scores: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Return the rank of each head's score, from 0 for the lowest to 1 for the highest; 0 without a score."""
    # Ranks, because variances spread over powers of ten: shown as they are, all but a few heads would look alike.
    values = np.array([[np.nan if one is None else one for one in row] for row in scores], dtype=float)
    ranks = values.ravel().argsort().argsort().reshape(values.shape) / max(1, np.isfinite(values).sum() - 1)
    return np.where(np.isfinite(values), ranks, 0.0)


def patterns(run: RecordedRun) -> list[np.ndarray]:
    """Return a small picture of each frozen head's pattern, in the order of `run.freeze_report`.

    Queries run down and keys across, in even bins. Above a faint base, a value is 0 for attention up to uniform over
    the keys before the query, and 1 from 100 times that on.
    """
    tensors = run.freeze_tensors
    if not {"alpha", "rho"} <= tensors.keys():  # dense patterns, or heads that are pruned
        return []
    # Records have alpha and rho in float32; log Z is computed again, in float64.
    pattern = CompactPattern.from_parameters(tensors["alpha"].double(), tensors["rho"].double()).canonical()
    size, length = CELL - 2, pattern.length
    edges = np.unique(np.linspace(0, length, size + 1).astype(int))
    pictures = np.zeros((pattern.alpha.shape[0], size, size))
    for row, end in enumerate(edges[1:]):
        query, starts = int(end) - 1, edges[: row + 1]
        # Eq. (3) of the bin's last query alone: the whole pattern has length x length entries a head.
        logits = pattern.alpha[:, :end] + pattern.rho[:, :end].flip(-1) - pattern.log_z[:, query : query + 1]
        share = np.add.reduceat(logits.exp().numpy(), starts, axis=-1) / np.diff(np.append(starts, end))
        pictures[:, row, : row + 1] = np.log10(np.maximum(share * end, 1e-9)) / _FULL_BLUE
    lower = np.tril(np.ones((size, size)))
    return [np.clip(picture, 0.0, 1.0) * 0.88 + 0.12 * lower for picture in pictures]


# --- training


def loss(runs: Sequence[RecordedRun], names: Sequence[str], colours: Sequence[str]) -> str:
    """Return the training loss of every run, smoothed, with its events and its held-out losses."""

    def draw(axis: Axes) -> None:
        shown = []
        for run, name, css in zip(runs, names, colours, strict=True):
            updates, losses = _losses(run)
            smooth = binned(updates, losses, SMOOTH_POINTS, fewest=5)
            axis.plot(*binned(updates, losses, CURVE_POINTS), color=COLOUR[css], lw=0.6, alpha=0.25)
            label = plain(name).replace("$", r"\$")  # matplotlib would read dollars as mathematics
            axis.plot(*smooth, color=COLOUR[css], lw=1.6, label=label)
            # Without the first tenth, whose high losses would flatten the rest.
            shown.append(smooth[1][len(smooth[1]) // 10 :])
            probes = [(each["update"], each["loss"]) for each in run.evaluations if each.get("loss") is not None]
            if probes:
                axis.plot(*zip(*probes, strict=True), "o", color=COLOUR[css], markersize=3, markerfacecolor="none")
            for event in run.events:
                if event.update is not None:
                    axis.axvline(event.update, color=COLOUR[css], lw=0.8, ls=":" if event.kind == "undo" else "--")
        known = np.concatenate([part[np.isfinite(part)] for part in shown])
        if len(known):
            room = 0.08 * (np.ptp(known) or 1.0)
            axis.set_ylim(known.min() - room, known.max() + room)
        axis.set(xlabel="update", title="Training loss, nats (circles: held-out)")
        axis.legend()

    return svg(draw, name="loss")


def _losses(run: RecordedRun) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(each["update"], np.nan if each["loss"] is None else each["loss"]) for each in run.metrics]
    columns = np.array(pairs, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def binned(x: np.ndarray, y: np.ndarray, most: int, *, fewest: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Average a curve, without NaN, in at most `most` bins of `fewest` points or more: smooth, and a small file."""
    parts = np.array_split(np.arange(len(x)), max(1, min(most, len(x) // fewest)))
    known = np.isfinite(y)
    means = [y[part][known[part]].mean() if known[part].any() else np.nan for part in parts]
    return np.array([x[part].mean() for part in parts]), np.array(means)
