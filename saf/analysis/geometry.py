"""Distances between fixed patterns, and how they go with what the patterns cost (paper, Eq. 14)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.analysis.correlation import spearman, stratified_spearman
from saf.analysis.model import SILENT, ModelSettings, Record, Watch
from saf.analysis.profiles import blank
from saf.arguments import SHARES, at_least
from saf.calibration import calibrate, heads_at_a_time
from saf.calibration.capture import Batch, read_batches
from saf.errors import InputError
from saf.estimates import PATTERNS, collect_for, dense_pattern
from saf.estimates.sampling import Seed, seed_of
from saf.heads import HeadSet
from saf.patterns import CompactPattern, DensePattern
from saf.records import paper
from saf.records.files import read_json
from saf.records.quantities import MISSING, correlation, percent
from saf.records.table import Part, Table
from saf.scores import SCORES, score
from saf.selection import budget, select
from saf.settings import OneOf, documented
from saf.statistics import FLOOR

DISTANCES = ("squared_error", "kl", "hellinger", "total_variation")


@documented
@dataclass(frozen=True, kw_only=True)
class Geometry(ModelSettings):
    """Measure how far each fixed pattern is from the mean pattern, on nested head sets, beside its cost."""

    score: Annotated[str, OneOf(SCORES)] = "variance"
    """Which statistics' score ranks the heads."""
    rates: Annotated[tuple[float, ...], SHARES] = (0.1, 0.25, 0.5, 0.75)
    """Shares of all heads."""
    seed: Annotated[int, at_least(0)] = 0
    """Of sampled patterns."""
    costs: Path | None = None
    """JSON of what each pattern cost: {"0.25": {"mean": 0.7, ...}, ...}; adds rank correlations."""


def measure(settings: Geometry, watch: Watch = SILENT) -> dict[str, Any]:
    """Measure, and return the record: `distances` are `{distance: {rate: {pattern: mean over heads}}}`."""
    opened = settings.open()
    costs = _costs(settings, blank(adapter_for(opened.model).sites()).numel())
    ids = opened.calibration()
    with opened.autocast:
        scores = score(calibrate(opened.model, ids), settings.score)
        nested = {rate: select(scores, rate) for rate in settings.rates}
        largest = max(nested.values(), key=len)
        found = distances_from_mean(opened.model, ids, largest, PATTERNS, seed=settings.seed)
    at = {rate: [largest.index(head) for head in heads] for rate, heads in nested.items()}
    distances = {
        distance: {
            str(rate): {name: each[distance][index].mean().item() for name, each in found.items()}
            for rate, index in at.items()
        }
        for distance in DISTANCES
    }
    values: dict[str, Any] = {"distances": distances}
    if costs is not None:
        values["correlations"] = {each: distance_and_cost(distances[each], costs) for each in DISTANCES}
    return opened.record("geometry", values)


def tables(record: Record) -> list[Part]:
    """Return how far patterns are from the mean, and how that goes with their cost."""
    distances = record["distances"]
    by_rate = next(iter(distances.values()))
    rows = [
        [f"{percent(rate)} {pattern.replace('_', ' ')}", *(f"{each[rate][pattern]:.3e}" for each in distances.values())]
        for rate in by_rate
        for pattern in by_rate[rate]
    ]
    head = ["heads, pattern", *(name.replace("_", " ") for name in distances)]
    notes = paper.notes(paper.GEOMETRY)
    parts: list[Part] = [f"Distance of fixed patterns from the mean pattern: {record['length']:,} tokens."]
    if found := record.get("correlations"):
        return [*parts, Table.of("", head, rows), _correlation_table(found, notes)]
    return [*parts, Table.of("", head, rows, notes=notes)]


def _correlation_table(found: Record, notes: list[str]) -> Table:
    """Return the table of Spearman correlations, a distance a row, with the paper's in parentheses."""
    rows: list[list[str]] = []
    columns: list[str] = []
    for name, (within, pooled) in found.items():
        beside = paper.GEOMETRY_CORRELATIONS.get(name, {})
        values = {**within, "stratified": pooled}
        columns = [rate if rate == "stratified" else percent(rate) for rate in values]
        cells = [f"{correlation(value)} ({beside.get(rate, MISSING)})" for rate, value in values.items()]
        rows.append([name.replace("_", " "), *cells])
    title = "Spearman of each distance with what the patterns cost (paper)"
    return Table.of(title, ["distance", *columns], rows, notes=notes)


