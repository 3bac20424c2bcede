"""Analyses that measure a model: one-head, joint-cost, profiles, geometry."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

from saf.analysis.geometry import DISTANCES, distance_and_cost, distances_from_mean
from saf.analysis.joint import joint_cost
from saf.analysis.one_head import available_scores, one_head_costs, score_quality
from saf.analysis.profiles import PROFILES, attention_profiles, layer_matched
from saf.calibration import calibrate
from saf.cli.models import Source, open_data, open_source, pick_device
from saf.cli.options import Heads, Score, read_heads
from saf.cli.output import columns, show
from saf.data import TokenData, calibration_windows, sequential_windows
from saf.errors import InputError
from saf.evaluate.perplexity import autocast
from saf.files import read_json, write_json
from saf.freeze import FreezeConfig
from saf.heads import HeadSet
from saf.patterns import PATTERNS
from saf.scores import score
from saf.selection import select
from saf.train.batches import heldout_batches
from saf.train.gradients import recorded_gradient


@dataclass(kw_only=True)
class OnModel:
    """What every analysis of a model asks for."""

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on if not given."""
    out: Path | None = None
    """Write the result as JSON into this file."""
    sequences: int = 32
    """Calibration sequences."""
    calibration_seed: int | None = None
    """Of the choice of calibration sequences (the run's)."""
    length: int | None = None
    """Tokens of a sequence or window (the run's)."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""
    json: bool = False
    """Print JSON instead of a table."""

    def open(self) -> "Opened":
        """Open model and data."""
        source = open_source(self.model)
        data = open_data(self.data, source)
        device = pick_device(self.device)
        model: Any = source.model(device)
        settings = source.state.get("settings") or {}
        length = self.length or settings.get("length") or model.config.max_length
        return Opened(source, model, data, length, autocast(device, self.precision))

    def calibration(self, opened: "Opened") -> list[Tensor]:
        """Return the calibration sequences."""
        settings = opened.source.state.get("settings") or {}
        seed = settings.get("seed", 0) if self.calibration_seed is None else self.calibration_seed
        windows = calibration_windows(opened.data, length=opened.length, count=self.sequences, seed=seed)
        return list(windows.split(self.batch_size))

    def finish(self, name: str, opened: "Opened", values: Mapping[str, Any], *tables: Any) -> dict[str, Any]:
        """Write and show the record of an analysis, and return it."""
        record = {"schema": f"saf.analysis/{name}/1", "model": str(opened.source.folder), "length": opened.length}
        record |= values
        if self.out is not None:
            write_json(self.out, record)
        show(record, *tables, as_json=self.json)
        return record


@dataclass(frozen=True)
class Opened:
    """A model with its data, and the precision to run it in."""

    source: Source
    model: nn.Module
    data: TokenData
    length: int
    autocast: AbstractContextManager[Any]

    def windows(self, count: int) -> Tensor:
        """Return the first windows `[count, length + 1]` of the controller partition."""
        return sequential_windows(self.data.tokens("controller"), self.length, count)


@dataclass(kw_only=True)
class OneHead(OnModel):
    """Freeze each head alone: its immediate cost on held-out windows, and which scores foretell it."""

    windows: int = 16
    """Windows of the controller partition to measure on: its first ones."""
    heldout_sequences: int = 16
    """Sequences that output-aware scores read: its last ones; 0 leaves these scores out."""
    max_fit_kl: float = 0.2
    """Heads with a larger fit KL, in nats, do not count."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads whose mean cost is told."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened, config = self.open(), FreezeConfig(max_fit_kl=self.max_fit_kl)
        model, ids, count = opened.model, self.calibration(opened), self.heldout_sequences
        heldout, collect = None, ()
        if count:
            heldout = heldout_batches(opened.data, length=opened.length, count=count, batch_size=self.batch_size)
            collect = ("mean_rows",)
        gradient = recorded_gradient(model, opened.source.state)
        needed = {"gradient": gradient.scores()} if gradient else {}
        windows = opened.windows(self.windows)
        with opened.autocast:
            statistics = calibrate(model, ids, collect=collect)
            scores = available_scores(model, ids, statistics, heldout=heldout, needed=needed)
            costs = one_head_costs(model, ids, statistics, windows, config=config, batch_size=self.batch_size)
        quality = score_quality(costs, scores, rates=self.rates)
        record = {
            "windows": len(windows),
            "baseline": costs.baseline,
            "nll_change": costs.change,
            "fit_kl": costs.fit_kl,
            "eligible": costs.eligible.to_list(),
            "scores": scores,
            "quality": {name: asdict(each) for name, each in quality.items()},
        }
        rows = [
            [name, f"{each.spearman:.3f}", *(f"{cost:.4f}%" for cost in each.mean_cost.values())]
            for name, each in sorted(quality.items(), key=lambda item: -item[1].spearman)
        ]
        measured = int(statistics.measured.sum())
        title = f"cost of single heads on {len(windows)} windows: {len(costs.eligible)} of {measured} heads fit"
        head = ["score", "Spearman", *(f"mean cost, lowest {rate:.0%}" for rate in self.rates)]
        return self.finish("one-head", opened, record, columns(title, head, rows))


