"""`saf analyze distributions`: how attention varies over sequences, against the models of sampled patterns."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from saf.adapters import adapter_for
from saf.analysis.distributions import check_split, head_entry, query_positions, row_distances
from saf.analysis.entry_cdfs import FAMILIES
from saf.analysis.profiles import blank
from saf.analysis.projection import project_profiles, sample_profiles, umap_reducer
from saf.analysis.row_models import SCALE
from saf.calibration import calibrate
from saf.cli.analyze_base import OnModel, Opened, Waiting, say
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.records.table import Table
from saf.scores import score
from saf.selection import budget, select
from saf.statistics import AttentionStatistics


@dataclass(kw_only=True)
class Distributions(OnModel):
    """Hold measured attention rows and entries against the Gaussian and Dirichlet models fitted to other sequences."""

    sequences: int = 500
    """Sequences of the calibration partition."""
    fitted: float = 0.6
    """Share of the sequences that the models are fitted to; the others are held out."""
    heads: tuple[Head, ...] = ()
    """Heads to look at, as 0:3 1:11 or a JSON file of pairs; those of lowest variance at --rate if not given."""
    rate: float = 0.25
    """Share of all heads to look at."""
    shown: int = 4
    """Heads whose curves are kept for the figure, spread evenly over those looked at."""
    positions: tuple[int, ...] = ()
    """Query positions, from 0; T/16, T/8, T/4, T/2, 3T/4 and T, as in the paper, if not given."""
    distance: int = 1
    """The entry whose distribution is looked at: the key so far before the query."""
    scale: float = SCALE
    """Of Dirichlet concentrations."""
    profiles: int = 128
    """Sequences for the UMAP of profiles, with --umap."""
    umap: bool = False
    """Also project profiles of the shown heads by UMAP (needs umap-learn)."""
    seed: int = 0
    """Of generated rows, splits and the projection."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        reducer = umap_reducer(self.seed) if self.umap else None
        opened = self.open()
        positions = self.positions or query_positions(opened.length)
        if max(positions) < self.distance or not 0 < self.fitted < 1:
            raise InputError(
                f"expected a key {self.distance} before the last query of {positions}, and a share of sequences to fit "
                f"between 0 and 1; got {self.fitted}"
            )
        ids = self.calibration(opened)
        count = sum(map(len, ids))
        fitted = round(self.fitted * count)
        check_split(count, fitted)
        say(f"calibrating on {count} sequences")
        with opened.autocast:
            heads = self._heads(opened, ids)
            found = calibrate(opened.model, ids, collect=("rows", "logit_rows"), heads=heads, positions=positions)
        waiting = Waiting("heads", len(heads))
        apart = row_distances(found, heads, fitted=fitted, scale=self.scale, seed=self.seed, progress=waiting)
        shown = evenly(heads, self.shown)
        record = {
            "sequences": [fitted, found.num_sequences - fitted],
            "heads": heads.to_list(),
            "positions": list(found.positions),
            "scale": self.scale,
            "rows": apart.rows,
            "normalised": apart.normalised,
            "quartile": apart.quartile,
            "medians": apart.medians,
            "entries": self._entries(found, heads, shown, fitted),
        }
        if reducer is not None:
            record["projections"] = self._projections(opened, ids, shown, reducer)
        return self.finish(self.record("distributions", opened, record), *_tables(record))

    def _heads(self, opened: Opened, ids: list[Tensor]) -> HeadSet:
        if self.heads:
            return HeadSet(self.heads)
        total = blank(adapter_for(opened.model).sites()).numel()
        if not budget(self.rate, total):
            raise InputError(f"the rate must select at least one of {total} heads; got {self.rate}")
        return select(score(calibrate(opened.model, ids), "variance"), self.rate)

    def _entries(self, statistics: AttentionStatistics, heads: HeadSet, shown: HeadSet, fitted: int) -> dict[str, Any]:
        """Return the entry's distances at the last query for every head, and the curves of those shown."""
        query = statistics.positions[-1]
        options = {"fitted": fitted, "distance": self.distance, "scale": self.scale, "seed": self.seed}
        found = {head: head_entry(statistics, head, query, **options) for head in heads}
        distances = {name: [each.distances[name] for each in found.values()] for name in ("logit", *FAMILIES)}
        curves = [{"head": head, **found[head].curves()} for head in shown]
        return {"query": query, "key": query - self.distance, "distances": distances, "curves": curves}

    def _projections(self, opened: Opened, ids: list[Tensor], shown: HeadSet, reducer: Any) -> list[dict[str, Any]]:
        """Return the plane of each shown head, from rows in the latter half of the first sequences."""
        some = torch.cat(ids)[: self.profiles]
        with opened.autocast:
            found = calibrate(opened.model, some.split(self.batch_size), collect=("rows",), heads=shown)
        planes = []
        for head in shown:
            rows = found.take("rows", [head])[0]
            sample = sample_profiles(rows, found.positions, scale=self.scale, seed=self.seed, key=head)
            planes.append({"head": head, **project_profiles(sample, seed=self.seed, reducer=reducer)})
        return planes


def evenly(heads: HeadSet, count: int) -> HeadSet:
    """Return at most `count` of the heads, spread evenly over their order."""
    order = list(heads)
    count = min(count, len(order))
    return HeadSet(order[number * len(order) // count] for number in range(count))


def _tables(record: dict[str, Any]) -> list[Any]:
    fitted, held = record["sequences"]
    title = f"models of {fitted} sequences against {held} others, {len(record['heads'])} heads"
    rows = [[name, f"{value:.3f}"] for name, value in record["medians"].items()]
    head = ["rows drawn", f"median energy distance over heads and {len(record['positions'])} queries"]
    entries = record["entries"]
    names = {"logit": "logit: normal", "gaussian": "probability: Gaussian", "dirichlet": "probability: Dirichlet"}
    steps = [[words, f"{median(entries['distances'][name]):.3f}"] for name, words in names.items()]
    entry = f"entry of query {entries['query'] + 1:,} and key {entries['key'] + 1:,}, counted from 1"
    return [Table.of(title, head, rows), Table.of(entry, ["model", "median Kolmogorov-Smirnov distance"], steps)]
