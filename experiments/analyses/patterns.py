"""Fixed patterns: their distances from the mean and what these say of costs (paper, Eq. 14), and their bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from experiments import paper
from experiments.analyses.common import (
    Analysis,
    ModelAnalysis,
    ModelWithData,
    calibrate_in_groups,
    spearman,
    stratified_spearman,
)
from experiments.records import Record
from saf.calibration import calibrate
from saf.errors import InputError
from saf.frozen_state import storage_report
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from saf.opening import find_model
from saf.patterns import CompactPattern, DensePattern
from saf.records.files import read_json
from saf.records.table import MISSING, Part, Table, correlation, percent
from saf.scores import score
from saf.selection import select
from saf.statistics import FLOOR
from saf.targets import TARGETS, collect_for, dense_pattern

DISTANCES = ("squared_error", "kl", "hellinger", "total_variation")


@dataclass(frozen=True, kw_only=True)
class Geometry(ModelAnalysis):
    """Measure the distance of each fixed pattern from the mean pattern, on nested head sets, and its cost."""

    kind = "geometry"
    rates: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    """Shares of all heads."""
    costs: Path
    """JSON of each pattern's cost: {"0.25": {"mean": 0.7, ...}, ...}."""

    def analyse(self, opened: ModelWithData) -> dict[str, Any]:
        """Return `distances` as `{distance: {rate: {pattern: mean over heads}}}`, and correlations with the costs."""
        opened.check_rates(self.rates)
        costs = read_json(self.costs)
        # Raised before the calibration, which takes minutes.
        for rate in self.rates:
            if len(TARGETS.keys() & costs.get(str(rate), {})) < 2:
                raise InputError(f"{self.costs} must have costs of two patterns at rate {rate}; a rank needs two")
        ids = opened.calibration()
        scores = score(calibrate(opened.model, ids), "variance")
        # Of one ranking, so that the heads of a rate are among those of every higher one.
        nested = {rate: select(scores, rate) for rate in self.rates}
        largest = max(nested.values(), key=len)
        by_pattern = distances_from_mean(opened.model, ids, largest, list(TARGETS))
        at = {str(rate): [largest.index(head) for head in heads] for rate, heads in nested.items()}
        distances = {
            distance: {
                rate: {name: each[distance][index].mean().item() for name, each in by_pattern.items()}
                for rate, index in at.items()
            }
            for distance in DISTANCES
        }
        return {"distances": distances, "correlations": {d: distance_and_cost(distances[d], costs) for d in DISTANCES}}

    @staticmethod
    def tables(record: Record) -> list[Part]:
        distances = record["distances"]
        rows = [
            [
                f"{percent(rate)} {pattern.replace('_', ' ')}",
                *(f"{each[rate][pattern]:.3e}" for each in distances.values()),
            ]
            for rate, patterns in distances[DISTANCES[0]].items()
            for pattern in patterns
        ]
        columns = ["heads, pattern", *(name.replace("_", " ") for name in distances)]
        conditions = f"Distance of fixed patterns from the mean pattern: {record['length']:,} tokens."
        ranks: list[list[str]] = []
        heads: list[str] = []
        for name, (within, pooled) in record["correlations"].items():
            papers, values = paper.GEOMETRY_CORRELATIONS.get(name, {}), {**within, "stratified": pooled}
            heads = [rate if rate == "stratified" else percent(rate) for rate in values]
            cells = [f"{correlation(value)} ({papers.get(rate, MISSING)})" for rate, value in values.items()]
            ranks.append([name.replace("_", " "), *cells])
        title = "Spearman of each distance with what the patterns cost (paper)"
        ranked = Table.of(title, ["distance", *heads], ranks, [paper.GEOMETRY.note])
        return [conditions, Table.of("", columns, rows), ranked]


