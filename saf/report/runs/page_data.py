"""The numbers behind a report: downsampled curves, head maps and patterns as plain JSON values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saf.heads import EDITED
from saf.patterns import CompactPattern
from saf.records.events import EventRecord, arm, heads_in_force, heads_in_words
from saf.records.run import RecordedRun

# About as many as the page has pixels to show them in; a page with every point would have megabytes.
CURVE_POINTS = 512
PATTERN_POINTS = 256  # bins a side of a picture that is 340 pixels wide
MARGINAL_POINTS = 128
_SCORES = ("variance", "forward_kl")


def arm_data(run: RecordedRun, name: str, colour: str) -> dict[str, Any]:
    """Return one arm's training curve (nats by update), controller evaluations and colour."""
    updates = np.array([m["update"] for m in run.metrics], dtype=float)
    losses = np.array([np.nan if m["loss"] is None else m["loss"] for m in run.metrics], dtype=float)
    window = smoothing_window(run, 0.02)
    probes = [e for e in run.evaluations if e.get("loss") is not None]
    return {
        "name": name,
        "kind": run.arm,
        "colour": colour,
        "window": window,
        "raw": curve(updates, losses),
        "smooth": curve(updates, moving_mean(losses, window)),
        "probes": {"x": [p["update"] for p in probes], "y": rounded([p["loss"] for p in probes])},
        "updates": [run.metrics[0]["update"], run.metrics[-1]["update"]] if run.metrics else None,
        "freeze_update": run.freeze_update,
        "made": run.events[0].made if run.events else run.arm,
        "events": [_event_data(event) for event in run.events if event.update is not None],
    }


def _event_data(event: EventRecord) -> dict[str, Any]:
    """Return where an event is marked on a curve, and what its mark says."""
    count = len(event.heads)
    done = f"{count} {'head' if count == 1 else 'heads'} {event.made}"
    undone = "" if event.undone_by is None else f", undone by event {event.undone_by}"
    because = f": {event.values['reason']}" if event.values.get("reason") else ""
    return {"update": event.update, "kind": event.kind, "told": f"{done}{undone}{because}"}


def gap_data(ordinary: RecordedRun, frozen: RecordedRun, name: str, colour: str) -> dict[str, Any] | None:
    """Return the frozen arm's train loss minus the ordinary one's, update by update (same batches), smoothed."""
    left, right = ({m["update"]: m["loss"] for m in run.metrics if m["loss"] is not None} for run in (ordinary, frozen))
    after = frozen.freeze_update or 0
    common = np.array([update for update in sorted(left.keys() & right.keys()) if update > after], dtype=float)
    if len(common) < 2:
        return None
    gap = np.array([right[int(update)] - left[int(update)] for update in common])
    window = smoothing_window(frozen, 0.042)  # the paper's centred mean: 210 of 5,000 updates
    return {
        "name": name,
        "colour": colour,
        "kind": frozen.arm,
        "window": window,
        "updates": [int(common[0]), int(common[-1])],
        "raw": curve(common, gap),
        "smooth": curve(common, moving_mean(gap, window)),
    }


def freeze_data(run: RecordedRun, name: str, colour: str) -> dict[str, Any] | None:
    """Return the head map of a run with frozen or pruned heads: scores, marks, patterns, marginals; None without."""
    if run.freeze is None:
        return None
    freeze, tensors = run.freeze, run.freeze_tensors
    scores = {str(freeze["score_name"]): rounded(freeze["scores"])}
    scores |= {key: rounded(tensors[key].tolist()) for key in _SCORES if key in tensors and key not in scores}
    heads = [tuple(head) for head in freeze["heads"]]
    own = {kind: heads_in_force(run.kept_freezes, kind) for kind in EDITED}
    counts = {kind: len(found) for kind, found in own.items()}
    earlier = _earlier(run, freeze, counts)
    seconds: dict[str, float] = {}
    for event in run.events:
        seconds |= {name: seconds.get(name, 0.0) + cost for name, cost in event.seconds.items()}
    return {
        "name": name,
        "colour": colour,
        "update": freeze.get("update"),
        "kind": arm(**own, events=run.events),
        "counts": counts,
        "earlier": earlier,
        "told": heads_in_words(counts),
        "told_earlier": heads_in_words(earlier),
        "pruned": [*own["pruned"], *(head for head in run.pruned_heads if head not in own["pruned"])],
        "layers": len(freeze["scores"]),
        "heads": len(freeze["scores"][0]),
        "length": freeze.get("length"),
        "num_sequences": freeze.get("num_sequences"),
        "config": freeze.get("config") or {},
        "score_name": freeze["score_name"],
        "scores": scores,
        "frozen": [list(head) for head in heads],
        "rejected": {f"{layer},{head}": rounded(kl) for layer, head, kl in freeze.get("rejected", [])},
        "fit_kl": {f"{layer},{head}": rounded(kl) for layer, head, kl in freeze.get("fit_kl", [])},
        "entropy": rounded(tensors["row_entropy"].tolist()) if "row_entropy" in tensors else None,
        "seconds": {key: rounded(value) for key, value in seconds.items()},
        "events": len(run.events),
        "patterns": _pattern_curves(tensors, heads),
        "marginals": _marginal_curves(tensors),
    }


