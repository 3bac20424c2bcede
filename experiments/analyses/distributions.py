"""Measured attention rows against the Gaussian and Dirichlet models that sampled patterns draw from (paper, appendix).

Models are fitted to the rows of some sequences and generate rows; those are compared with the rows of other sequences.
Whole rows are compared by the energy distance, one entry by its distribution function, and profiles by UMAP.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import stats
from scipy.spatial.distance import cdist
from torch import Tensor
from tqdm import tqdm

from experiments import paper
from experiments.analyses.common import ModelAnalysis, ModelWithData, subplots
from experiments.records import Record
from saf.calibration import calibrate
from saf.cli.output import print_progress
from saf.errors import InputError, UnsupportedError
from saf.heads import Head, HeadSet
from saf.records.table import MISSING, Part, Table
from saf.scores import score
from saf.selection import select
from saf.statistics import AttentionStatistics
from saf.targets import (
    BOUNDS,
    NEAR_CONSTANT,
    NEAR_DETERMINISTIC,
    PARAMETER_FLOOR,
    concentration,
    log_gamma_draws,
    stream_of,
)

QUERIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""The paper's query positions, as shares of the length."""
FAMILIES = ("resampled", "gaussian", "dirichlet")
"""Ways to generate rows: drawing whole measured rows again, and the two models."""
SCALE = 4.0
"""Factor of Dirichlet concentrations in diagnostics; patterns to install take 16 (paper, appendix)."""
ROWS = 96
"""Most rows of each side in one energy distance."""
SPLITS = 16
"""Random splits of measured rows; the upper quartile of their energy distances is the unit of all others."""
SETS = 4
"""Sets of rows that each model generates; their energy distances are averaged."""
DRAWS, POINTS = 500, 101
"""Number of generated samples of an entry, and of points of a curve in the record."""
PROFILES = 512
"""Most profiles of each kind in a projection."""
EDGES = (0, *(2**power for power in range(11)))
"""First distance of each bin of a profile: 0; 1; 2 to 3; 4 to 7; ...; the last takes the rest (paper, appendix)."""
Key = tuple[int, ...]
"""Names a random stream, such as (layer, head, position)."""


