"""Pictures of training runs by matplotlib: SVG whose colours are CSS variables, so that it follows light and dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from saf.patterns import CompactPattern
from saf.records.files import write_atomically
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
"""Colours of the page by name: light, dark. Every light one differs, as figures are drawn in them."""
STYLE: Any = {
    **{"svg.fonttype": "none", "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.edgecolor": PALETTE["rule"][0], "axes.labelcolor": PALETTE["soft"][0], "axes.titlelocation": "left"},
    **{"text.color": PALETTE["soft"][0], "xtick.color": PALETTE["soft"][0], "ytick.color": PALETTE["soft"][0]},
    **{"axes.titlecolor": PALETTE["ink"][0], "axes.titlesize": 10.5, "legend.frameon": False, "figure.dpi": 72},
}
WIDTH = 6.2
"""Inches of a figure: 446 pixels, so that its words can be read on a page 400 pixels wide."""
CURVE_POINTS = 400
CELL = 24
"""Pixels across one head's pattern in the head map."""
# Pixels cannot follow CSS: colours that show on light and on dark, more or less opaque.
_BLUE, _ORANGE = (0.15, 0.53, 0.74), (0.84, 0.52, 0.22)
_EVIDENT = 2.0
"""Powers of ten above uniform attention at which a pattern's blue is full."""


def colour(name: str) -> str:
    """Return the colour that a figure is drawn in."""
    return PALETTE[name][0]


def svg(draw: Callable[[Figure], None], *, height: float, name: str, width: float = WIDTH) -> str:
    """Return what `draw` puts on a figure, as an SVG element; `name` keeps its ids apart from other figures'."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    element = re.sub(r' id="[\w.]+_\d+"', "", text.getvalue()[text.getvalue().index("<svg") :])
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", element)
    for css, (light, _) in PALETTE.items():
        element = element.replace(light, f"var(--{css})")
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'class="figure" role="img"', element, count=1)


def variables(scheme: int) -> str:
    """Return the CSS variables of a scheme: 0 light, 1 dark."""
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in PALETTE.items())


# --- heads


def head_map(run: RecordedRun, *, name: str) -> str:
    """Return the map of heads: the pattern of each frozen one, the score of each live one."""
    layers, heads = shape_of(run)
    return svg(lambda figure: _draw_map(figure.subplots(), run), height=0.75 + WIDTH * layers / heads, name=name)


def shape_of(run: RecordedRun) -> tuple[int, int]:
    """Return how many layers a run's model has, and how many heads a layer."""
    if run.freeze:
        return len(run.freeze["scores"]), len(run.freeze["scores"][0])
    return int(run.config["model"]["num_layers"]), int(run.config["model"]["num_heads"])