def _earlier(run: RecordedRun, freeze: dict[str, Any], own: dict[str, int]) -> dict[str, int]:
    """Return how many heads were frozen and pruned before a run's `own`: of those without a score, by kind.

    Those of a parent whose kind is not known, before the run ends, count as what its own events made.
    """
    count = sum(value is None for row in freeze["scores"] for value in row)
    known = {kind: run.head_counts[kind] - own[kind] for kind in EDITED}
    if sum(known.values()) == count:
        return known
    return dict.fromkeys(EDITED, 0) | {max(EDITED, key=lambda kind: own[kind]): count}


def smoothing_window(run: RecordedRun, share: float) -> int:
    """Return how many updates a smoothed curve averages: a share of the whole schedule, the same for every arm."""
    schedule = (run.config.get("train") or {}).get("updates") or len(run.metrics)
    return max(5, round(share * schedule))


def curve(x: np.ndarray, y: np.ndarray, limit: int = CURVE_POINTS) -> dict[str, list]:
    """Return at most `limit` points `{"x", "y"}` of a curve by averaging neighbours; values not finite are left out."""
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    parts = np.array_split(np.arange(len(x)), min(limit, len(x))) if len(x) else []
    return {
        "x": rounded([float(x[part].mean()) for part in parts], 6),
        "y": rounded([float(y[part].mean()) for part in parts], 5),
    }


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` updates, over fewer at the ends; NaN values have no weight."""
    half = window // 2
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(finite, values, 0.0), finite))
    start = np.maximum(np.arange(len(values)) - half, 0)
    end = np.minimum(np.arange(len(values)) + half + 1, len(values))
    counted = counts[end] - counts[start]
    return np.where(counted > 0, (sums[end] - sums[start]) / np.maximum(counted, 1), np.nan)


def log_bins(length: int, limit: int) -> np.ndarray:
    """Return ascending edges of at most `limit` bins of [0, length): single positions first, then log-spaced ranges."""
    low, high = 1.0, float(length + 1)  # growth of an edge over the one before; `high` always gives few enough bins
    if length <= limit:
        return np.arange(length + 1)
    for _ in range(40):
        growth = (low + high) / 2
        if len(_edges(length, growth)) - 1 <= limit:
            high = growth
        else:
            low = growth
    return _edges(length, high)


def _edges(length: int, growth: float) -> np.ndarray:
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(edges[-1] + 1, int(edges[-1] * growth))))
    return np.array(edges)


def bin_centres(edges: np.ndarray) -> list[float]:
    """Return the middle position of each bin."""
    return rounded(((edges[:-1] + edges[1:] - 1) / 2).tolist(), 6)


def rounded(value: Any, digits: int = 4) -> Any:
    """Return numbers at `digits` significant digits, through nested lists; NaN becomes None."""
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _pattern_curves(tensors: dict[str, Tensor], heads: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """Return alpha, rho, log_z of each frozen head in log-spaced bins: mean, and the range where a bin is wide."""
    if not heads or not {"alpha", "rho", "log_z"} <= tensors.keys():
        return None
    pattern = CompactPattern(*(tensors[name].double() for name in ("alpha", "rho", "log_z"))).canonical()
    edges = log_bins(pattern.length, PATTERN_POINTS if len(heads) <= 100 else PATTERN_POINTS // 2)
    curves: dict[str, dict[str, Any]] = {f"{layer},{head}": {} for layer, head in heads}
    for name in ("alpha", "rho"):
        values = getattr(pattern, name).numpy()
        low, high = (reduce.reduceat(values, edges[:-1], axis=-1) for reduce in (np.minimum, np.maximum))
        mean = np.add.reduceat(values, edges[:-1], axis=-1) / np.diff(edges)
        for key, *rows in zip(curves, mean, low, high, strict=True):
            curves[key][name] = dict(zip(("mean", "low", "high"), rounded([row.tolist() for row in rows]), strict=True))
    log_z = np.add.reduceat(pattern.log_z.numpy(), edges[:-1], axis=-1) / np.diff(edges)
    for key, row in zip(curves, log_z, strict=True):
        curves[key]["log_z"] = rounded(row.tolist())
    return {"position": bin_centres(edges), "curves": curves}


def _marginal_curves(tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """Return each head's measured mean attention by distance and by key, in log-spaced bins, `[L][H][points]`."""
    if not {"eta_abs", "eta_rel"} <= tensors.keys():
        return None
    length = tensors["eta_rel"].shape[-1]
    edges = log_bins(length, MARGINAL_POINTS)
    pairs = np.add.reduceat(length - np.arange(length, dtype=float), edges[:-1])
    result: dict[str, Any] = {"position": bin_centres(edges)}
    for name, key in (("by_distance", "eta_rel"), ("by_key", "eta_abs")):
        total = np.add.reduceat(torch.nan_to_num(tensors[key].double()).numpy(), edges[:-1], axis=-1)
        result[name] = rounded((total / pairs).tolist(), 3)
    return result
