"""Which heads a score selects: how stable the selection is, and how selected heads attend (paper, appendix A.3).

`stability` compares two selections of one model; `profiles` measures entropy, recent keys, largest weight, first token.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from scipy.stats import sem
from torch import Tensor, nn
from tqdm import tqdm

from experiments import paper
from experiments.analyses.common import (
    Analysis,
    ModelAnalysis,
    head_set,
    mask_of,
    matrix,
    read_record,
    spearman,
    subplots,
)
from experiments.records import Record
from saf.calibration import latter_half
from saf.calibration.capture import evaluation_mode
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models.adapter import Site, adapter_for
from saf.ops.live import capped, score_scale
from saf.records.run import events_file, join_freezes, read_events
from saf.records.table import Part, Table, correlation, number


@dataclass(frozen=True, kw_only=True)
class Stability(Analysis):
    """Compare two selections of one model: their overlap against chance within layers, and their scores' ranks."""

    kind = "stability"
    first: tyro.conf.Positional[Path]
    """An events.jsonl, or the run or checkpoint that holds one; its newest freeze counts."""
    second: tyro.conf.Positional[Path]
    """Another one."""

    def measure(self) -> dict[str, Any]:
        """Return the record; `expected` is the mean overlap of random sets with as many heads in each layer."""
        paths = {"first": self.first, "second": self.second}
        selections = [join_freezes(read_events(path)) for path in paths.values()]
        if None in selections:
            raise InputError(f"{self.first} and {self.second} must have an event with heads and scores each")
        one, other = (HeadSet(each["heads"]) for each in selections if each)
        scores = [matrix(each["scores"]) for each in selections if each]
        width = scores[0].shape[1]
        # Layers are independent; within one the overlap of random sets is hypergeometric.
        a, b = (np.array([len(heads.in_layer(layer)) for layer in range(len(scores[0]))]) for heads in (one, other))
        variance = (a * b * (width - a) * (width - b)).sum() / (width**2 * max(1, width - 1))
        return {
            **self.header(files={role: events_file(path) for role, path in paths.items()}),
            **{"of": [self.first, self.second], "first": len(one), "second": len(other)},
            "overlap": len(one & other),
            "expected": float((a * b).sum() / width),
            "standard_deviation": float(np.sqrt(variance)),
            "rank_correlation": spearman(*scores),
            "heads": [one.to_list(), other.to_list()],
            "scores": scores,
        }

    @staticmethod
    def tables(record: Record) -> list[Part]:
        papers = paper.STABILITY
        chance = f"{record['expected']:.2f} ± {record['standard_deviation']:.2f}"
        rows = [
            ["heads in both", record["overlap"], papers["overlap"]],
            ["expected by chance in each layer", chance, papers["expected"]],
            ["rank correlation of the scores", correlation(record["rank_correlation"]), papers["rank_correlation"]],
        ]
        columns = ["", "ours", "paper, 25% and 50% of training"]
        conditions = f"Stability of the selection: {record['first']} and {record['second']} heads."
        return [conditions, Table.of("", columns, rows, [paper.SELECTION_TEXT.note])]

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
FIRST = 4
"""Layers that hold most of the paper's selected heads."""
LOCAL = 64
"""Keys that count as recent, the query's own included (paper, appendix A.3)."""


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
    """Record of this analysis of a later checkpoint: adds the rank correlation of both variances."""

    def measure(self) -> dict[str, Any]:
        opened, selected = self.open(), head_set(self.selected)
        if selected:
            layer_matched(blank(adapter_for(opened.model).sites()), selected)  # raises now, not after the measurement
        with opened.autocast:
            windows = opened.windows(self.windows)[:, :-1]
            if self.text == "calibration":
                windows = torch.cat(opened.calibration())[: self.windows]
            profiles = attention_profiles(opened.model, windows.split(self.batch_size))
        matched = {name: layer_matched(values, selected) for name, values in profiles.items()} if selected else {}
        values = {"windows": len(windows), "profiles": profiles, "selected": selected.to_list(), "matched": matched}
        if selected:
            values["in_first_layers"] = sum(layer < FIRST for layer, _ in selected)
        if self.later is not None:
            later = matrix(read_record(self.later, "profiles")["profiles"]["variance"])
            values["variance_ranks"] = spearman(profiles["variance"], later)
        return opened.record(values)

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows = []
        for name, values in record["profiles"].items():
            mean = np.nanmean(np.array(values, dtype=float))
            cells = [float(mean), *(record["matched"].get(name) or (None, None))]
            rows.append([name.replace("_", " "), *map(number, cells), *(paper.PROFILES.get(name) or (None, None))])
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
        """Return each profile of every head by layer, selected heads by layer, and variance against entropy.

        Lines are the matched means. Bars and lines are means over seeds with their standard errors, points the first
        seed's heads.
        """
        drawn, axes = subplots(2, 3, size=(13, 6))
        *profiles, counts, scatter = axes.flat
        values = {name: matrix(rows).numpy() for name, rows in records[0]["profiles"].items()}
        masks = [mask_of(HeadSet(each["selected"]), values["entropy"].shape).numpy() for each in records]
        groups = {"unselected": ~masks[0], "selected": masks[0]}
        for axis, (name, words) in zip(profiles, PROFILES.items(), strict=True):
            for label, heads in groups.items():
                layers, places = np.nonzero(heads)
                axis.plot(layers + 0.6 * (places + 0.5) / heads.shape[1] - 0.3, values[name][heads], ".", label=label)
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
        for heads in groups.values() if "variance" in values else ():
            scatter.plot(values["entropy"][heads], values["variance"][heads], ".")
        scatter.set(title="variance over sequences", xlabel="normalised entropy", yscale="log")
        scatter.set_visible("variance" in values)
        return drawn