@dataclass(kw_only=True)
class JointCost(OnModel):
    """Freeze two head sets, each as a whole: their immediate costs on the same windows, and their overlap."""

    first: Heads
    """Heads, as 0:3 1:11 or a JSON file of pairs (such as freeze.json)."""
    second: Heads
    """The other set, written the same way."""
    windows: int = 16
    """Windows of the controller partition to measure on."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        first, second = (HeadSet(read_heads(words)) for words in (self.first, self.second))
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
        return self.finish(
            "joint-cost", opened, record, columns(title, ["set", "heads", "perplexity", "95% interval"], rows)
        )


@dataclass(kw_only=True)
class Profiles(OnModel):
    """How heads spread their attention, selected heads against unselected ones of the same layers."""

    selected: Heads = ()
    """Heads to compare with the others, as 0:3 1:11 or a JSON file of pairs (such as freeze.json)."""
    windows: int = 128
    """Windows of the controller partition to measure on."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        with opened.autocast:
            windows = opened.windows(self.windows)[:, :-1]
            found = attention_profiles(opened.model, windows.split(self.batch_size))
        chosen = HeadSet(read_heads(self.selected))
        compared = {name: layer_matched(values, chosen) for name, values in found.items()} if len(chosen) else {}
        rows = [
            [name, *(f"{value:.4f}" for value in (found[name].nanmean().item(), *compared.get(name, ())))]
            for name in PROFILES
        ]
        head = ["profile", "all heads", *(("selected", "unselected, layer-matched") if compared else ())]
        title = f"attention profiles over {len(windows)} windows"
        record = {"windows": len(windows), "profiles": found, "selected": chosen.to_list(), "matched": compared}
        return self.finish("profiles", opened, record, columns(title, head, rows))


@dataclass(kw_only=True)
class Geometry(OnModel):
    """How far each fixed pattern is from the mean pattern, on nested head sets, and how that goes with its cost."""

    score: Score = "variance"
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
        ids = self.calibration(opened)
        with opened.autocast:
            scores = score(calibrate(opened.model, ids), self.score or "variance")
            nested = {rate: select(scores, rate) for rate in self.rates}
            largest = max(nested.values(), key=len)
            if not all(map(len, nested.values())):
                raise InputError(f"each rate must select at least one of {scores.numel()} heads; got {self.rates}")
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
        tables = [columns("distance from the mean pattern", ["heads, pattern", *DISTANCES], rows)]
        values: dict[str, Any] = {"distances": record}
        if self.costs is not None:
            costs = read_json(self.costs)
            values["correlations"] = {each: distance_and_cost(record[each], costs) for each in DISTANCES}
            rows = [
                [each, *(f"{value:.3f}" for value in (*within.values(), pooled))]
                for each, (within, pooled) in values["correlations"].items()
            ]
            head = ["Spearman with cost", *(f"{rate:.0%}" for rate in self.rates), "stratified"]
            tables.append(columns("distance and cost", head, rows))
        return self.finish("geometry", opened, values, *tables)
