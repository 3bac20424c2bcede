"""Analyses that measure a model: joint-cost, profiles, geometry."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from saf.adapters import adapter_for
from saf.analysis.geometry import DISTANCES, distance_and_cost, distances_from_mean
from saf.analysis.joint import joint_cost
from saf.analysis.profiles import PROFILES, attention_profiles, blank, layer_matched
from saf.calibration import calibrate
from saf.calibration.capture import check_heads
from saf.cli.analyze_base import OnModel, Waiting
from saf.errors import InputError
from saf.estimates import PATTERNS
from saf.heads import Head, HeadSet
from saf.records.files import read_json
from saf.records.table import Table
from saf.scores import SCORES, score
from saf.selection import budget, select
from saf.settings import OneOf


@dataclass(kw_only=True)
class JointCost(OnModel):
    """Freeze two head sets, each as a whole: their immediate costs on the same windows, and their overlap."""

    first: tuple[Head, ...]
    """Heads, as 0:3 1:11 or a file: JSON pairs, or events.jsonl."""
    second: tuple[Head, ...]
    """The other set, written the same way."""
    windows: int = 16
    """Windows of the controller partition to measure on."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        first, second = map(HeadSet, (self.first, self.second))
        check_heads(adapter_for(opened.model), first | second)
        ids, windows = self.calibration(opened), opened.windows(self.windows)
        with opened.autocast:
            statistics = calibrate(opened.model, ids)
            found = joint_cost(opened.model, ids, statistics, windows, first, second, batch_size=self.batch_size)
        sizes = {"first": len(first), "second": len(second), "difference": None}
        rows = [
            [name, size, f"{each['delta_ppl_percent']:+.3f}%", "{:+.3f} to {:+.3f}".format(*each["ci95"])]
            for (name, size), each in zip(sizes.items(), (found.first, found.second, found.difference), strict=True)
        ]
        title = f"immediate cost on {len(windows)} windows; {found.overlap} heads in common"
        record = {"heads": [first.to_list(), second.to_list()], **asdict(found)}
        table = Table.of(title, ["set", "heads", "perplexity", "95% interval"], rows)
        return self.finish(self.record("joint-cost", opened, record), table)


@dataclass(kw_only=True)
class Profiles(OnModel):
    """How heads spread their attention, selected heads against unselected ones of the same layers."""

    selected: tuple[Head, ...] = ()
    """Heads to compare with the others, as 0:3 1:11 or a file: JSON pairs, or events.jsonl."""
    windows: int = 128
    """Windows of the controller partition to measure on."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        chosen = HeadSet(self.selected)
        if len(chosen):
            layer_matched(blank(adapter_for(opened.model).sites()), chosen)  # raises now what it would raise afterwards
        with opened.autocast:
            windows = opened.windows(self.windows)[:, :-1]
            waiting = Waiting("windows", len(windows))
            found = attention_profiles(opened.model, windows.split(self.batch_size), progress=waiting)
        compared = {name: layer_matched(values, chosen) for name, values in found.items()} if len(chosen) else {}
        rows = [
            [name, *(f"{value:.4f}" for value in (found[name].nanmean().item(), *compared.get(name, ())))]
            for name in PROFILES
        ]
        head = ["profile", "all heads", *(("selected", "unselected, layer-matched") if compared else ())]
        title = f"attention profiles over {len(windows)} windows"
        record = {"windows": len(windows), "profiles": found, "selected": chosen.to_list(), "matched": compared}
        return self.finish(self.record("profiles", opened, record), Table.of(title, head, rows))


@dataclass(kw_only=True)
class Geometry(OnModel):
    """How far each fixed pattern is from the mean pattern, on nested head sets, and how that goes with its cost."""

    score: Annotated[str, OneOf(SCORES)] = "variance"
    """Which statistics' score ranks the heads."""
    rates: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)
    """Shares of all heads."""
    seed: int = 0
    """Of sampled patterns."""
    costs: Path | None = None
    """JSON of what each pattern cost: {"0.25": {"mean": 0.7, ...}, ...}; adds rank correlations."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        costs = self._costs(blank(adapter_for(opened.model).sites()).numel())
        ids = self.calibration(opened)
        with opened.autocast:
            scores = score(calibrate(opened.model, ids), self.score or "variance")
            nested = {rate: select(scores, rate) for rate in self.rates}
            largest = max(nested.values(), key=len)
            found = distances_from_mean(opened.model, ids, largest, PATTERNS, seed=self.seed)
        at = {rate: [largest.index(head) for head in heads] for rate, heads in nested.items()}
        record: dict[str, Any] = {
            distance: {
                str(rate): {name: each[distance][index].mean().item() for name, each in found.items()}
                for rate, index in at.items()
            }
            for distance in DISTANCES
        }
        rows = [[f"{float(rate):.0%} {name}", *(f"{record[distance][rate][name]:.3e}" for distance in DISTANCES)]
                for rate in map(str, self.rates) for name in PATTERNS]  # fmt: skip
        tables = [Table.of("distance from the mean pattern", ["heads, pattern", *DISTANCES], rows)]
        values: dict[str, Any] = {"distances": record}
        if costs is not None:
            values["correlations"] = {each: distance_and_cost(record[each], costs) for each in DISTANCES}
            rows = [
                [each, *(f"{value:.3f}" for value in (*within.values(), pooled))]
                for each, (within, pooled) in values["correlations"].items()
            ]
            head = ["Spearman with cost", *(f"{rate:.0%}" for rate in self.rates), "stratified"]
            tables.append(Table.of("distance and cost", head, rows))
        return self.finish(self.record("geometry", opened, values), *tables)

    def _costs(self, heads: int) -> dict[str, Any] | None:
        """Return the costs, if given; raise InputError, before any work, for rates and costs that cannot be used."""
        if not all(budget(rate, heads) for rate in self.rates):
            raise InputError(f"each rate must select at least one of {heads} heads; got {self.rates}")
        if self.costs is None:
            return None
        costs = read_json(self.costs)
        distance_and_cost({str(rate): dict.fromkeys(PATTERNS, 0.0) for rate in self.rates}, costs)
        return costs
