"""The cost of freezing each head alone, and the scores that predict it (A.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from experiments import paper
from experiments.analyses.common import (
    CostMeter,
    ModelSettings,
    Opened,
    Record,
    check_rates,
    mask_of,
    matrix,
    spearman,
    subplots,
)
from saf.calibration import calibrate, gate_gradients, head_outputs
from saf.cli.output import say
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FittedHead
from saf.freezing import fit_heads
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.records.table import MISSING, Part, Table, correlation, percent, signed
from saf.scores import SCORES, required_inputs, score
from saf.selection import budget, ranking
from saf.statistics import AttentionStatistics
from saf.tasks.text import heldout_batches
from saf.train.events import recorded_gradient


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    """Freeze each head alone: its immediate cost on held-out windows, and which scores predict it."""

    windows: int = 16
    """Windows of the controller partition to measure on."""
    heldout_sequences: int = 16
    """Sequences for the scores that read outputs; 0 leaves these scores out."""
    max_fit_kl: float = 0.2
    """Largest fit KL of a head that counts, nats per row."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads whose mean cost is shown."""


@dataclass(frozen=True)
class Costs:
    """Paired loss changes of heads frozen alone; NaN for heads that were frozen before."""

    by_window: Tensor
    """`[L, H, W]` float64, nats per token."""
    fit_kl: Tensor
    """`[L, H]` nats per row."""
    eligible: HeadSet
    """Heads whose fit KL is within the limit."""

    @property
    def change(self) -> Tensor:
        """The means over windows, `[L, H]`."""
        return self.by_window.mean(-1)

    def entries(self) -> dict[str, Any]:
        """Return the costs under their names in the record."""
        return {
            "nll_change": self.change,
            "nll_change_by_window": self.by_window,
            "fit_kl": self.fit_kl,
            "eligible": self.eligible.to_list(),
        }


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record."""
    check_rates(settings.rates)
    opened = settings.open()
    with opened.autocast:
        ids = opened.calibration()
        say(f"calibrating on {settings.sequences} sequences")
        statistics = calibrate(opened.model, ids, collect=("mean_rows",) if settings.heldout_sequences else ())
        scores = available_scores(opened, ids, statistics, settings.heldout_sequences)
        meter = CostMeter(opened.model, opened.windows(settings.windows), batch_size=settings.batch_size)
        live = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
        config = FreezeConfig(max_fit_kl=settings.max_fit_kl)
        fits = fit_heads(opened.model, ids, statistics, live, config, Stopwatch())
        costs = one_head_costs(meter, fits, config, tuple(statistics.variance.shape))
    baseline = float(meter.baseline.mean())
    values: dict[str, Any] = {"windows": settings.windows, "baseline": baseline, **costs.entries()}
    values |= {"scores": scores, "quality": score_quality(costs, scores, settings.rates)}
    return opened.record("one-head", values)


def available_scores(
    opened: Opened, ids: list[Tensor], statistics: AttentionStatistics, heldout: int
) -> dict[str, Tensor]:
    """Return every score `[L, H]` whose inputs can be measured here, by name; the random score is left out."""
    say("measuring the inputs of scores")
    inputs: dict[str, Any] = {"gates": gate_gradients(opened.model, ids)}
    if heldout:
        size = opened.settings.batch_size
        batches = heldout_batches(opened.data, length=opened.length, count=heldout, batch_size=size)
        inputs["outputs"] = head_outputs(opened.model, batches, statistics)
    if gradient := recorded_gradient(opened.model, opened.source.state):
        inputs["gradient"] = gradient.scores()
    return {
        name: score(statistics, name, **{key: inputs[key] for key in required_inputs(name)})
        for name in SCORES
        if name != "random" and inputs.keys() >= set(required_inputs(name))
    }


def one_head_costs(
    meter: CostMeter, fits: dict[Head, FittedHead], config: FreezeConfig, shape: tuple[int, ...]
) -> Costs:
    """Freeze each head alone by its fitted pattern and measure the meter's windows."""
    by_window = torch.full((*shape, len(meter.baseline)), torch.nan, dtype=torch.float64)
    fit_kl = torch.full(shape, torch.nan, dtype=torch.float64)
    for head, fit in tqdm(fits.items(), "heads", mininterval=5):
        assert fit.pattern is not None
        losses = meter.losses(HeadSet([head]), {head: fit.pattern}, backend=config.backend)
        fit_kl[head], by_window[head] = fit.fit_kl, losses - meter.baseline
    return Costs(by_window, fit_kl, HeadSet(head for head in fits if fit_kl[head] <= config.max_fit_kl))


