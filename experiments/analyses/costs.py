"""Costs of freezing heads before any further training, and what predicts them (paper, appendix A.3).

`one-head` freezes each head alone, `partial-spearman` correlates its costs with scores beyond layer and entropy, and
`joint-cost` freezes two sets of heads, each as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from experiments import paper
from experiments.analyses.common import (
    Analysis,
    CostMeter,
    ModelAnalysis,
    ModelWithData,
    mask_of,
    matrix,
    partial_spearman,
    read_record,
    spearman,
)
from experiments.records import Record
from saf.calibration import calibrate, gate_gradients, head_outputs
from saf.calibration.capture import measurable_heads
from saf.cli.output import print_progress
from saf.cli.parsing import read_heads
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FittedHead
from saf.freezing import fit_heads
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import adapter_for
from saf.paired import delta_of_windows
from saf.records.table import MISSING, Part, Table, correlation, percent, signed
from saf.scores import SCORES, required_inputs, score
from saf.selection import heads_at_rate, ranking
from saf.statistics import AttentionStatistics
from saf.tasks.text import heldout_windows
from saf.train.start import recorded_gradient


@dataclass(frozen=True, kw_only=True)
class OneHead(ModelAnalysis):
    """Freeze each head alone: its immediate cost on held-out windows, and which scores predict it."""

    kind = "one-head"
    windows: int = 16
    """Windows of the controller partition to measure on."""
    heldout_sequences: int = 16
    """Sequences for the scores that read outputs; 0 leaves these scores out."""
    max_fit_kl: float = 0.2
    """Largest fit KL of a head that counts, nats per row."""
    fitter: str = FreezeConfig.fitter
    """Fitter of the patterns."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads whose mean cost is shown."""

    def analyse(self, opened: ModelWithData) -> dict[str, Any]:
        """Return costs `[L, H]`, NaN for heads that were frozen before, and the scores with what they predict."""
        opened.check_rates(self.rates)
        ids = opened.calibration()
        print_progress(f"calibrating on {self.sequences} sequences")
        statistics = calibrate(opened.model, ids, collect=("mean_rows",) if self.heldout_sequences else ())
        scores = available_scores(opened, ids, statistics, self.heldout_sequences)
        meter = CostMeter(opened.model, opened.windows(self.windows), batch_size=self.batch_size)
        live = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
        config = FreezeConfig(max_fit_kl=self.max_fit_kl, storage="compact", fitter=self.fitter)
        # One pass of calibration serves the fits of all heads; they are installed one by one.
        fits = fit_heads(opened.model, ids, statistics, live, config, Stopwatch())
        by_window, fit_kl = one_head_costs(meter, fits, config.backend, tuple(statistics.variance.shape))
        change, eligible = by_window.mean(-1), HeadSet(head for head in fits if fit_kl[head] <= self.max_fit_kl)
        return {
            "windows": self.windows,
            "baseline": float(meter.baseline.mean()),
            "nll_change": change,
            "nll_change_by_window": by_window,
            "fit_kl": fit_kl,
            "eligible": eligible.to_list(),
            "scores": scores,
            "quality": {name: score_quality(values, change, eligible, self.rates) for name, values in scores.items()},
        }

    @staticmethod
    def tables(record: Record) -> list[Part]:
        quality = record["quality"]
        rates = list(next(iter(quality.values()))["mean_cost"])
        columns = ["score", "Spearman", "paper"]
        for rate in rates:
            columns += [f"mean cost, lowest {percent(rate)}", f"paper, {percent(rate)}"]
        by_score = {name: each["spearman"] for name, each in quality.items()}
        rows = []
        # Constant scores, which have no correlation, come last.
        for name in sorted(by_score, key=lambda name: -2 if by_score[name] is None else by_score[name], reverse=True):
            paper_spearman, *paper_costs = paper.SELECTOR_DIAGNOSTIC.get(name, (MISSING,) * 3)
            paper_cost = dict(zip(("0.25", "0.5"), paper_costs, strict=True))
            row = [name.replace("_", " "), correlation(by_score[name]), paper_spearman]
            for rate in rates:
                row += [signed(quality[name]["mean_cost"][rate], 4), paper_cost.get(rate)]
            rows.append(row)
        measured = int(matrix(record["nll_change"]).isfinite().sum())
        conditions = (
            f"Immediate cost of single heads, and which scores predict it: {record['windows']} held-out windows of "
            f"{record['length']:,} tokens; {len(record['eligible'])} of {measured} heads fit."
        )
        return [conditions, Table.of("", columns, rows, [paper.SELECTORS.note]).used()]