def distances_from_mean(
    model: nn.Module, ids: list[Tensor], heads: HeadSet, names: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Return `pattern_distances` of each named pattern, dense and before any fit, from the measured mean pattern.

    `{pattern: {distance: [F]}}` in the heads' order; as many heads at a time as memory allows.
    """
    collect = sorted({"mean"}.union(*(collect_for(name, "dense") for name in names)))
    rows: dict[str, list[dict[str, Tensor]]] = {name: [] for name in names}
    for some, statistics in calibrate_in_groups(model, ids, heads, collect):
        for head, name in product(some, names):
            pattern = dense_pattern(statistics, [head], name)
            rows[name].append(pattern_distances(statistics.take("mean", [head]), pattern))
    return {
        name: {distance: torch.cat([each[distance] for each in parts]) for distance in DISTANCES}
        for name, parts in rows.items()
    }


def pattern_distances(reference: Tensor, pattern: CompactPattern | DensePattern) -> dict[str, Tensor]:
    """Return the distances of each pattern `[F, T, T]` from `reference [F, T, T]`, `[F]` float64 each.

    `squared_error` is the squared Frobenius norm over T² (paper, Eq. 14); the others are averaged over rows: `kl` from
    reference to pattern (nats), squared `hellinger`, half of sum (sqrt p - sqrt q)², and `total_variation`, half of
    sum |p - q|. For `kl` the pattern is floored at 1e-9 and normalised again, as targets of fits are.
    """
    length = pattern.length
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    rows = []
    for number, p in enumerate(reference.to("cpu", torch.float64)):
        q = pattern[number].dense().to("cpu", torch.float64)
        floored = q.clamp(min=FLOOR) * causal
        # Beyond the diagonal both are zero: log 0 would make 0 log 0 NaN.
        log_q = (floored / floored.sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float64).tiny).log()
        # Eq. 14.
        squared = (p - q).square().sum() / length**2
        kl = (torch.xlogy(p, p) - p * log_q).sum() / length
        hellinger = (p.sqrt() - q.sqrt()).square().sum() / (2 * length)
        rows.append([squared, kl, hellinger, (p - q).abs().sum() / (2 * length)])
    return dict(zip(DISTANCES, torch.tensor(rows, dtype=torch.float64).T, strict=True))


def distance_and_cost(distances: Record, costs: Record) -> tuple[dict[str, float], float]:
    """Correlate one distance with costs, both `{rate: {pattern: value}}`: Spearman within each rate, and stratified."""
    strata = {}
    for rate in distances:
        names = sorted(distances[rate].keys() & costs.get(rate, {}).keys())
        strata[rate] = tuple(torch.tensor([float(of[rate][name]) for name in names]) for of in (distances, costs))
    return {rate: spearman(*pair) for rate, pair in strata.items()}, stratified_spearman(list(strata.values()))


# --- storage

FORMS = {
    "dense_by_layer": "a matrix for every head of a layer with frozen heads",
    "dense_packed": "a matrix for every frozen head",
    "compact": "key logits, distance logits and normalisers",
    "allocated": "allocated to execute them",
}


@dataclass(frozen=True, kw_only=True)
class Storage(Analysis):
    """Count the bytes of the patterns of a model's frozen heads: as matrices, as vectors, and as they are executed."""

    kind = "storage"
    model: tyro.conf.Positional[Path]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save; with frozen heads."""

    def measure(self) -> dict[str, Any]:
        """Return the record; `reduction` is the paper's, matrices of whole layers over the bytes allocated."""
        source = find_model(self.model)
        model = source.model(torch.device("cpu"))
        heads = adapter_for(model).heads("frozen")
        report = storage_report(model)
        return {
            **self.header(checkpoints={"model": source.hash}),
            "heads": len(heads),
            "layers": len({layer for layer, _ in heads}),
            "bytes": asdict(report),
            "reduction": report.dense_by_layer / report.allocated if report.allocated else None,
        }

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows = [
            [words, f"{record['bytes'][name] / 1e9:.3g} GB", paper.STORAGE.get(name)] for name, words in FORMS.items()
        ]
        conditions = f"Storage of the patterns of {record['heads']} frozen heads in {record['layers']} layers, float32."
        notes = [paper.IMPLEMENTATION.note, "The paper's compact buffers are those of its execution."]
        return [conditions, Table.of("", ["form", "ours", "paper"], rows, notes)]