def _costs(settings: Geometry, heads: int) -> dict[str, Any] | None:
    """Return the costs, if given; raise InputError, before any work, for rates and costs that cannot be used."""
    if not all(budget(rate, heads) for rate in settings.rates):
        raise InputError(f"each rate must select at least one of {heads} heads; got {settings.rates}")
    if settings.costs is None:
        return None
    costs = read_json(settings.costs, advice="expected loss changes by rate and pattern, a JSON object")
    distance_and_cost({str(rate): dict.fromkeys(PATTERNS, 0.0) for rate in settings.rates}, costs)
    return costs


def pattern_distances(reference: Tensor, pattern: CompactPattern | DensePattern) -> dict[str, Tensor]:
    """Return how far each pattern `[F, T, T]` is from `reference [F, T, T]`, `[F]` float64 each.

    `squared_error` is the squared Frobenius norm over T² (paper, Eq. 14); the others are averaged over rows: `kl` from
    reference to pattern (nats), squared `hellinger`, half of sum (sqrt p - sqrt q)², and `total_variation`, half of
    sum |p - q|. For `kl` the pattern is floored at 1e-9 and normalised again, as targets of fits are. Raises InputError
    for shapes that differ.
    """
    length = pattern.length
    if reference.shape != (*pattern.shape, length, length):
        raise InputError(f"expected a reference {[*pattern.shape, length, length]}; got {list(reference.shape)}")
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    rows = []
    for number in range(len(reference)):
        p, q = (each.to("cpu", torch.float64) for each in (reference[number], pattern[number].dense()))
        floored = q.clamp(min=FLOOR) * causal
        log_q = (floored / floored.sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float64).tiny).log()
        rows.append(
            [
                (p - q).square().sum() / length**2,
                (torch.xlogy(p, p) - p * log_q).sum() / length,
                (p.sqrt() - q.sqrt()).square().sum() / (2 * length),
                (p - q).abs().sum() / (2 * length),
            ]
        )
    return dict(zip(DISTANCES, torch.tensor(rows, dtype=torch.float64).T, strict=True))


def distances_from_mean(
    model: nn.Module, batches: Iterable[Batch], heads: HeadSet, patterns: Iterable[str], *, seed: Seed = 0
) -> dict[str, dict[str, Tensor]]:
    """Return `pattern_distances` of each named pattern, dense and before any fit, from the measured mean pattern.

    `{pattern: {distance: [F]}}` in the heads' order. The model is calibrated on `batches`, as many heads at a time as
    memory allows, and left as it was. `seed` of sampled patterns is a number or a generator that draws one.
    """
    seed = seed_of(seed)
    ids, names = read_batches(batches), list(patterns)
    collect = sorted({"mean"}.union(*(collect_for(name, "dense") for name in names)))
    size = heads_at_a_time(model, collect, sequences=sum(map(len, ids)), length=ids[0].shape[1])
    rows: dict[str, dict[str, list[Tensor]]] = {name: {distance: [] for distance in DISTANCES} for name in names}
    ordered = list(heads)
    for first in range(0, len(ordered), size):
        some = HeadSet(ordered[first : first + size])
        found = calibrate(model, ids, collect=collect, heads=some)
        for head in some:
            reference = found.take("mean", [head])
            for name in names:
                pattern = dense_pattern(found, [head], name, seed=seed)
                for distance, values in pattern_distances(reference, pattern).items():
                    rows[name][distance].append(values)
    return {name: {distance: torch.cat(parts) for distance, parts in found.items()} for name, found in rows.items()}


def distance_and_cost(
    distances: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, float]]
) -> tuple[dict[str, float], float]:
    """Correlate one distance with costs, both `{rate: {pattern: value}}`: Spearman within each rate, and stratified.

    Rates and patterns that both know are used. Raises InputError when a rate has fewer than two patterns in common.
    """
    strata = {}
    for rate in distances:
        names = sorted(distances[rate].keys() & costs.get(rate, {}).keys())
        if len(names) < 2:
            raise InputError(f"rate {rate}: {len(names)} patterns have both a distance and a cost; a rank needs two")
        strata[rate] = tuple(torch.tensor([float(of[rate][name]) for name in names]) for of in (distances, costs))
    return {rate: spearman(*pair) for rate, pair in strata.items()}, stratified_spearman(strata.values())
