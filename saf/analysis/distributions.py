"""How attention varies over sequences, against the models that sampled patterns draw from (paper, appendix)."""

from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor

from saf.adapters import adapter_for
from saf.analysis.energy_distance import check_split, row_distances
from saf.analysis.entry_distribution import MODELS, head_entry
from saf.analysis.model import SILENT, ModelSettings, Opened, Record, Watch
from saf.analysis.profiles import blank
from saf.analysis.projection import project_profiles, sample_profiles, umap_reducer
from saf.analysis.row_models import SCALE
from saf.arguments import SHARE, Where, above, at_least
from saf.calibration import calibrate
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.records import paper
from saf.records.quantities import MISSING
from saf.records.table import Part, Table
from saf.scores import score
from saf.selection import budget, select
from saf.settings import documented
from saf.statistics import AttentionStatistics

QUERIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of the length at which the paper looks."""


@documented
@dataclass(frozen=True, kw_only=True)
class Distributions(ModelSettings):
    """Hold measured attention rows and entries against the Gaussian and Dirichlet models fitted to other sequences."""

    sequences: Annotated[int, at_least(1)] = 500
    """Sequences of the calibration partition."""
    fitted: Annotated[float, Where("a share in (0, 1)", lambda share: 0 < share < 1)] = 0.6
    """Share of the sequences that the models are fitted to; the others are held out."""
    heads: tuple[Head, ...] = ()
    """Heads to look at, those of lowest variance at --rate when none; on the command line 0:3 1:11 or a file:
    JSON pairs, or events.jsonl."""
    rate: Annotated[float, SHARE] = 0.25
    """Share of all heads to look at."""
    shown: Annotated[int, at_least(1)] = 4
    """Heads whose curves are kept for the figure, spread evenly over those looked at."""
    positions: tuple[int, ...] = ()
    """Query positions, from 0; T/16, T/8, T/4, T/2, 3T/4 and T, as in the paper, when none."""
    distance: Annotated[int, at_least(0)] = 1
    """The entry whose distribution is looked at: the key so far before the query."""
    scale: Annotated[float, above(0)] = SCALE
    """Of Dirichlet concentrations."""
    profiles: Annotated[int, at_least(1)] = 128
    """Sequences for the UMAP of profiles, with --umap."""
    umap: bool = False
    """Also project profiles of the shown heads by UMAP (needs umap-learn)."""
    seed: Annotated[int, at_least(0)] = 0
    """Of generated rows, splits and the projection."""


def measure(settings: Distributions, watch: Watch = SILENT) -> dict[str, Any]:
    """Measure, and return the record."""
    reducer = umap_reducer(settings.seed) if settings.umap else None
    opened = settings.open()
    positions = settings.positions or query_positions(opened.length)
    if max(positions) < settings.distance or not 0 < settings.fitted < 1:
        raise InputError(
            f"expected a key {settings.distance} before the last query of {positions}, and a share of sequences to fit "
            f"between 0 and 1; got {settings.fitted}"
        )
    ids = opened.calibration()
    count = sum(map(len, ids))
    fitted = round(settings.fitted * count)
    check_split(count, fitted)
    watch.say(f"calibrating on {count} sequences")
    with opened.autocast:
        heads = _heads(settings, opened, ids)
        found = calibrate(opened.model, ids, collect=("rows", "logit_rows"), heads=heads, positions=positions)
    progress = watch.countdown("heads", len(heads))
    apart = row_distances(found, heads, fitted=fitted, scale=settings.scale, seed=settings.seed, progress=progress)
    shown = evenly(heads, settings.shown)
    values = {
        "sequences": [fitted, found.num_sequences - fitted],
        "heads": heads.to_list(),
        "positions": list(found.positions),
        "scale": settings.scale,
        "rows": apart.rows,
        "normalised": apart.normalised,
        "quartile": apart.quartile,
        "medians": apart.medians,
        "entries": _entries(settings, found, heads, shown, fitted),
    }
    if reducer is not None:
        values["projections"] = _projections(settings, opened, ids, shown, reducer)
    return opened.record("distributions", values)


def tables(record: Record) -> list[Part]:
    """Return how far generated rows are from measured ones, and how far single entries are from their models."""
    fitted, held = record["sequences"]
    rows = [
        [name, MISSING if value is None else f"{value:.3f}", paper.ROW_DISTANCES.get(name)]
        for name, value in record["medians"].items()
    ]
    conditions = (
        f"Generated attention rows against measured ones: median energy distance over {len(record['heads'])} heads and "
        f"{len(record['positions'])} queries; fitted to {fitted} sequences of {record['length']:,} tokens, {held} held "
        f"out; concentrations times {record['scale']:g}."
    )
    entries = record["entries"]
    names = {"logit": "logit: normal", "gaussian": "probability: Gaussian", "dirichlet": "probability: Dirichlet"}
    steps = [[words, f"{median(entries['distances'][name]):.3f}"] for name, words in names.items()]
    title = f"Entry of query {entries['query'] + 1:,} and key {entries['key'] + 1:,}, counted from 1"
    return [
        conditions,
        Table.of("", ["rows drawn", "ours", "paper"], rows),
        Table.of(title, ["model", "median Kolmogorov-Smirnov distance"], steps, notes=paper.notes(paper.DISTRIBUTIONS)),
    ]


def query_positions(length: int) -> tuple[int, ...]:
    """Return the paper's query positions for sequences of `length` tokens, from 0: its T/16, ..., 3T/4 and T."""
    return tuple(sorted({max(1, round(share * length) - 1) for share in QUERIES}))


