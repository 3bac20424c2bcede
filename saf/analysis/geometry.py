"""Distances between fixed patterns, and how they go with what the patterns cost."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from saf.analysis.correlation import spearman, stratified_spearman
from saf.calibration import calibrate, heads_at_a_time
from saf.calibration.capture import Batch, read_batches
from saf.errors import InputError
from saf.estimates import collect_for, dense_pattern
from saf.estimates.sampling import Seed, seed_of
from saf.heads import HeadSet
from saf.patterns import CompactPattern, DensePattern
from saf.statistics import FLOOR

DISTANCES = ("squared_error", "kl", "hellinger", "total_variation")


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
