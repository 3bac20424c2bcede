"""Freezing each head alone: what it costs at once under either fit, and which scores foretell it (paper, A.3)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from saf.analysis.correlation import spearman
from saf.analysis.costs import CostMeter
from saf.analysis.model import SILENT, ModelSettings, Opened, Record, Watch
from saf.arguments import SHARES, above, at_least
from saf.calibration import calibrate, gate_gradients, head_outputs
from saf.calibration.capture import Batch, read_batches
from saf.errors import InputError
from saf.evaluate.paired import block_length, bootstrap_means, window_losses
from saf.fit import CONSTANT_AFTER, fit_variants
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import make_patterns
from saf.heads import Head, HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.records import paper
from saf.records.quantities import MISSING, correlation, highest_first, percent, signed
from saf.records.table import Part, Table
from saf.scores import SCORES, needed_by, score
from saf.selection import budget, ranking
from saf.settings import documented
from saf.statistics import AttentionStatistics
from saf.tasks.text import heldout_batches
from saf.train.events import recorded_gradient

_SAME_BASELINE = 1e-5
"""Nats: two forward passes of one model over the same windows agree far better; those of different windows do not."""


@documented
@dataclass(frozen=True, kw_only=True)
class OneHead(ModelSettings):
    """Freeze each head alone: its immediate cost on held-out windows, and which scores foretell it.

    With --out, what is there is written every few seconds as a partial record, in case the command is cut off.
    """

    windows: Annotated[int, at_least(1)] = 16
    """Windows of the controller partition to measure on: its first ones."""
    heldout_sequences: Annotated[int, at_least(0)] = 16
    """Sequences that output-aware scores read: its last ones; 0 leaves these scores out."""
    max_fit_kl: Annotated[float, above(0)] = 0.2
    """Heads with a larger fit KL, in nats, do not count."""
    structured_after: Annotated[int | None, at_least(0)] = CONSTANT_AFTER
    """Measure the structured fit too: alpha is constant from this key on; None leaves it out."""
    rates: Annotated[tuple[float, ...], SHARES] = (0.25, 0.5)
    """Shares of all heads whose mean cost is told."""


def measure(settings: OneHead, watch: Watch = SILENT) -> dict[str, Any]:
    """Measure, and return the record; what is there so far is kept as a record of kind `one-head-partial`."""
    opened = settings.open()
    variants = fit_variants(opened.length, constant_after=settings.structured_after)
    windows = opened.windows(settings.windows)
    costs: dict[str, OneHeadCosts] = {}
    with opened.autocast:
        statistics, scores, ids = _statistics_and_scores(settings, opened, watch)
        heads = int(statistics.measured.sum())
        countdown = watch.countdown("heads", heads * len(variants))

        def progress(fit: str, done: int, so_far: Callable[[], OneHeadCosts]) -> None:
            def record() -> dict[str, Any]:
                return opened.record("one-head-partial", _values(settings, {**costs, fit: so_far()}, scores))

            countdown(len(costs) * heads + done, record)

        for fit, options in variants.items():
            config = FreezeConfig(max_fit_kl=settings.max_fit_kl, fitter_options=options)
            costs[fit] = one_head_costs(
                opened.model,
                ids,
                statistics,
                windows,
                config=config,
                batch_size=settings.batch_size,
                progress=partial(progress, fit),
            )
    values = _values(settings, costs, scores)
    quality = score_quality(costs["free"], scores, rates=settings.rates)
    values["quality"] = {name: asdict(each) for name, each in quality.items()}
    if "structured" in costs:
        values["fit_difference"] = _differences(settings, costs, scores["variance"])
    return opened.record("one-head", values)


def tables(record: Record) -> list[Part]:
    """Return what freezing each head alone costs, by score, and under either fit where both were measured."""
    rates = list(next(iter(record["quality"].values()))["mean_cost"])
    head = ["score", "Spearman", "paper"]
    for rate in rates:
        head += [f"mean cost, lowest {percent(rate)}", f"paper, {percent(rate)}"]
    rows = []
    for name, each in sorted(record["quality"].items(), key=lambda item: highest_first(item[1]["spearman"])):
        beside = paper.SELECTOR_DIAGNOSTIC.get(name)
        row = [name.replace("_", " "), correlation(each["spearman"]), beside[0] if beside else MISSING]
        for rate in rates:
            quoted = beside[{"0.25": 1, "0.5": 2}[rate]] if beside and rate in ("0.25", "0.5") else MISSING
            row += [signed(each["mean_cost"][rate], 4), quoted]
        rows.append(row)
    measured = sum(value is not None for row in record["nll_change"] for value in row)
    conditions = (
        f"Immediate cost of single heads, and which scores foretell it: {record['windows']} held-out windows of "
        f"{record['length']:,} tokens; {len(record['eligible'])} of {measured} heads fit."
    )
    notes = paper.notes(paper.SELECTORS)
    if not record.get("fit_difference"):
        return [conditions, Table.of("", head, rows, notes=notes).used(keep=["paper"])]
    return [conditions, Table.of("", head, rows).used(keep=["paper"]), _difference_table(record, notes)]


def _difference_table(record: Record, notes: list[str]) -> Table:
    """Return the table that compares the costs of free and structured fits, in thousandths of a nat."""
    rows = []
    for name, each in record["fit_difference"].items():
        heads = "all accepted" if name == "all" else f"lowest {percent(name)} by variance"
        low, high = (signed(1e3 * end, 3, "") for end in each["ci95"])
        values = [signed(1e3 * each[key], 3, "") for key in ("first", "second", "difference")]
        rows.append([heads, each["heads"], *values, f"{low} to {high}"])
    after = record["structured"]["alpha_constant_after"]
    title = f"Mean loss change, thousandths of a nat; structured: alpha constant from key {after} on"
    head = ["heads", "fits", "free", "structured", "difference", "95% interval"]
    return Table.of(title, head, rows, notes=notes)


@dataclass(frozen=True, kw_only=True)
class OneHeadCosts:
    """Hold the paired loss change of each head frozen alone; NaN for heads that were frozen before."""

    change: Tensor
    """`[L, H]` nats per token, mean over windows."""
    by_window: Tensor
    """`[L, H, W]` nats per token."""
    fit_kl: Tensor
    """`[L, H]` nats per row."""
    eligible: HeadSet
    """Heads measured whose fit KL is within the limit."""
    baseline: float
    """Loss with no further head frozen, nats per token."""


@dataclass(frozen=True, kw_only=True)
class ScoreQuality:
    """Hold how well a score foretells the cost of single heads, over eligible ones."""

    spearman: float
    mean_cost: dict[float, float]
    """By rate: mean relative perplexity increase, in percent, of its lowest heads, round(rate · L · H) of them."""


def one_head_costs(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    windows: Tensor,
    *,
    config: FreezeConfig | None = None,
    batch_size: int = 8,
    progress: Callable[[int, Callable[[], OneHeadCosts]], None] | None = None,
) -> OneHeadCosts:
    """Freeze each live head of a copy of the model alone, by its fitted mean, and measure the same windows.

    Layers take turns, so that what is there after a while speaks of all of them.

    Args:
        model: A supported model; left as it was.
        batches: The calibration sequences of `statistics`; read again for patterns other than the compact mean.
        statistics: Of `calibrate(model, batches)`.
        windows: Held-out windows `[W, T + 1]`, T at most the calibration length.
        config: Pattern, storage, fitter, `max_fit_kl` and backend; rate and score have no say.
        batch_size: Windows in a forward pass.
        progress: Called after each head with how many are measured, and a function that returns the costs so far.
    """
    config = config or FreezeConfig()
    heads = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
    made = make_patterns(model, read_batches(batches), statistics, heads, config, Stopwatch())
    meter = CostMeter(model, windows, batch_size=batch_size)
    baseline = window_losses(meter.baseline)
    by_window = torch.full((*statistics.variance.shape, len(windows)), torch.nan, dtype=torch.float64)
    fit_kl = torch.full(statistics.variance.shape, torch.nan, dtype=torch.float64)

    def costs() -> OneHeadCosts:
        """Return what is measured so far; heads that were not reached are NaN and not eligible."""
        measured = HeadSet(head for head in heads if not by_window[head].isnan().any())
        return OneHeadCosts(
            change=by_window.mean(-1),
            by_window=by_window.clone(),
            fit_kl=fit_kl.clone(),
            eligible=HeadSet(head for head in measured if fit_kl[head] <= config.max_fit_kl),
            baseline=float(baseline.mean()),
        )

    for number, head in enumerate(sorted(heads, key=lambda each: each[::-1]), 1):
        fit_kl[head] = made[head].fit_kl
        frozen = meter.log_probs(HeadSet([head]), {head: made[head].pattern}, backend=config.backend)
        by_window[head] = window_losses(frozen) - baseline
        if progress is not None:
            progress(number, costs)
    return costs()


def available_scores(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    *,
    heldout: Iterable[Batch] | None = None,
    needed: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Return every score `[L, H]` that can be had, by name; not the random one.

    `outputs` are measured when `heldout` is given and the statistics hold `mean_rows`, `gates` on `batches`; `needed`
    brings what was measured elsewhere, such as `gradient`.
    """
    given = dict(needed or {})
    if "gates" not in given:
        given["gates"] = gate_gradients(model, batches)
    if "outputs" not in given and heldout is not None and "mean_rows" in statistics.collected:
        given["outputs"] = head_outputs(model, heldout, statistics)
    found = {}
    for name in SCORES:
        reads = needed_by(name)
        if name != "random" and given.keys() >= set(reads):
            found[name] = score(statistics, name, **{key: given[key] for key in reads})
    return found