@dataclass(frozen=True, kw_only=True)
class Distributions(ModelAnalysis):
    """Compare measured attention rows and entries with Gaussian and Dirichlet models fitted to other sequences."""

    kind = "distributions"
    sequences: int = 500
    """Number of calibration sequences."""
    fitted: float = 0.6
    """Share of the sequences that the models are fitted to; the others are held out."""
    rate: float = 0.25
    """Share of all heads to compare: those with the lowest variance."""
    shown: int = 4
    """Heads whose curves the figure shows, spread evenly over the heads."""
    scale: float = SCALE
    """Factor of Dirichlet concentrations."""
    profiles: int = 128
    """Number of sequences for the UMAP of profiles: windows of the controller partition."""
    umap: bool = False
    """Also project profiles of the shown heads by UMAP (needs umap-learn)."""
    seed: int = 0
    """Seed of generated rows, splits and the projection."""

    def analyse(self, opened: ModelWithData) -> dict[str, Any]:
        if self.umap and importlib.util.find_spec("umap") is None:
            raise UnsupportedError("the projection of profiles needs umap-learn: pip install umap-learn")
        opened.check_rates([self.rate])
        count, fitted = self.sequences, round(self.fitted * self.sequences)
        if fitted < 4 or count - fitted < 2:
            raise InputError(f"models need four sequences to be fitted to and two others; got {fitted} of {count}")
        ids, positions = opened.calibration(), sorted({max(1, round(share * opened.length) - 1) for share in QUERIES})
        print_progress(f"calibrating on {count} sequences")
        heads = select(score(calibrate(opened.model, ids), "variance"), self.rate)
        measured = calibrate(opened.model, ids, collect=("rows", "logit_rows"), heads=heads, positions=positions)
        order = list(heads)
        shown = order[:: max(1, -(-len(order) // self.shown))]
        values = {
            "sequences": [fitted, count - fitted],
            "heads": heads.to_list(),
            "positions": list(measured.positions),
            "scale": self.scale,
            **row_distances(measured, order, fitted=fitted, scale=self.scale, seed=self.seed),
            "entries": _entries(self, measured, order, shown, fitted),
        }
        if self.umap:
            values["projections"] = _projections(self, opened, shown)
        return values

    @staticmethod
    def tables(record: Record) -> list[Part]:
        fitted, held = record["sequences"]
        rows = [
            [name, MISSING if value is None else f"{value:.3f}", paper.ROW_DISTANCES.get(name)]
            for name, value in record["medians"].items()
        ]
        places = f"{len(record['heads'])} heads and {len(record['positions'])} queries"
        conditions = (
            f"Generated attention rows against measured ones: median energy distance over {places}; fitted to {fitted} "
            f"sequences of {record['length']:,} tokens, {held} held out; concentrations times {record['scale']:g}."
        )
        entries = record["entries"]
        names = {"logit": "logit: normal", "gaussian": "probability: Gaussian", "dirichlet": "probability: Dirichlet"}
        medians = [[words, f"{median(entries['distances'][name]):.3f}"] for name, words in names.items()]
        title = f"Entry of query {entries['query'] + 1:,} and key {entries['key'] + 1:,}, counted from 1"
        columns = ["model", "median Kolmogorov-Smirnov distance"]
        return [
            conditions,
            Table.of("", ["rows drawn", "ours", "paper"], rows),
            Table.of(title, columns, medians, [paper.DISTRIBUTIONS.note]),
        ]

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure:
        """Draw an entry's distribution functions for some heads, distances of rows and entries, and any UMAP."""
        record, *_ = records
        curves, planes = record["entries"]["curves"], record.get("projections") or []
        drawn, axes = subplots(3 + bool(planes), max(2, len(curves)))
        shares = np.linspace(0, 1, POINTS)
        for curve, above, below in zip(curves, axes[0], axes[1], strict=False):
            above.plot(curve["logits"], shares, "k", label="measured")
            if curve["normal"][1] > 0:
                low, high = above.get_xlim()
                grid = np.linspace(low, high, 61)
                above.plot(grid, stats.norm(*curve["normal"]).cdf(grid), label="normal")
            above.set(title="layer {}, head {}".format(*curve["head"]), xlabel="logit")
            for name, style in (("measured", "k"), ("gaussian", "C0"), ("dirichlet", "C1")):
                below.plot(np.maximum(curve[name], 1e-6), shares, style, label=name)
            below.set(xlabel="probability", xscale="log")
        axes[1, 0].legend()
        for axis, values, title in (
            (axes[2, 0], record["normalised"], "energy distance of rows"),
            (axes[2, 1], record["entries"]["distances"], "Kolmogorov-Smirnov distance of the entry"),
        ):
            flat = [
                [each for each in np.ravel(np.array(one, dtype=float)) if np.isfinite(each)] for one in values.values()
            ]
            axis.boxplot(flat, tick_labels=list(values))
            axis.set(title=title, yscale="log" if "energy" in title else "linear")
        for plane, axis in zip(planes, axes[-1], strict=False):
            for name, style in (("measured", "."), ("generated", "."), ("mean", "o")):
                axis.plot(*np.array(plane[name]).T, style, label=name, ms=6 if name == "mean" else 2)
            axis.set(title="layer {}, head {}: UMAP of profiles".format(*plane["head"]))
        for axis in axes.flat:
            axis.set_visible(axis.has_data())
        return drawn


# --- rows drawn from models of their variation over sequences


def gaussian_rows(logits: Tensor, count: int, *, seed: int, key: Key) -> Tensor:
    """Return rows `[count, W]`, the softmax of independent normal logits with mean and variance of `logits [N, W]`."""
    values = logits.double()
    noise = torch.from_numpy(stream_of(seed, key).standard_normal((count, values.shape[1])))
    return (values.mean(0) + values.std(0) * noise).softmax(-1)


def dirichlet_rows(rows: Tensor, count: int, *, seed: int, key: Key, scale: float = SCALE) -> Tensor:
    """Return rows `[count, W]` from Dirichlet(c m): m is the mean of `rows [N, W]`, c is `scale` times Eq. (18).

    c and c m have the bounds of the sampled pattern. Measured rows that are nearly one-hot or constant give their mean.
    """
    values = rows.double()
    center, spread = values.mean(0), values.var(0).sum()
    if 1 - center.square().sum() <= NEAR_DETERMINISTIC or spread <= NEAR_CONSTANT:
        return center.expand(count, -1)
    strength = (scale * concentration(center, spread)).clamp(*BOUNDS)
    parameters = (strength * center).clamp(min=PARAMETER_FLOOR).repeat(count)
    return log_gamma_draws(parameters, seed, key).view(count, -1).softmax(-1)


# --- whole rows: energy distances


def distances(one: Tensor, other: Tensor) -> np.ndarray:
    """Return the Euclidean distances `[n, m]` of square roots of rows: sqrt(2) times Hellinger distances."""
    return cdist(one.double().sqrt(), other.double().sqrt())


def energy_distance(between: np.ndarray, within_one: np.ndarray, within_other: np.ndarray) -> float:
    """Return 2 E|X - Y| - E|X - X'| - E|Y - Y'| from matrices of distances (Eq. S.28 of docs/method.md).

    Means include the pairs of a row with itself: never negative, and zero only for equal samples.
    """
    return float(2 * between.mean() - within_one.mean() - within_other.mean())


def split_quartile(pairs: np.ndarray, *, rows: int, generator: torch.Generator) -> float:
    """Split a sample at random into two parts of `rows` rows; return the upper quartile of their energy distances.

    `pairs [N, N]` are the distances between the rows of the sample.
    """
    energies = []
    for _ in range(SPLITS):
        one, other = torch.randperm(len(pairs), generator=generator)[: 2 * rows].view(2, rows).numpy()
        energies.append(
            energy_distance(pairs[np.ix_(one, other)], pairs[np.ix_(one, one)], pairs[np.ix_(other, other)])
        )
    return float(np.quantile(energies, 0.75))


def row_distances(
    statistics: AttentionStatistics, heads: Sequence[Head], *, fitted: int, scale: float = SCALE, seed: int = 0
) -> dict[str, Any]:
    """Compare rows that models of the first `fitted` sequences generate with measured rows of the other sequences.

    Returns `rows`, their number on each side; `quartile [F, R]`, of `split_quartile` on the fitted sequences;
    `normalised`, by family the mean energy distance over generated sets divided by the quartile, NaN where no row
    differs from another; and `medians` over heads and queries.
    """
    held = statistics.num_sequences - fitted
    # Means include the pairs of a row with itself, so that the distance depends on the size: all samples have one.
    size = min(ROWS, fitted // 2, held)
    quartile = np.zeros((len(heads), len(statistics.positions)))
    energies = {name: np.zeros_like(quartile) for name in FAMILIES}
    for number, head in enumerate(tqdm(heads, "heads", mininterval=5)):
        measured, logits = (statistics.take(name, [head])[0] for name in ("rows", "logit_rows"))
        for at, position in enumerate(statistics.positions):
            fitted_rows, fitted_logits = (values[:fitted, at, : position + 1] for values in (measured, logits))
            heldout_rows = measured[fitted:, at, : position + 1]
            generator = torch.Generator().manual_seed(seed)
            pairs = distances(fitted_rows, fitted_rows)
            # The unit of distance: how far two samples of the same rows are apart.
            quartile[number, at] = split_quartile(pairs, rows=size, generator=generator)
            for repeat in range(SETS):
                chosen = heldout_rows[torch.randperm(held, generator=generator)[:size]]
                key = (*head, position, repeat)
                indices = torch.from_numpy(stream_of(seed, key).integers(fitted, size=size))
                drawn = {
                    "resampled": fitted_rows[indices],  # with replacement: what a perfect model reaches at this size
                    "gaussian": gaussian_rows(fitted_logits, size, seed=seed, key=key),
                    "dirichlet": dirichlet_rows(fitted_rows, size, seed=seed, key=key, scale=scale),
                }
                within = distances(chosen, chosen)
                for name, rows in drawn.items():
                    energy = energy_distance(distances(rows, chosen), distances(rows, rows), within)
                    energies[name][number, at] += energy / SETS
    unit = np.where(quartile > 0, quartile, np.nan)
    normalised = {name: values / unit for name, values in energies.items()}
    medians = {name: float(np.nanmedian(values)) for name, values in normalised.items()}
    return {"rows": size, "normalised": normalised, "quartile": quartile, "medians": medians}


# --- one entry of the last row


def _entries(
    settings: Distributions, statistics: AttentionStatistics, heads: Sequence[Head], shown: Sequence[Head], fitted: int
) -> dict[str, Any]:
    """Compare the last query's attention to the key before it: distances for all heads, curves for the shown ones."""
    query, shares = statistics.positions[-1], np.linspace(0, 1, POINTS)
    distances, curves = [], []
    for head in heads:
        rows, logits = (statistics.take(name, [head])[0][:, -1, : query + 1] for name in ("rows", "logit_rows"))
        drawing: Any = {"scale": settings.scale, "seed": settings.seed, "key": (*head, query)}
        samples, normal, of_head = compare_entry(rows, logits, query - 1, fitted, **drawing)
        distances.append(of_head)
        if head in shown:
            points = {name: np.quantile(values, shares).tolist() for name, values in samples.items()}
            curves.append({"head": head, "normal": normal, **points})
    by_model = {name: [each[name] for each in distances] for name in ("logit", "gaussian", "dirichlet")}
    return {"query": query, "key": query - 1, "distances": by_model, "curves": curves}


def compare_entry(
    rows: Tensor, logits: Tensor, entry: int, fitted: int, *, scale: float, seed: int, key: Key
) -> tuple[dict[str, np.ndarray], tuple[float, float], dict[str, float]]:
    """Compare one entry of `rows` and `logits [N, W]` with models of the first `fitted` sequences.

    Returns samples of the entry, mean and deviation of the logits' normal model, and Kolmogorov-Smirnov distances.
    Samples `logits` and `measured` are of the other sequences, `gaussian` and `dirichlet` drawn from the models. The
    distance of `logit` is 1 if the normal model has no deviation.
    """
    tensors = {
        "logits": logits[fitted:],
        "measured": rows[fitted:],
        "gaussian": gaussian_rows(logits[:fitted], DRAWS, seed=seed, key=key),
        "dirichlet": dirichlet_rows(rows[:fitted], DRAWS, seed=seed, key=key, scale=scale),
    }
    samples = {name: values[:, entry].double().numpy() for name, values in tensors.items()}
    model = logits[:fitted, entry].double()
    mean, deviation = float(model.mean()), float(model.std())
    distances = {"logit": 1.0}
    if deviation > 0:
        normal = stats.norm(mean, deviation).cdf
        distances["logit"] = float(np.asarray(stats.ks_1samp(samples["logits"], normal))[0])
    for name in ("gaussian", "dirichlet"):
        # Only the statistic is used; an exact p-value would take longer than all the rest.
        distances[name] = float(np.asarray(stats.ks_2samp(samples["measured"], samples[name], method="asymp"))[0])
    return samples, (mean, deviation), distances


# --- profiles in the plane


def distance_profile(rows: Tensor, position: int) -> Tensor:
    """Return the mass of rows `[..., W]` at query `position` (from 0) in each distance bin, `[..., 12]` float64."""
    by_distance = rows[..., : position + 1].double().flip(-1)
    bins = torch.bucketize(torch.arange(position + 1), torch.tensor(EDGES[1:]), right=True)
    return by_distance.new_zeros(*rows.shape[:-1], len(EDGES)).index_add_(-1, bins, by_distance)


def sample_profiles(
    rows: Tensor, positions: Sequence[int], *, count: int = PROFILES, scale: float = SCALE, seed: int, key: Key
) -> dict[str, Tensor]:
    """Return binned profiles of a head's `rows [N, R, T]`: `measured` and `generated [n, 12]`, and the `mean [1, 12]`.

    Each position's generated profiles are drawn from a Dirichlet distribution fitted to its N binned vectors.
    """
    binned = torch.stack([distance_profile(rows[:, at], row) for at, row in enumerate(positions)], 1)
    each = -(-count // len(positions))
    drawn = [
        dirichlet_rows(binned[:, at], each, seed=seed, key=(*key, row), scale=scale) for at, row in enumerate(positions)
    ]
    generator = torch.Generator().manual_seed(seed)
    profiles = {"measured": binned.flatten(0, 1), "generated": torch.cat(drawn)}
    profiles = {
        name: values[torch.randperm(len(values), generator=generator)[:count]] for name, values in profiles.items()
    }
    return {**profiles, "mean": binned.mean((0, 1))[None]}


def project_profiles(sample: dict[str, Tensor], reducer: Any) -> dict[str, np.ndarray]:
    """Project profiles into the plane by `reducer` (UMAP), fitted to the measured profiles alone.

    It sees square roots, standardised by the measured profiles. Distances in the plane are no test.
    """
    roots = {name: values.double().sqrt() for name, values in sample.items()}
    width = roots["measured"].std(0)
    # A bin that is equal in all measured profiles, perhaps empty, stays unscaled.
    width = torch.where(width > 0, width, 1.0)
    scaled = {name: ((values - roots["measured"].mean(0)) / width).numpy() for name, values in roots.items()}
    points = {"measured": reducer.fit_transform(scaled["measured"])}
    return points | {name: reducer.transform(scaled[name]) for name in ("generated", "mean")}


def _projections(settings: Distributions, opened: ModelWithData, shown: Sequence[Head]) -> list[dict[str, Any]]:
    """Project the profiles of each shown head, from rows in the latter half of windows no model was fitted to."""
    umap = importlib.import_module("umap")
    some = opened.windows(settings.profiles)[:, :-1]
    measured = calibrate(opened.model, some.split(settings.batch_size), collect=("rows",), heads=HeadSet(shown))
    planes = []
    for head in shown:
        rows = measured.take("rows", [head])[0]
        sample = sample_profiles(rows, measured.positions, scale=settings.scale, seed=settings.seed, key=head)
        reducer = umap.UMAP(random_state=settings.seed, n_jobs=1)
        planes.append({"head": head, **project_profiles(sample, reducer)})
    return planes
