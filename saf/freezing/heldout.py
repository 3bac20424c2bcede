"""Compact fits made on one half of the calibration sequences, judged by the other half."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import Batch, calibrate, read_batches
from saf.errors import InputError
from saf.fit import check_fitter_options, fit_compact, fit_kl
from saf.heads import Head, HeadSet
from saf.targets import Target, collect_for, target

PATTERNS = ("mean", "sharp_mean")
"""Patterns that a half determines; a sampled one would differ by its draw as well."""


@dataclass(frozen=True, kw_only=True)
class HeldOutFit:
    """Hold KL of compact fits made on the first half, nats per row, `[L, H]`; NaN for heads that were not asked for."""

    own: Tensor
    """From the pattern that was fitted."""
    other: Tensor
    """From the same pattern of the other half, which the fit never saw."""


def fit_heldout(
    model: nn.Module,
    batches: Iterable[Batch],
    heads: Iterable[Head] | None = None,
    *,
    pattern: str = "mean",
    fitter: str = "proportional",
    fits: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, HeldOutFit]:
    """Calibrate the two halves of the sequences apart, fit the first, and measure each fit on both (docs/method.md).

    Args:
        model: A supported model; left as it was.
        batches: Calibration sequences, as for `calibrate`. The first N // 2 are fitted, the others judge.
        heads: All live heads if not given.
        pattern: `mean` or `sharp_mean`.
        fitter: As in `fit_compact`.
        fits: The fitter's options of each fit, by name; one fit `free`, without options, if not given.

    Raises:
        InputError: Fewer than two sequences, heads that are not live, a sampled pattern, unknown fitter or options.
    """
    fits = {"free": {}} if fits is None else fits
    check_heldout(pattern)
    for options in fits.values():
        check_fitter_options(fitter, dict(options))
    halves = halves_of(read_batches(batches))
    chosen = None if heads is None else HeadSet(heads)
    measured = [calibrate(model, half, heads=chosen, collect=collect_for(pattern)) for half in halves]
    chosen = HeadSet((layer, head) for layer, head in measured[0].measured.nonzero().tolist())
    device = adapter_for(model).device
    goals = [_target(statistics, chosen, pattern, device) for statistics in measured]
    found = {}
    for name, options in fits.items():
        fitted = fit_compact(*goals[0][:2], fitter=fitter, **options)
        own, other = (_by_head(fit_kl(fitted, *goal), chosen, measured[0].variance) for goal in goals)
        found[name] = HeldOutFit(own=own, other=other)
    return found


def check_heldout(pattern: str, storage: str = "compact") -> None:
    """Raise InputError for patterns whose fit no other half can judge."""
    if pattern not in PATTERNS or storage != "compact":
        raise InputError(
            f"a held-out half judges compact fits of {' and '.join(PATTERNS)}; got pattern {pattern!r}, {storage}: "
            "a drawn pattern has no counterpart in the other half, a dense one no fit"
        )


def halves_of(ids: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split batches of N sequences into the first N // 2 and the rest; raise InputError for fewer than two."""
    size, joined = len(ids[0]), torch.cat(ids)
    half = len(joined) // 2
    if half < 1:
        raise InputError(f"two halves need at least two calibration sequences; got {len(joined)}")
    return list(joined[:half].split(size)), list(joined[half:].split(size))


def _target(statistics: Any, heads: HeadSet, pattern: str, device: torch.device) -> Target:
    """Return what the half's fits are made to, on the device that fits them."""
    return Target(*(part.to(device) for part in target(statistics, heads, pattern)))


def _by_head(values: Tensor, heads: HeadSet, like: Tensor) -> Tensor:
    """Spread `[F]` over `[L, H]`, NaN elsewhere."""
    spread = torch.full_like(like, torch.nan, dtype=torch.float64)
    for head, value in zip(heads, values.tolist(), strict=True):
        spread[head] = value
    return spread
