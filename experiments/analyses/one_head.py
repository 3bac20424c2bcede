"""The cost of freezing each head alone, under a free and a structured fit, and the scores that predict it (A.3)."""

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
    Part,
    Record,
    check_rates,
    mask_of,
    matrix,
    say,
    spearman,
    subplots,
    table,
    without_empty,
)
from experiments.analyses.fits import CONSTANT_AFTER, fit_variants
from saf.calibration import calibrate, gate_gradients, head_outputs
from saf.evaluate.paired import block_length, bootstrap_means, window_losses
from saf.fitted_heads import FittedHead, fit_heads
from saf.freeze_config import FreezeConfig
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.records.quantities import MISSING, correlation, highest_first, percent, signed
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
    structured_after: int | None = CONSTANT_AFTER
    """First key from which the structured fit has a constant alpha; None leaves that fit out."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads whose mean cost is shown."""


@dataclass(frozen=True)
class Costs:
    """Paired loss changes of heads frozen alone under one fit; NaN for heads that were frozen before."""

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

    def of(self, heads: Sequence[Head]) -> Tensor:
        """Return the losses of some heads, `[F, W]`."""
        return torch.stack([self.by_window[head] for head in heads])

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
    variants = fit_variants(opened.length, constant_after=settings.structured_after)
    with opened.autocast:
        ids = opened.calibration()
        say(f"calibrating on {settings.sequences} sequences")
        statistics = calibrate(opened.model, ids, collect=("mean_rows",) if settings.heldout_sequences else ())
        scores = available_scores(opened, ids, statistics, settings.heldout_sequences)
        meter = CostMeter(opened.model, opened.windows(settings.windows), batch_size=settings.batch_size)
        live = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
        costs = {}
        for fit, options in variants.items():
            config = FreezeConfig(max_fit_kl=settings.max_fit_kl, fitter_options=options)
            fits = fit_heads(opened.model, ids, statistics, live, config, Stopwatch())
            costs[fit] = one_head_costs(meter, fits, config, tuple(statistics.variance.shape))
    free, structured = costs["free"], costs.get("structured")
    baseline = float(window_losses(meter.baseline).mean())
    values: dict[str, Any] = {"windows": settings.windows, "baseline": baseline, **free.entries()}
    values |= {"scores": scores, "quality": score_quality(free, scores, settings.rates)}
    if structured is not None:
        values["structured"] = {"alpha_constant_after": settings.structured_after, **structured.entries()}
        values["fit_difference"] = fit_differences(free, structured, scores["variance"], settings.rates)
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
    baseline = window_losses(meter.baseline)
    by_window = torch.full((*shape, len(baseline)), torch.nan, dtype=torch.float64)
    fit_kl = torch.full(shape, torch.nan, dtype=torch.float64)
    for head, fit in tqdm(fits.items(), "heads", mininterval=5):
        assert fit.pattern is not None
        log_probs = meter.log_probs(HeadSet([head]), {head: fit.pattern}, backend=config.backend)
        fit_kl[head], by_window[head] = fit.fit_kl, window_losses(log_probs) - baseline
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


def fit_differences(
    free: Costs, structured: Costs, variance: Tensor, rates: tuple[float, ...]
) -> dict[str, dict[str, Any]]:
    """Compare both fits over all heads that both accept, and over each rate's lowest by variance (Eq. S.27).

    Intervals are over windows: each draw takes the same windows for both fits and all heads.
    """
    order = ranking(variance, only=free.eligible)
    groups = {"all": order} | {f"{rate:g}": order[: budget(rate, variance.numel())] for rate in rates}
    differences = {}
    for name, heads in groups.items():
        if both := [head for head in sorted(heads) if head in structured.eligible]:
            first, second = free.of(both), structured.of(both)
            by_window = (second - first).mean(0)
            draws = bootstrap_means(by_window, block=block_length(by_window))
            means = {"first": first, "second": second, "difference": by_window}
            differences[name] = {
                "heads": len(both),
                **{key: float(values.mean()) for key, values in means.items()},
                "ci95": draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist(),
            }
    return differences


def tables(record: Record) -> list[Part]:
    """Return the scores beside the paper's, and the two fits beside one another."""
    rates = list(next(iter(record["quality"].values()))["mean_cost"])
    columns = ["score", "Spearman", "paper"]
    for rate in rates:
        columns += [f"mean cost, lowest {percent(rate)}", f"paper, {percent(rate)}"]
    rows = []
    for name, each in sorted(record["quality"].items(), key=lambda item: highest_first(item[1]["spearman"])):
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
    notes, difference = paper.notes(paper.SELECTORS), record.get("fit_difference")
    quality = without_empty(table("", columns, rows, [] if difference else notes), keep=["paper"])
    return [conditions, quality, _difference_table(record, notes)] if difference else [conditions, quality]


def _difference_table(record: Record, notes: list[str]) -> Part:
    """Return the table of both fits, in thousandths of a nat."""
    rows = []
    for name, each in record["fit_difference"].items():
        heads = "all accepted" if name == "all" else f"lowest {percent(name)} by variance"
        low, high, *values = (
            signed(1e3 * value, 3, "") for value in (*each["ci95"], each["first"], each["second"], each["difference"])
        )
        rows.append([heads, each["heads"], *values, f"{low} to {high}"])
    after = record["structured"]["alpha_constant_after"]
    title = f"Mean loss change, thousandths of a nat; structured: alpha constant from key {after} on"
    return table(title, ["heads", "fits", "free", "structured", "difference", "95% interval"], rows, notes)


def figure(record: Record) -> Figure:
    """Return a map of the costs, the two fits against one another, and each score against the cost."""
    change = 1e3 * matrix(record["nll_change"]).numpy()
    eligible = mask_of(HeadSet.from_list(record["eligible"]), change.shape).numpy()
    names = list(record["scores"])
    drawn, axes = subplots(-(-(len(names) + 2) // 4), 4)
    first, second, *others = axes.flat
    drawn.colorbar(first.imshow(change, cmap="viridis", aspect="auto"), ax=first)
    first.plot(*np.argwhere(~eligible & np.isfinite(change)).T[::-1], "o", mfc="none", mec="red")
    first.set(title="loss change, 0.001 nats; circles: fit rejected", xlabel="head", ylabel="layer")
    if structured := record.get("structured"):
        second.plot(change[eligible], 1e3 * matrix(structured["nll_change"]).numpy()[eligible], ".")
        second.axline((0, 0), slope=1, color="grey", lw=0.8)
        second.set(title="the two fits, 0.001 nats", xlabel="free", ylabel="structured")
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