def evenly(heads: HeadSet, count: int) -> HeadSet:
    """Return at most `count` of the heads, spread evenly over their order."""
    order = list(heads)
    count = min(count, len(order))
    return HeadSet(order[number * len(order) // count] for number in range(count))


def _heads(settings: Distributions, opened: Opened, ids: list[Tensor]) -> HeadSet:
    """Return the heads to look at; raise InputError for a rate that selects none."""
    if settings.heads:
        return HeadSet(settings.heads)
    total = blank(adapter_for(opened.model).sites()).numel()
    if not budget(settings.rate, total):
        raise InputError(f"the rate must select at least one of {total} heads; got {settings.rate}")
    return select(score(calibrate(opened.model, ids), "variance"), settings.rate)


def _entries(
    settings: Distributions, statistics: AttentionStatistics, heads: HeadSet, shown: HeadSet, fitted: int
) -> dict[str, Any]:
    """Return the entry's distances at the last query for every head, and the curves of those shown."""
    query = statistics.positions[-1]
    found = {
        head: head_entry(
            statistics,
            head,
            query,
            fitted=fitted,
            distance=settings.distance,
            scale=settings.scale,
            seed=settings.seed,
        )
        for head in heads
    }
    distances = {name: [each.distances[name] for each in found.values()] for name in ("logit", *MODELS)}
    curves = [{"head": head, **found[head].curves()} for head in shown]
    return {"query": query, "key": query - settings.distance, "distances": distances, "curves": curves}


def _projections(
    settings: Distributions, opened: Opened, ids: list[Tensor], shown: HeadSet, reducer: Any
) -> list[dict[str, Any]]:
    """Return the plane of each shown head, from rows in the latter half of the first sequences."""
    some = torch.cat(ids)[: settings.profiles]
    with opened.autocast:
        found = calibrate(opened.model, some.split(settings.batch_size), collect=("rows",), heads=shown)
    planes = []
    for head in shown:
        rows = found.take("rows", [head])[0]
        sample = sample_profiles(rows, found.positions, scale=settings.scale, seed=settings.seed, key=head)
        planes.append({"head": head, **project_profiles(sample, seed=settings.seed, reducer=reducer)})
    return planes
