"""Compact fits of one half of the calibration sequences, held against the other half."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.analyses.common import ModelSettings, Part, Record, check_rates, matrix, subplots, table
from saf.calibration import Batch, calibrate, read_batches
from saf.errors import InputError
from saf.fit import check_constant_after, fit_compact, fit_kl
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from saf.scores import score
from saf.selection import budget, ranking
from saf.targets import collect_for, target

CONSTANT_AFTER = 16
"""The first keys, sinks among them, keep logits of their own; how later ones differ is mostly sampling noise: on 143 of
144 heads a constant is closer to unseen sequences (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    """Fit every head on one half of the calibration sequences, free and structured; KL to either half."""

    sequences: int = 64
    """Number of calibration sequences; each half is calibrated by itself."""
    structured_after: int = CONSTANT_AFTER
    """First key from which the structured fit has a constant alpha."""
    fitter: str = "proportional"
    """Method of fitting compact patterns."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads, lowest variance first, that bound the table's rows."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record."""
    check_rates(settings.rates)
    opened = settings.open()
    variants = fit_variants(opened.length, constant_after=settings.structured_after)
    ids = opened.calibration()
    with opened.autocast:
        variance = score(calibrate(opened.model, ids), "variance")
        fits = fit_halves(opened.model, ids, variants, fitter=settings.fitter)
    # Heads by ascending variance between consecutive rates, by name, and all of them.
    order = ranking(variance)
    ends = [(rate, budget(rate, variance.numel())) for rate in (0.0, *sorted(settings.rates))]
    bands = {f"{low:.0%} to {high:.0%}": order[first:last] for (low, first), (high, last) in pairwise(ends)}
    bands["all"] = order
    values = {
        "sequences": [settings.sequences // 2, settings.sequences - settings.sequences // 2],
        "alpha_constant_after": settings.structured_after,
        "variance": variance,
        "fits": fits,
        "groups": {name: compare(fits, HeadSet(heads)) for name, heads in bands.items() if heads},
    }
    return opened.record("fits", values)


def fit_variants(length: int, *, constant_after: int | None = CONSTANT_AFTER) -> dict[str, dict[str, Any]]:
    """Return the fitter's options of the `free` and of the `structured` fit, by name; None leaves the second out."""
    if constant_after is None:
        return {"free": {}}
    check_constant_after(constant_after, length, name="constant_after (--structured-after)")
    return {"free": {}, "structured": {"alpha_constant_after": constant_after}}


def fit_halves(
    model: nn.Module,
    batches: Iterable[Batch],
    variants: dict[str, dict[str, Any]],
    *,
    pattern: str = "mean",
    fitter: str = "proportional",
) -> dict[str, dict[str, Tensor]]:
    """Calibrate two halves of N sequences apart, fit the first N // 2, and measure each fit on both (docs/method.md).

    Returns by variant the KL of its fits, nats per row, `[L, H]`: `own` to the pattern that was fitted, and `other` to
    the same pattern of the other half, which the fit never saw. NaN for heads that are not live.
    """
    given = read_batches(batches)
    size, ids = len(given[0]), torch.cat(given)
    if len(ids) < 2:
        raise InputError(f"two halves need at least two calibration sequences, got {len(ids)}")
    halves = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    measured = [calibrate(model, list(half.split(size)), collect=collect_for(pattern)) for half in halves]
    heads = HeadSet((layer, head) for layer, head in measured[0].measured.nonzero().tolist())
    device = adapter_for(model).device
    targets = [[part.to(device) for part in target(statistics, heads, pattern)] for statistics in measured]
    kls: dict[str, dict[str, Tensor]] = {}
    for name, options in variants.items():
        fitted = fit_compact(*targets[0][:2], fitter=fitter, **options)
        kls[name] = {}
        for half, each in zip(("own", "other"), targets, strict=True):
            kls[name][half] = torch.full_like(measured[0].variance, torch.nan, dtype=torch.float64)
            for head, kl in zip(heads, fit_kl(fitted, *each).tolist(), strict=True):
                kls[name][half][head] = kl
    return kls


def compare(fits: dict[str, dict[str, Tensor]], heads: HeadSet) -> dict[str, Any]:
    """Return the mean KL of each fit to each half over some heads, and for how many the structured fit is closer."""
    values = {
        f"{fit}_{half}": torch.stack([fits[fit][half][head] for head in heads])
        for fit in fits
        for half in ("own", "other")
    }
    closer = int((values["structured_other"] < values["free_other"]).sum())
    means = {name: float(each.mean()) for name, each in values.items()}
    return {"heads": len(heads), **means, "structured_closer": closer}


def tables(record: Record) -> list[Part]:
    """Return the KL of both fits to both halves, by bands of variance."""
    keys = ("free_own", "free_other", "structured_own", "structured_other")
    rows = [
        [name, each["heads"], *(f"{each[key]:.4f}" for key in keys), f"{each['structured_closer']} of {each['heads']}"]
        for name, each in record["groups"].items()
    ]
    columns = ["heads by variance", "heads", "free: own half", "free: other", "structured: own half"]
    columns += ["structured: other", "structured closer to the other"]
    first, second = record["sequences"]
    return [
        f"Fits of one half of the sequences against the other half: nats per row, {first} and {second} sequences of "
        f"{record['length']:,} tokens; structured: alpha constant from key {record['alpha_constant_after']} on. The "
        "paper has no such comparison.",
        table("", columns, rows),
    ]


def figure(record: Record) -> Figure:
    """Return structured against free fits on the other half, and free fits on the other against their own half."""
    free, structured = record["fits"]["free"], record["fits"]["structured"]
    drawn, axes = subplots(1, 2, size=(10, 4.5))
    panels = [
        (free["other"], structured["other"], "free fit, other half", "structured fit, other half"),
        (free["own"], free["other"], "free fit, own half", "free fit, other half"),
    ]
    for axis, (one, other, across, up) in zip(axes, panels, strict=True):
        axis.loglog(matrix(one).flatten(), matrix(other).flatten(), ".")
        axis.axline((0.1, 0.1), (1, 1), color="grey", lw=0.8)
        axis.set(xlabel=f"{across}, nats per row", ylabel=f"{up}, nats per row")
    return drawn
