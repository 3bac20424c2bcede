"""`saf analyze fits`: how well compact fits of one half of the calibration sequences describe the other half."""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from saf.calibration import calibrate
from saf.cli.analyze_base import OnModel
from saf.fit import CONSTANT_AFTER, FITTERS, fit_variants
from saf.freezing.heldout import HeldOutFit, fit_heldout
from saf.heads import HeadSet
from saf.records.table import Table
from saf.scores import score
from saf.selection import budget, ranking
from saf.settings import OneOf


@dataclass(kw_only=True)
class Fits(OnModel):
    """Fit every head on one half of the calibration sequences, free and structured; KL to either half."""

    sequences: int = 64
    """Calibration sequences; the halves are calibrated apart."""
    structured_after: int = CONSTANT_AFTER
    """In the structured fit, alpha is constant from this key on."""
    fitter: Annotated[str, OneOf(FITTERS)] = "proportional"
    """How compact patterns are fitted."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads, lowest variance first, at which the table parts them."""

    def run(self) -> dict[str, Any]:
        """Fit, show, write and return the record."""
        opened = self.open()
        variants = fit_variants(opened.length, constant_after=self.structured_after)
        ids = self.calibration(opened)
        with opened.autocast:
            variance = score(calibrate(opened.model, ids), "variance")
            found = fit_heldout(opened.model, ids, fits=variants, fitter=self.fitter)
        groups = bands(variance, self.rates)
        compared = {name: _compare(found, heads) for name, heads in groups.items() if len(heads)}
        record = {
            "sequences": [sum(map(len, ids)) // 2, -(-sum(map(len, ids)) // 2)],
            "alpha_constant_after": self.structured_after,
            "variance": variance,
            "fits": {name: asdict(each) for name, each in found.items()},
            "groups": compared,
        }
        keys = ("free_own", "free_other", "structured_own", "structured_other")
        rows = [
            [name, each["heads"], *(f"{each[key]:.4f}" for key in keys), each["structured_closer"]]
            for name, each in compared.items()
        ]
        head = ["by variance", "heads", "free, own", "free, other", "structured, own", "structured, other", "closer"]
        title = (
            "mean KL of fits to their own half of the sequences and to the other, nats per row; closer: heads whose "
            "structured fit is closer to the other half"
        )
        return self.finish(self.record("fits", opened, record), Table.of(title, head, rows))


def bands(variance: Tensor, rates: tuple[float, ...]) -> dict[str, HeadSet]:
    """Return heads by ascending variance between consecutive rates, by name, and `all` of them."""
    order = ranking(variance)
    edges = [0.0, *sorted(rates)]
    found = {}
    for low, high in pairwise(edges):
        first, last = (budget(rate, variance.numel()) for rate in (low, high))
        found[f"{low:.0%} to {high:.0%}"] = HeadSet(order[first:last])
    return found | {"all": HeadSet(order)}


def _compare(found: dict[str, HeldOutFit], heads: HeadSet) -> dict[str, float]:
    def values(fit: str, half: str) -> Tensor:
        return torch.stack([getattr(found[fit], half)[head] for head in heads])

    closer = values("structured", "other") < values("free", "other")
    means = {f"{fit}_{half}": float(values(fit, half).mean()) for fit in found for half in ("own", "other")}
    return {"heads": len(heads), **means, "structured_closer": int(closer.sum())}
