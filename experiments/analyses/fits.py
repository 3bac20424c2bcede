"""Compact fits of one half of the calibration sequences, held against the other half."""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.analyses.common import ModelSettings, Part, Record, check_rates, matrix, subplots, table
from saf.calibration import calibrate
from saf.fit import CONSTANT_AFTER, fit_variants
from saf.freezing.heldout import fit_heldout
from saf.heads import HeadSet
from saf.scores import score
from saf.selection import budget, ranking


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
        heldout = fit_heldout(opened.model, ids, fits=variants, fitter=settings.fitter)
    fits = {name: asdict(each) for name, each in heldout.items()}
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