def score_quality(
    costs: OneHeadCosts, scores: Mapping[str, Tensor], *, rates: Iterable[float] = (0.25, 0.5)
) -> dict[str, ScoreQuality]:
    """Return, for each score `[L, H]`, its rank correlation with the cost and the mean cost of its lowest heads.

    Only eligible heads count; a rate that asks for more of them than there are takes them all. The correlation of fewer
    than two is NaN.
    """
    allowed = torch.zeros_like(costs.change, dtype=torch.bool)
    for head in costs.eligible:
        allowed[head] = True
    percent = 100.0 * torch.expm1(costs.change)
    change = costs.change.masked_fill(~allowed, torch.nan)
    found = {}
    for name, values in scores.items():
        order = ranking(values, only=costs.eligible)
        lowest = {rate: order[: budget(rate, values.numel())] for rate in rates}
        found[name] = ScoreQuality(
            spearman=spearman(values, change) if len(costs.eligible) > 1 else float("nan"),
            mean_cost={
                rate: float(torch.stack([percent[head] for head in heads]).mean()) if heads else float("nan")
                for rate, heads in lowest.items()
            },
        )
    return found


@dataclass(frozen=True, kw_only=True)
class FitDifference:
    """Hold the mean loss changes of some heads under two fits, nats per token."""

    heads: int
    """How many heads both fits are accepted of, among those asked for."""
    first: float
    second: float
    difference: float
    """Second minus first: negative where the second fit costs less."""
    ci95: tuple[float, float]
    """Of the difference, over windows: each draw takes the same windows for both fits and all heads."""


