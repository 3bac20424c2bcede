"""Which heads a score selects: how stable the selection is, and how selected heads attend (paper, appendix A.3).

`stability` compares two selections of one model. `profiles` measures how each head spreads its attention: entropy, the
weight of recent keys and of the first token, and the largest weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from scipy.stats import sem
from torch import Tensor, nn

from experiments import paper
from experiments.analyses.common import (
    Analysis,
    ModelAnalysis,
    ModelWithData,
    calibrate_in_groups,
    mask_of,
    matrix,
    read_record,
    spearman,
    subplots,
)
from experiments.records import Record
from saf.calibration.capture import measurable_heads
from saf.cli.parsing import read_heads
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from saf.records.run import events_file, merge_reports, read_events
from saf.records.table import Part, Table, correlation, number
from saf.selection import existing


@dataclass(frozen=True, kw_only=True)
class Stability(Analysis):
    """Compare two selections of one model: their overlap against chance, and the rank correlation of their scores."""

    kind = "stability"
    first: tyro.conf.Positional[Path]
    """An events.jsonl, or the run or checkpoint that holds one; its newest freeze is the first selection."""
    second: tyro.conf.Positional[Path]
    """The same for the second selection."""

    def measure(self) -> dict[str, Any]:
        """Return the record; `expected` is the mean overlap of random sets with as many heads in each layer."""
        paths = {"first": self.first, "second": self.second}
        selections: Any = [merge_reports(read_events(path)) for path in paths.values()]
        if None in selections:
            raise InputError(f"{self.first} and {self.second} must have an event with heads and scores each")
        one, other = (HeadSet(each["heads"]) for each in selections)
        scores = [matrix(each["scores"]) for each in selections]
        layers, width = scores[0].shape
        # Within a layer the overlap of random sets is hypergeometric.
        a, b = (np.array([len(heads.in_layer(layer)) for layer in range(layers)]) for heads in (one, other))
        variance = (a * b * (width - a) * (width - b)).sum() / (width**2 * max(1, width - 1))
        return {
            **self.header(files={role: events_file(path) for role, path in paths.items()}),
            "of": [self.first, self.second],
            "first": len(one),
            "second": len(other),
            "overlap": len(one & other),
            "expected": float((a * b).sum() / width),
            "standard_deviation": float(np.sqrt(variance)),
            "rank_correlation": spearman(*scores),
            "heads": [one.to_list(), other.to_list()],
            "scores": scores,
        }

    @staticmethod
    def tables(record: Record) -> list[Part]:
        published = paper.STABILITY
        chance = f"{record['expected']:.2f} ± {record['standard_deviation']:.2f}"
        rows = [
            ["heads in both", record["overlap"], published["overlap"]],
            ["expected by chance in each layer", chance, published["expected"]],
            ["rank correlation of the scores", correlation(record["rank_correlation"]), published["rank_correlation"]],
        ]
        columns = ["", "ours", "paper, 25% and 50% of training"]
        headline = f"Stability of the selection: {record['first']} and {record['second']} heads."
        return [headline, Table.of("", columns, rows, [paper.SELECTION_TEXT.note])]

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure:
        """Return the heads of the first selection and those in both, by layer, means over seeds."""
        shape = np.shape(records[0]["scores"][0])
        first, second = (
            np.array([mask_of(HeadSet(each["heads"][place]), shape).numpy() for each in records]) for place in (0, 1)
        )
        drawn, axis = subplots(size=(6, 4))
        for heads, words, colour in ((first, "in the first selection", "lightgrey"), (first & second, "in both", "C0")):
            axis.bar(range(shape[0]), heads.sum(2).mean(0), color=colour, label=words)
        by_seed = (f"{each['overlap']} of {each['first']} (chance {each['expected']:.1f})" for each in records)
        axis.set(title=", ".join(by_seed), xlabel="layer", ylabel="heads")
        axis.legend()
        return drawn


# --- profiles

PROFILES = {
    "entropy": "normalised entropy",
    "local_mass": "weight of the last 64 keys",
    "largest": "largest weight",
    "first_token": "weight of the first token",
}
FIRST_LAYERS = 4
"""The number of first layers that hold most of the paper's selected heads."""
RECENT_KEYS = 64
"""The number of last keys that count as recent, the query's own included (paper, appendix A.3)."""


