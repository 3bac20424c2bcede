"""Freezing each head alone: what it costs at once, and which scores foretell it (paper, appendix A.3)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saf.analysis.correlation import spearman
from saf.analysis.costs import CostMeter
from saf.calibration import gate_gradients, head_outputs
from saf.calibration.capture import Batch, read_batches
from saf.evaluate.paired import window_losses
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import make_patterns
from saf.heads import HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.scores import SCORES, needed_by, score
from saf.selection import budget, ranking
from saf.statistics import AttentionStatistics


@dataclass(frozen=True, kw_only=True)
class OneHeadCosts:
    """The paired loss change of each head frozen alone; NaN for heads that were frozen before."""

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
    """How well a score foretells the cost of single heads, over eligible ones."""

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
    progress: Callable[[int, int, Callable[[], OneHeadCosts]], None] | None = None,
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
        progress: Called after each head with (heads measured, heads, a function that returns the costs so far).
    """
    config = config or FreezeConfig()
    heads = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
    made = make_patterns(model, read_batches(batches), statistics, heads, config, Stopwatch())
    meter = CostMeter(model, windows, batch_size=batch_size)
    baseline = window_losses(meter.baseline)
    by_window = torch.full((*statistics.variance.shape, len(windows)), torch.nan, dtype=torch.float64)
    fit_kl = torch.full(statistics.variance.shape, torch.nan, dtype=torch.float64)

    def costs() -> OneHeadCosts:
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
            progress(number, len(heads), costs)
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