def blank(sites: Sequence[Site]) -> Tensor:
    """Return 0 for live heads, NaN for frozen ones and for layers that stay ordinary, `[L, H]` float64."""
    values = torch.full((len(sites), sites[0].layout.num_heads), torch.nan, dtype=torch.float64)
    for layer, site in enumerate(sites):
        if site.unsupported_reason is None:
            values[layer, list(site.layout.live)] = 0.0
    return values


def attention_profiles(model: nn.Module, batches: Sequence[Tensor], *, local: int = LOCAL) -> dict[str, Tensor]:
    """Return each head's mean over sequences and query positions, `[L, H]` float64; NaN for heads that are not live.

    `entropy` is divided by the logarithm of the number of keys, `local_mass` is the weight of the last `local` keys,
    `largest` the largest weight, `first_token` the first key's; `variance` is over sequences, summed over keys.
    `batches` are token ids `[B, T]`; positions are 64, evenly over the latter half of T.
    """
    adapter = adapter_for(model)
    sites = adapter.sites()
    rows = list(latter_half(batches[0].shape[1]))
    total, sums = blank(sites).repeat(len(PROFILES) + 1, 1, 1), dict[int, Tensor]()

    def add(layer: int, site: Site, query: Tensor, key: Tensor) -> None:
        for q, k in zip(query, key, strict=True):
            pattern = _pattern(q, k, site, rows)
            sums[layer] = sums[layer].add_(pattern) if layer in sums else pattern
            total[:, layer, list(site.layout.live)] += _profile(pattern, rows, local).cpu()

    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer, site in enumerate(sites):
            if site.unsupported_reason is None:
                stack.enter_context(site.capture(lambda q, k, layer=layer, site=site: add(layer, site, q, k)))
        for batch in tqdm(batches, "batches", mininterval=5):
            adapter.run(batch.to(adapter.device))
    count = sum(map(len, batches))
    *profiles, squares = total / (count * len(rows))
    for layer, summed in sums.items():
        of_mean = (summed / count).square().sum((-2, -1)) / len(rows)
        squares[layer, list(sites[layer].layout.live)] -= of_mean.cpu()
    return {**dict(zip(PROFILES, profiles, strict=True)), "variance": squares}


def _pattern(query: Tensor, key: Tensor, site: Site, rows: Sequence[int]) -> Tensor:
    """Return the attention of one sequence's live heads at query positions `rows`, `[live heads, R, T]` float64."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        scale = score_scale(site.scale, query.shape[-1])
        logits = capped(query[:, rows].to(wide) @ key[list(site.layout.key_head)].to(wide).mT * scale, site.soft_cap)
        last = torch.tensor(rows, device=query.device)[:, None]
        keys = torch.arange(key.shape[1], device=query.device)
        return logits.masked_fill_(keys > last, -torch.inf).softmax(-1).double()


def _profile(pattern: Tensor, rows: Sequence[int], local: int) -> Tensor:
    """Return the profiles of `[heads, R, T]` patterns and their squares, summed over `rows`, `[5, heads]` float64."""
    last = torch.tensor(rows, device=pattern.device)[:, None]
    keys = torch.arange(pattern.shape[-1], device=pattern.device)
    entropy = -torch.xlogy(pattern, pattern).sum(-1) / (last[:, 0] + 1).double().log()
    recent = (pattern * (keys > last - local)).sum(-1)
    squares = pattern.square().sum(-1)
    return torch.stack([entropy, recent, pattern.amax(-1), pattern[..., 0], squares]).sum(-1)


def layer_matched(values: Tensor, selected: HeadSet) -> tuple[float, float]:
    """Return the means of `values [L, H]` over selected heads, and over unselected ones weighted to match their layers.

    Each layer's unselected heads weigh as much together as its selected ones; layers without either are left out of
    both, NaN values too. Raises InputError if no layer has both, or for heads that do not exist.
    """
    layers, width = values.shape
    if unknown := [list(head) for head in selected if head[0] >= layers or head[1] >= width]:
        raise InputError(f"the model has {layers} layers of {width} heads; got {unknown}")
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