def available_scores(
    opened: ModelWithData, ids: list[Tensor], statistics: AttentionStatistics, heldout: int
) -> dict[str, Tensor]:
    """Return every score `[L, H]` whose inputs can be measured here, by name; the random score is left out."""
    print_progress("measuring the inputs of scores")
    inputs: dict[str, Any] = {"gates": gate_gradients(opened.model, ids)}
    if heldout:
        windows = heldout_windows(opened.data, length=opened.length, count=heldout)
        batches = list(windows.split(opened.analysis.batch_size))
        inputs["outputs"] = head_outputs(opened.model, batches, statistics)
    if gradient := recorded_gradient(opened.model, opened.source.state):
        inputs["gradient"] = gradient.scores()
    return {
        name: score(statistics, name, **{key: inputs[key] for key in required_inputs(name)})
        for name in SCORES
        if name != "random" and inputs.keys() >= set(required_inputs(name))
    }


def one_head_costs(
    meter: CostMeter, fits: Mapping[Head, FittedHead], backend: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Freeze each head alone: return the loss changes of windows `[L, H, W]` and the fits' KL `[L, H]`, float64 nats.

    Heads without a fit are NaN.
    """
    by_window = torch.full((*shape, len(meter.baseline)), torch.nan, dtype=torch.float64)
    fit_kl = torch.full(shape, torch.nan, dtype=torch.float64)
    for head, fit in tqdm(fits.items(), "heads", mininterval=5):
        assert fit.pattern is not None
        losses = meter.losses(HeadSet([head]), {head: fit.pattern}, backend=backend)
        fit_kl[head], by_window[head] = fit.fit_kl, losses - meter.baseline
    return by_window, fit_kl


def score_quality(values: Tensor, change: Tensor, eligible: HeadSet, rates: Sequence[float]) -> dict[str, Any]:
    """Return a score's rank correlation with the cost, and by rate the mean cost (%) of the heads that it ranks lowest.

    Only eligible heads count. A rate is a share of all heads; where fewer are eligible, it takes them all.
    """
    change = change.masked_fill(~mask_of(eligible, change.shape), torch.nan)
    # A head's cost is the relative increase of perplexity (tab:selector-diagnostic).
    percents, order = 100 * torch.expm1(change), ranking(values, only=eligible)
    lowest = {rate: order[: heads_at_rate(rate, values.numel())] for rate in rates}
    means = {rate: float(np.mean([percents[head] for head in heads] or [np.nan])) for rate, heads in lowest.items()}
    return {"spearman": spearman(values, change), "mean_cost": means}


# --- beyond layer and entropy

CORRELATIONS = {
    "spearman": "Spearman",
    "layer": "beyond layer",
    "layer_entropy": "beyond layer and entropy",
    "with_entropy": "with entropy",
}


@dataclass(frozen=True, kw_only=True)
class PartialSpearman(Analysis):
    """Correlate the ranks of scores and of single heads' costs beyond the layer, and beyond layer and entropy."""

    kind = "partial-spearman"
    one_head: tyro.conf.Positional[Path]
    """Record of the analysis one-head."""
    profiles: Path | None = None
    """Record of the analysis profiles of the same model; adds the control for entropy."""

    def measure(self) -> dict[str, Any]:
        """Return the record: correlations over the heads whose fit was accepted."""
        costs = read_record(self.one_head, "one-head")
        change = matrix(costs["nll_change"])
        allowed = mask_of(HeadSet(costs["eligible"]), change.shape)
        change = change.masked_fill(~allowed, torch.nan)
        files, entropy = {"one_head": self.one_head}, None
        if self.profiles is not None:
            profiles = read_record(self.profiles, "profiles")
            entropy, files["profiles"] = matrix(profiles["profiles"]["entropy"]), self.profiles
            first, second = (record["provenance"]["checkpoints"].get("model") for record in (costs, profiles))
            if (first and second and first != second) or entropy.shape != change.shape:
                raise InputError(f"the two files must be about one model, got checkpoints {first} and {second}")
        correlations: dict[str, dict[str, float]] = {}
        for name, rows in costs["scores"].items():
            values = matrix(rows)
            each = {"spearman": spearman(values, change), "layer": partial_spearman(values, change)}
            if entropy is not None:
                each["layer_entropy"] = partial_spearman(values, change, covariates=[entropy])
                each["with_entropy"] = spearman(values, entropy.masked_fill(~allowed, torch.nan))
            correlations[name] = each
        origin = {name: costs["provenance"][name] for name in ("checkpoints", "data")}
        header = self.header(**origin, files=files)
        return {**header, "heads": int(allowed.sum()), "correlations": correlations}

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows = []
        for name, each in record["correlations"].items():
            # The paper has the correlations of the variance alone.
            papers = paper.PARTIAL if name == "variance" else {}
            cells = [
                f"{correlation(each[key])} (paper {papers[key]})"
                if key in papers and key in each
                else correlation(each.get(key))
                for key in CORRELATIONS
            ]
            rows.append([name.replace("_", " "), *cells])
        table = Table.of("", ["score", *CORRELATIONS.values()], rows, [paper.SELECTION_TEXT.note])
        return [f"Scores and the cost of single heads, layer and entropy held: {record['heads']} heads.", table.used()]


# --- sets of heads


@dataclass(frozen=True, kw_only=True)
class JointCost(ModelAnalysis):
    """Freeze two head sets, each as a whole: their immediate costs on the same windows, and their overlap."""

    kind = "joint-cost"
    first: tuple[str, ...]
    """Heads as LAYER:HEAD, or a file or run that lists them."""
    second: tuple[str, ...]
    """The other set."""
    windows: int = 16
    """Windows of the controller partition to measure on."""
    skip: int = 0
    """Windows at the beginning of the partition to leave out, which another analysis measured on."""
    fitter: str = FreezeConfig.fitter
    """Fitter of the patterns."""

    def analyse(self, opened: ModelWithData) -> dict[str, Any]:
        """Return the changes of perplexity; `difference` is the second set's relative to the first's.

        Heads count whatever their fit KL is: the sets are frozen as they are.
        """
        sets = {"first": HeadSet(read_heads(self.first)), "second": HeadSet(read_heads(self.second))}
        # A head of both sets is fitted once, and has one pattern in both.
        union = sets["first"] | sets["second"]
        measurable_heads(adapter_for(opened.model), union)  # raises for heads that cannot be frozen
        ids, windows = opened.calibration(), opened.windows(self.skip + self.windows)[self.skip :]
        statistics, config = calibrate(opened.model, ids), FreezeConfig(storage="compact", fitter=self.fitter)
        fits = fit_heads(opened.model, ids, statistics, union, config, Stopwatch())
        meter = CostMeter(opened.model, windows, batch_size=self.batch_size)
        patterns = {head: each.pattern for head, each in fits.items() if each.pattern is not None}
        losses = {name: meter.losses(heads, patterns) for name, heads in sets.items()}
        return {
            "heads": [heads.to_list() for heads in sets.values()],
            **{name: delta_of_windows(meter.baseline, each) for name, each in losses.items()},
            "difference": delta_of_windows(losses["first"], losses["second"]),
            "overlap": len(sets["first"] & sets["second"]),
        }

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows, counts = [], [*map(len, record["heads"]), None]
        for name, count in zip(("first", "second", "difference"), counts, strict=True):
            values = (record[name]["delta_ppl_percent"], *record[name]["ci95"])
            change, low, high = (signed(value, 3) for value in values)
            rows.append([name, count, change, f"{low} to {high}"])
        papers = paper.JOINT_COST
        return [
            f"Immediate cost of two head sets: {record['overlap']} heads in common, windows of {record['length']:,} "
            f"tokens. Paper: sets by residual cosine {papers['residual_cosine']}, by variance {papers['variance']}, "
            f"{papers['overlap']} in common.",
            Table.of("", ["set", "heads", "perplexity", "95% interval"], rows, [paper.SELECTION_TEXT.note]),
        ]