def _draw_map(axis: Axes, run: RecordedRun) -> None:
    layers, heads = shape_of(run)
    canvas = np.zeros((layers * CELL, heads * CELL, 4))
    freeze = run.freeze or {}
    shares = _score_shares(freeze["scores"]) if freeze else np.zeros((layers, heads))
    thumbnails = {tuple(head): picture for head, picture in zip(freeze.get("heads", ()), patterns(run), strict=False)}
    frozen, pruned = ({tuple(head) for head in group} for group in (run.frozen_heads, run.pruned_heads))
    for layer in range(layers):
        for head in range(heads):
            cell = canvas[layer * CELL + 1 : (layer + 1) * CELL - 1, head * CELL + 1 : (head + 1) * CELL - 1]
            if (layer, head) in frozen:
                cell[..., :3] = _BLUE
                cell[..., 3] = thumbnails.get((layer, head), np.full((CELL - 2, CELL - 2), 0.8))
            elif (layer, head) not in pruned:
                cell[:] = (*_ORANGE, 0.08 + 0.5 * shares[layer, head])
    axis.imshow(canvas, extent=(-0.5, heads - 0.5, layers - 0.5, -0.5), interpolation="nearest", aspect="equal")
    for group, name in ((frozen, "frozen"), (pruned, "pruned")):
        for layer, head in group:
            axis.add_patch(Rectangle((head - 0.46, layer - 0.46), 0.92, 0.92, fill=False, ec=colour(name), lw=0.9))
            if name == "pruned":
                axis.plot([head - 0.3, head + 0.3], [layer - 0.3, layer + 0.3], color=colour(name), lw=1)
    for layer, head, _ in freeze.get("rejected", ()):
        axis.plot(head, layer, "x", color=colour("ordinary"), markersize=6)
    axis.set_xticks(range(0, heads, max(1, heads // 12)))
    axis.set_yticks(range(0, layers, max(1, layers // 12)))
    axis.set(xlabel="head", ylabel="layer")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _score_shares(scores: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Return each head's place among the scores, 0 the lowest and 1 the highest; 0 where there is none."""
    values = np.array([[np.nan if one is None else one for one in row] for row in scores], dtype=float)
    places = values.ravel().argsort().argsort().reshape(values.shape) / max(1, np.isfinite(values).sum() - 1)
    return np.where(np.isfinite(values), places, 0.0)


def patterns(run: RecordedRun) -> list[np.ndarray]:
    """Return a small picture of each frozen head's pattern, in the order of `run.freeze`.

    Queries run down and keys across, in even bins. A value is 0 for attention that is at most uniform over the keys
    before a query, 1 for 100 times that.
    """
    pattern = _compact(run)
    if pattern is None:
        return []
    size, length = CELL - 2, pattern.length
    edges = np.unique(np.linspace(0, length, size + 1).astype(int))
    pictures = np.zeros((pattern.alpha.shape[0], size, size))
    for row, end in enumerate(edges[1:]):
        query, starts = int(end) - 1, edges[: row + 1]
        logits = pattern.alpha[:, :end] + pattern.rho[:, :end].flip(-1) - pattern.log_z[:, query : query + 1]
        share = np.add.reduceat(logits.exp().numpy(), starts, axis=-1) / np.diff(np.append(starts, end))
        pictures[:, row, : row + 1] = np.log10(np.maximum(share * end, 1e-9)) / _EVIDENT
    lower = np.tril(np.ones((size, size)))
    return [np.clip(picture, 0.0, 1.0) * 0.88 + 0.12 * lower for picture in pictures]


def _compact(run: RecordedRun) -> CompactPattern | None:
    tensors = run.freeze_tensors
    if not {"alpha", "rho"} <= tensors.keys():
        return None
    return CompactPattern.from_parameters(tensors["alpha"].double(), tensors["rho"].double()).canonical()


def scores(run: RecordedRun, *, name: str) -> str:
    """Return all heads by score, lowest first, those that froze in their colour."""
    freeze = run.freeze or {}
    edited = {tuple(head): kind for kind in ("frozen", "pruned") for head in getattr(run, f"{kind}_heads")}
    ranked = sorted(
        (value, (layer, head))
        for layer, row in enumerate(freeze["scores"])
        for head, value in enumerate(row)
        if value is not None
    )

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for kind, shown in (("live", "rule"), ("frozen", "frozen"), ("pruned", "pruned")):
            points = [
                (place, value) for place, (value, head) in enumerate(ranked, 1) if edited.get(head, "live") == kind
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o", color=colour(shown), markersize=4, label=kind)
        if ranked and ranked[0][0] > 0:
            axis.set_yscale("log")
        axis.set(xlabel="heads by score", title=f"Score of each head: {freeze['score_name']}".replace("_", " "))
        axis.legend()

    return svg(draw, height=3.3, name=name)


def curves(run: RecordedRun, *, name: str) -> str:
    """Return a small panel for each frozen head: its pattern's terms of distance and of key, on one scale of nats."""
    pattern = _compact(run)
    if pattern is None:
        return ""
    heads = [tuple(head) for head in (run.freeze or {})["heads"]]
    places = np.unique(np.geomspace(1, pattern.length, 60).astype(int)) - 1
    across = np.log1p(places) / np.log1p(places[-1] or 1)
    columns = min(6, len(heads))
    rows = -(-len(heads) // columns)
    terms = {"frozen": pattern.rho[:, places].numpy(), "ordinary": pattern.alpha[:, places].numpy()}
    low = max(min(np.nanquantile(values, 0.02) for values in terms.values()), -30.0)
    high = max(values.max() for values in terms.values())

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for number, (layer, head) in enumerate(heads):
            x, y = number % columns, -(number // columns)
            for name, values in terms.items():
                height = np.clip((values[number] - low) / (high - low or 1.0), 0, 1)
                axis.plot(x + 0.86 * across, y + 0.66 * height, color=colour(name), lw=1.1)
            axis.text(x, y + 0.72, f"{layer}.{head}", fontsize=8)
        axis.set(xlim=(-0.05, columns), ylim=(-rows + 0.9, 1))
        axis.axis("off")

    return svg(draw, height=0.7 * rows + 0.2, name=name)


# --- training


def loss(runs: Sequence[RecordedRun], names: Sequence[str], colours: Sequence[str]) -> str:
    """Return the training loss of every run, smoothed, with its events and its held-out losses."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        _draw_loss(axis, runs, names, colours)

    return svg(draw, height=3.3, name="loss")


def _draw_loss(axis: Axes, runs: Sequence[RecordedRun], names: Sequence[str], colours: Sequence[str]) -> None:
    shown = []
    for run, name, css in zip(runs, names, colours, strict=True):
        updates, losses = _losses(run)
        smooth = moving_mean(losses, smoothing_window(run, 0.02))
        axis.plot(*_thinned(updates, losses), color=colour(css), lw=0.6, alpha=0.25)
        axis.plot(*_thinned(updates, smooth), color=colour(css), lw=1.6, label=_label(name))
        shown.append(smooth[len(smooth) // 10 :])
        probes = [(each["update"], each["loss"]) for each in run.evaluations if each.get("loss") is not None]
        if probes:
            axis.plot(*zip(*probes, strict=True), "o", color=colour(css), markersize=3, markerfacecolor="none")
        for event in run.events:
            if event.update is not None:
                axis.axvline(event.update, color=colour(css), lw=0.8, ls=":" if event.kind == "undo" else "--")
    known = np.concatenate([part[np.isfinite(part)] for part in shown])
    if len(known):  # what comes before the first tenth would flatten the rest
        room = 0.08 * (np.ptp(known) or 1.0)
        axis.set_ylim(known.min() - room, known.max() + room)
    axis.set(xlabel="update", title="Training loss, nats (circles: held-out)")
    axis.legend()


def _label(name: str) -> str:
    """Escape a dollar, which would begin mathematics."""
    return plain(name).replace("$", r"\$")


def gap(pairs: Mapping[str, tuple[RecordedRun, RecordedRun]], colours: Mapping[str, str]) -> str:
    """Return each edited run's training loss above the ordinary one's on the same batches, smoothed; "" without any."""
    series = {name: gap for name, pair in pairs.items() if (gap := loss_gap(*pair)) is not None}
    if not series:
        return ""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        axis.axhline(0, color=colour("ordinary"), lw=1)
        for name, (updates, values) in series.items():
            axis.plot(*_thinned(updates, values), color=colour(colours[name]), lw=1.6, label=_label(name))
        axis.set(xlabel="update", title="Loss above the ordinary arm's, nats")
        axis.legend()

    return svg(draw, height=3.3, name="gap")


def loss_gap(ordinary: RecordedRun, edited: RecordedRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the updates after the first event and the smoothed difference of both runs' losses; None for too few."""
    left, right = (dict(zip(*map(np.ndarray.tolist, _losses(run)), strict=True)) for run in (ordinary, edited))
    after = edited.freeze_update or 0
    common = [update for update in sorted(left.keys() & right.keys()) if update > after]
    values = np.array([right[update] - left[update] for update in common])
    if len(common) < 2:
        return None
    # The paper's centred mean: 210 of 5,000 updates.
    return np.array(common), moving_mean(values, smoothing_window(edited, 0.042))


def _losses(run: RecordedRun) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(each["update"], np.nan if each["loss"] is None else each["loss"]) for each in run.metrics]
    columns = np.array(pairs, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def smoothing_window(run: RecordedRun, share: float) -> int:
    """Return how many updates a smoothed curve averages: a share of the whole schedule, the same for every arm."""
    return max(5, round(share * ((run.config.get("train") or {}).get("updates") or len(run.metrics))))


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` values, over fewer at the ends; NaN has no weight."""
    half, finite = window // 2, np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(finite, values, 0.0), finite))
    start = np.maximum(np.arange(len(values)) - half, 0)
    end = np.minimum(np.arange(len(values)) + half + 1, len(values))
    counted = counts[end] - counts[start]
    return np.where(counted > 0, (sums[end] - sums[start]) / np.maximum(counted, 1), np.nan)


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return as many means of neighbours as a page has room for, so that long runs stay small files."""
    parts = np.array_split(np.arange(len(x)), min(CURVE_POINTS, max(1, len(x))))
    means = [(x[part].mean(), y[part].mean()) for part in parts if len(part)]
    columns = np.array(means).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def write_picture(path: Path, runs: Sequence[RecordedRun], names: Sequence[str], colours: Sequence[str]) -> Path:
    """Write the head map of the last edited run and the curves of all as one SVG file, for documents."""
    edited = next((run for run in reversed(runs) if run.edited_heads), None)
    trained = any(run.metrics for run in runs)
    panels = bool(edited) + trained

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        if edited:
            _draw_map(axes[0], edited)
        if trained:
            _draw_loss(axes[-1], runs, names, colours)

    text = svg(draw, height=0.84 * WIDTH, width=WIDTH * panels, name="picture")
    style = (
        f"<style>svg {{ {variables(0)} }} @media (prefers-color-scheme: dark) {{ svg {{ {variables(1)} }} }}</style>"
    )
    return write_atomically(path, (text.replace(">", f">{style}", 1) + "\n").encode())