@dataclass(frozen=True, kw_only=True)
class Profiles(ModelAnalysis):
    """Measure how heads spread their attention, selected heads against unselected ones of the same layers."""

    kind = "profiles"
    selected: tuple[str, ...] = ()
    """Heads to compare with the others: LAYER:HEAD, or a file or run that lists them."""
    windows: int = 128
    """Windows to measure on."""
    text: Literal["controller", "calibration"] = "controller"
    """Take the first windows of the controller partition, or calibration sequences."""
    later: Path | None = None
    """A record of `profiles` on a later checkpoint of the run; adds the rank correlation of both records' variances."""

    def analyse(self, opened: ModelWithData) -> dict[str, Any]:
        selected, sites = HeadSet(read_heads(self.selected)), adapter_for(opened.model).sites()
        existing(torch.zeros(len(sites), sites[0].layout.num_heads), selected)  # raises now, not after the measurement
        windows = opened.windows(self.windows)[:, :-1]
        if self.text == "calibration":
            windows = torch.cat(opened.calibration())[: self.windows]
        profiles = attention_profiles(opened.model, windows.split(self.batch_size))
        matched = {name: layer_matched(values, selected) for name, values in profiles.items()} if selected else {}
        values = {"windows": len(windows), "profiles": profiles, "selected": selected.to_list(), "matched": matched}
        if selected:
            # The paper counts them, as most heads of low variance lie there.
            values["in_first_layers"] = sum(layer < FIRST_LAYERS for layer, _ in selected)
        if self.later is not None:
            later = matrix(read_record(self.later, "profiles")["profiles"]["variance"])
            values["variance_ranks"] = spearman(profiles["variance"], later)
        return values

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows = []
        for name, values in record["profiles"].items():
            mean = np.nanmean(np.array(values, dtype=float))
            cells = [float(mean), *(record["matched"].get(name) or (None, None))]
            rows.append([name.replace("_", " "), *map(number, cells), *(paper.PROFILES.get(name) or (None, None))])
        if "in_first_layers" in record:
            heads = f"{record['in_first_layers']} of {len(record['selected'])}"
            rows.append([f"heads in the first {FIRST_LAYERS} layers", None, heads, None, paper.IN_FIRST_LAYERS, None])
        columns = [
            "profile",
            "all heads",
            "selected",
            "unselected, layer-matched",
            "paper, selected",
            "paper, unselected",
        ]
        return [
            f"How heads spread their attention: {record['windows']} windows of {record['length']:,} tokens, "
            f"{len(record['selected'])} heads selected.",
            Table.of("", columns, rows, [paper.SELECTION_TEXT.note]).used(),
        ]

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure:
        """Draw four profiles by layer, the number of selected heads by layer, and variance against entropy.

        A point is a head of the first seed. Horizontal lines are the layer-matched means of selected and unselected
        heads; lines and bars are means over seeds, with standard errors.
        """
        drawn, axes = subplots(2, 3, size=(13, 6))
        *profiles, counts, scatter = axes.flat
        values = {name: matrix(rows).numpy() for name, rows in records[0]["profiles"].items()}
        masks = [mask_of(HeadSet(each["selected"]), values["entropy"].shape).numpy() for each in records]
        groups = {"unselected": ~masks[0], "selected": masks[0]}
        for axis, (name, words) in zip(profiles, PROFILES.items(), strict=True):
            for label, heads in groups.items():
                layers, columns = np.nonzero(heads)
                spread = 0.6 * (columns + 0.5) / heads.shape[1] - 0.3  # heads of a layer side by side
                axis.plot(layers + spread, values[name][heads], ".", label=label)
            matched = np.array([each["matched"][name] for each in records if name in each["matched"]])
            for colour, seeds in zip(("C1", "C0"), matched.T, strict=False):
                axis.axhline(seeds.mean(), color=colour, lw=0.8)
                if len(seeds) > 1:
                    axis.axhspan(seeds.mean() - sem(seeds), seeds.mean() + sem(seeds), color=colour, alpha=0.2)
            axis.set(title=words, xlabel="layer", yscale="log" if name == "first_token" else "linear")
        axes[0, 0].legend()
        by_layer = np.array([mask.sum(1) for mask in masks])
        error = {"yerr": sem(by_layer), "capsize": 2} if len(records) > 1 else {}
        counts.bar(range(by_layer.shape[1]), by_layer.mean(0), color="C1", **error)
        counts.set(title="selected heads", xlabel="layer")
        scatter.set(title="variance over sequences", xlabel="normalised entropy", yscale="log")
        scatter.set_visible("variance" in values)  # the committed record of 124M has none
        if "variance" in values:
            for heads in groups.values():
                scatter.plot(values["entropy"][heads], values["variance"][heads], ".")
        return drawn


def attention_profiles(model: nn.Module, batches: Sequence[Tensor], *, recent: int = RECENT_KEYS) -> dict[str, Tensor]:
    """Return each head's mean over sequences and query positions, `[L, H]` float64; NaN for heads that are not live.

    `entropy` is divided by the logarithm of the number of keys, `local_mass` is the weight of the last `recent` keys,
    `largest` the largest weight, `first_token` the first key's. `variance` is that of weights over sequences, summed
    over keys. `batches` are token ids `[B, T]`; 64 query positions are read, in the latter half of T.
    """
    adapter, keys = adapter_for(model), torch.arange(batches[0].shape[1])
    sites = adapter.sites()
    values = torch.full((len(PROFILES) + 1, len(sites), sites[0].layout.num_heads), torch.nan, dtype=torch.float64)
    for heads, measured in calibrate_in_groups(model, batches, measurable_heads(adapter), ("rows",)):
        last = torch.tensor(measured.positions)[:, None]
        for layer, head in heads:
            rows = measured.take("rows", [(layer, head)])[0].double()
            entropy = -torch.xlogy(rows, rows).sum(-1) / (last[:, 0] + 1).double().log()
            # The query's own key is the first of the recent ones.
            local_mass = (rows * (keys > last - recent)).sum(-1)
            variance = rows.var(0, correction=0).sum(-1)
            profiles = (entropy, local_mass, rows.amax(-1), rows[..., 0], variance)
            values[:, layer, head] = torch.stack([each.mean() for each in profiles])
    return dict(zip((*PROFILES, "variance"), values, strict=True))


def layer_matched(values: Tensor, selected: HeadSet) -> tuple[float, float]:
    """Return the mean of `values [L, H]` over selected heads, and over unselected ones weighted to match their layers.

    In both means a layer's weight is its number of selected heads. Layers without selected or without
    unselected heads are left out, and so are NaN values. Raises InputError if no layer is left.
    """
    inside, known = mask_of(selected, values.shape).numpy(), np.isfinite(values.cpu().numpy())
    means, weights = [], []
    for row, own, other in zip(values.double().cpu().numpy(), inside & known, ~inside & known, strict=True):
        if own.any() and other.any():
            means.append((row[own].mean(), row[other].mean()))
            weights.append(own.sum())
    if not means:
        raise InputError("no layer has both selected and unselected heads: there is nothing to compare")
    one, other = np.average(means, axis=0, weights=weights)
    return float(one), float(other)
