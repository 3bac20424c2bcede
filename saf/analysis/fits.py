"""How well compact fits of one half of the calibration sequences describe the other half."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from saf.analysis.model import SILENT, ModelSettings, Record, Watch
from saf.arguments import SHARES, at_least
from saf.calibration import calibrate
from saf.fit import CONSTANT_AFTER, FITTERS, fit_variants
from saf.freezing.heldout import HeldOutFit, fit_heldout
from saf.heads import HeadSet
from saf.records.table import Part, Table
from saf.scores import score
from saf.selection import budget, ranking
from saf.settings import OneOf, documented


@documented
@dataclass(frozen=True, kw_only=True)
class Fits(ModelSettings):
    """Fit every head on one half of the calibration sequences, free and structured; KL to either half."""

    sequences: Annotated[int, at_least(1)] = 64
    """Calibration sequences; the halves are calibrated apart."""
    structured_after: Annotated[int, at_least(0)] = CONSTANT_AFTER
    """In the structured fit, alpha is constant from this key on."""
    fitter: Annotated[str, OneOf(FITTERS)] = "proportional"
    """How compact patterns are fitted."""
    rates: Annotated[tuple[float, ...], SHARES] = (0.25, 0.5)
    """Shares of all heads, lowest variance first, at which the table parts them."""


def measure(settings: Fits, watch: Watch = SILENT) -> dict[str, Any]:
    """Fit, and return the record."""
    opened = settings.open()
    variants = fit_variants(opened.length, constant_after=settings.structured_after)
    ids = opened.calibration()
    with opened.autocast:
        variance = score(calibrate(opened.model, ids), "variance")
        found = fit_heldout(opened.model, ids, fits=variants, fitter=settings.fitter)
    count = sum(map(len, ids))
    values = {
        "sequences": [count // 2, count - count // 2],
        "alpha_constant_after": settings.structured_after,
        "variance": variance,
        "fits": {name: asdict(each) for name, each in found.items()},
        "groups": {
            name: _compare(found, heads) for name, heads in bands(variance, settings.rates).items() if len(heads)
        },
    }
    return opened.record("fits", values)


def tables(record: Record) -> list[Part]:
    """Return how fits of one half of the sequences describe the other, by bands of variance."""
    rows = []
    for name, each in record["groups"].items():
        values = [f"{each[key]:.4f}" for key in ("free_own", "free_other", "structured_own", "structured_other")]
        rows.append([name, each["heads"], *values, f"{each['structured_closer']} of {each['heads']}"])
    head = ["heads by variance", "heads", "free: own half", "free: other", "structured: own half", "structured: other"]
    head += ["structured closer to the other"]
    first, second = record["sequences"]
    return [
        f"Fits of one half of the sequences against the other half: nats per row, {first} and {second} sequences of "
        f"{record['length']:,} tokens; structured: alpha constant from key {record['alpha_constant_after']} on. The "
        "paper has no such comparison.",
        Table.of("", head, rows),
    ]


def bands(variance: Tensor, rates: tuple[float, ...]) -> dict[str, HeadSet]:
    """Return heads by ascending variance `[L, H]` between consecutive rates, by name, and `all` of them."""
    order = ranking(variance)
    edges = [0.0, *sorted(rates)]
    found = {}
    for low, high in pairwise(edges):
        first, last = (budget(rate, variance.numel()) for rate in (low, high))
        found[f"{low:.0%} to {high:.0%}"] = HeadSet(order[first:last])
    return found | {"all": HeadSet(order)}


def _compare(found: Mapping[str, HeldOutFit], heads: HeadSet) -> dict[str, float]:
    """Return the mean KL of each fit to each half over some heads, and for how many the structured fit is closer."""

    def values(fit: str, half: str) -> Tensor:
        return torch.stack([getattr(found[fit], half)[head] for head in heads])

    closer = values("structured", "other") < values("free", "other")
    means = {f"{fit}_{half}": float(values(fit, half).mean()) for fit in found for half in ("own", "other")}
    return {"heads": len(heads), **means, "structured_closer": int(closer.sum())}