def fit_difference(first: OneHeadCosts, second: OneHeadCosts, heads: Iterable[Head] | None = None) -> FitDifference:
    """Compare two fits over the heads that both accept, of `heads` if given: Eq. (S.27) of docs/method.md.

    Raises InputError for different windows, or no head to compare.
    """
    apart = abs(first.baseline - second.baseline)
    if first.by_window.shape != second.by_window.shape or apart > _SAME_BASELINE:
        raise InputError("the fits were measured on different windows or models; measure both with the same ones")
    both = first.eligible & second.eligible
    chosen = list(both if heads is None else both & HeadSet(heads))
    if not chosen:
        raise InputError("no head is accepted under both fits: there is nothing to compare; raise max_fit_kl")
    one, other = (torch.stack([costs.by_window[head] for head in chosen]) for costs in (first, second))
    by_window = (other - one).mean(0)
    draws = bootstrap_means(by_window, block=block_length(by_window))
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return FitDifference(
        heads=len(chosen),
        first=float(one.mean()),
        second=float(other.mean()),
        difference=float(by_window.mean()),
        ci95=(low, high),
    )


def _statistics_and_scores(
    settings: OneHead, opened: Opened, watch: Watch
) -> tuple[AttentionStatistics, dict[str, Tensor], list[Tensor]]:
    """Return what calibration measures, every score that can be had, and the calibration sequences."""
    ids, count = opened.calibration(), settings.heldout_sequences
    heldout, collect = None, ()
    if count:
        heldout = heldout_batches(opened.data, length=opened.length, count=count, batch_size=settings.batch_size)
        collect = ("mean_rows",)
    gradient = recorded_gradient(opened.model, opened.source.state)
    needed = {"gradient": gradient.scores()} if gradient else {}
    watch.say(f"calibrating on {sum(map(len, ids))} sequences")
    statistics = calibrate(opened.model, ids, collect=collect)
    watch.say("measuring what scores read")
    return statistics, available_scores(opened.model, ids, statistics, heldout=heldout, needed=needed), ids


def _values(settings: OneHead, costs: Mapping[str, OneHeadCosts], scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the record's own entries; the structured fit's are there when it was measured."""
    free = costs["free"]
    values = {"windows": free.by_window.shape[-1], "baseline": free.baseline, **_measured(free)}
    if "structured" in costs:
        values["structured"] = {"alpha_constant_after": settings.structured_after, **_measured(costs["structured"])}
    return values | {"scores": scores}


def _measured(costs: OneHeadCosts) -> dict[str, Any]:
    """Return the measured tensors and heads under the names that the record has for them."""
    return {
        "nll_change": costs.change,
        "nll_change_by_window": costs.by_window,
        "fit_kl": costs.fit_kl,
        "eligible": costs.eligible.to_list(),
    }


def _differences(settings: OneHead, costs: Mapping[str, OneHeadCosts], variance: Tensor) -> dict[str, Any]:
    """Return the difference of both fits over all accepted heads, and over the lowest of each rate by variance."""
    order = ranking(variance, only=costs["free"].eligible)
    groups = {"all": order} | {f"{rate:g}": order[: budget(rate, variance.numel())] for rate in settings.rates}
    both = costs["free"].eligible & costs["structured"].eligible
    return {
        name: asdict(fit_difference(costs["free"], costs["structured"], heads))
        for name, heads in groups.items()
        if any(head in both for head in heads)
    }