def score_quality(costs: Costs, scores: dict[str, Tensor], rates: tuple[float, ...]) -> dict[str, dict[str, Any]]:
    """Return by score its rank correlation with the cost, and the mean cost (%) of its lowest heads by rate.

    Only eligible heads count; a rate of more heads than there are takes all.
    """
    change = costs.change.masked_fill(~mask_of(costs.eligible, costs.change.shape), torch.nan)
    percents = 100 * torch.expm1(change)
    quality = {}
    for name, values in scores.items():
        order = ranking(values, only=costs.eligible)
        lowest = {rate: order[: budget(rate, values.numel())] for rate in rates}
        means = {rate: float(np.mean([percents[head] for head in heads] or [np.nan])) for rate, heads in lowest.items()}
        quality[name] = {"spearman": spearman(values, change), "mean_cost": means}
    return quality


def tables(record: Record) -> list[Part]:
    """Return the scores beside the paper's."""
    rates = list(next(iter(record["quality"].values()))["mean_cost"])
    columns = ["score", "Spearman", "paper"]
    for rate in rates:
        columns += [f"mean cost, lowest {percent(rate)}", f"paper, {percent(rate)}"]
    rows = []
    known = {name: each["spearman"] for name, each in record["quality"].items()}
    for name in sorted(known, key=lambda name: -2 if known[name] is None else known[name], reverse=True):
        each = record["quality"][name]
        rank, *quoted = paper.SELECTOR_DIAGNOSTIC.get(name, (MISSING,) * 3)
        beside = dict(zip(("0.25", "0.5"), quoted, strict=True))
        row = [name.replace("_", " "), correlation(each["spearman"]), rank]
        for rate in rates:
            row += [signed(each["mean_cost"][rate], 4), beside.get(rate)]
        rows.append(row)
    measured = int(matrix(record["nll_change"]).isfinite().sum())
    conditions = (
        f"Immediate cost of single heads, and which scores predict it: {record['windows']} held-out windows of "
        f"{record['length']:,} tokens; {len(record['eligible'])} of {measured} heads fit."
    )
    quality = Table.of("", columns, rows, paper.notes(paper.SELECTORS)).used()
    return [conditions, quality]


def figure(records: Sequence[Record]) -> Figure:
    """Return a map of the costs, and each score against the cost."""
    record, *_ = records
    change = 1e3 * matrix(record["nll_change"]).numpy()
    eligible = mask_of(HeadSet(record["eligible"]), change.shape).numpy()
    names = list(record["scores"])
    drawn, axes = subplots(-(-(len(names) + 1) // 4), 4)
    first, *others = axes.flat
    drawn.colorbar(first.imshow(change, cmap="viridis", aspect="auto"), ax=first)
    first.plot(*np.argwhere(~eligible & np.isfinite(change)).T[::-1], "o", mfc="none", mec="red")
    first.set(title="loss change, 0.001 nats; circles: fit rejected", xlabel="head", ylabel="layer")
    for axis, name in zip(others, names, strict=False):
        values, rank = matrix(record["scores"][name]).numpy(), record["quality"][name]["spearman"]
        axis.plot(values[~eligible], change[~eligible], "o", mfc="none", ms=3)
        axis.plot(values[eligible], change[eligible], ".")
        axis.set(title=f"{name.replace('_', ' ')}: Spearman {correlation(rank)}", ylabel="loss change, 0.001 nats")
        if np.nanmin(values) > 0:
            axis.set_xscale("log")
            axis.minorticks_off()
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    return drawn
