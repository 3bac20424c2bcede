"""What a frozen head's fixed pattern is made from: one pattern a file, dense or as a target for a compact fit."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError, check_keywords, did_you_mean
from saf.estimates.dirichlet import dirichlet
from saf.estimates.gaussian import gaussian
from saf.estimates.mean import dense_mean, mean
from saf.estimates.sampling import seed_of
from saf.estimates.sharp_mean import SHARP_MARGINALS, dense_sharp_mean, sharp_mean
from saf.estimates.structured_random import dense_structured_random, structured_random
from saf.estimates.target import Target, target_of
from saf.heads import Head, HeadSet
from saf.patterns import CompactPattern, DensePattern
from saf.statistics import AttentionStatistics

Storage = Literal["compact", "exponential", "dense", "dense_bfloat16"]
FITTED = ("compact", "exponential")
"""Storages whose patterns are fitted to marginals; the others keep every entry."""


class PatternKind(NamedTuple):
    """Say how to make one kind of pattern, dense and compact, and what to collect for each."""

    dense: Callable[..., Tensor]
    """`(statistics, heads, **options)` to the pattern, `[F, T, T]`."""
    collect: tuple[str, ...] = ()
    """What `dense` reads beside the statistics, names of `saf.statistics.COLLECTIONS`."""
    compact: Callable[..., Target] | None = None
    """`(statistics, heads, **options)` to what a compact pattern is fitted to; None: from the dense pattern."""
    collect_compact: tuple[str, ...] = ()
    """What `compact` reads beside the statistics."""
    exact: Callable[..., CompactPattern] | None = None
    """`(statistics, heads, **options)` to the pattern itself, `[F]`, where it is compact by nature and needs no fit."""


PATTERNS: dict[str, PatternKind] = {
    "mean": PatternKind(dense_mean, ("mean",), mean),
    "sharp_mean": PatternKind(dense_sharp_mean, ("logit_mean",), sharp_mean, SHARP_MARGINALS),
    "gaussian": PatternKind(gaussian, ("logit_mean", "logit_variance")),
    "dirichlet": PatternKind(dirichlet, ("mean", "row_variance")),
    "structured_random": PatternKind(dense_structured_random, exact=structured_random),
}

__all__ = [
    "FITTED",
    "PATTERNS",
    "PatternKind",
    "Storage",
    "Target",
    "collect_for",
    "dense_pattern",
    "exact_pattern",
    "target",
    "target_of",
]


def collect_for(name: str, storage: Storage = "compact") -> tuple[str, ...]:
    """Return what `calibrate(collect=...)` must keep for a pattern; raise InputError for an unknown name."""
    kind = _kind(name)
    return kind.collect_compact if storage in FITTED and kind.compact is not None else kind.collect


def target(statistics: AttentionStatistics, heads: Iterable[Head], name: str = "mean", **options: Any) -> Target:
    """Return what a pattern's compact form is fitted to, for `heads` in order.

    Options are those of the pattern: `seed` of the sampled ones, `scale` and `bounds` of dirichlet. A seed may also be
    a `torch.Generator`, which draws one for all heads: what a head draws depends on the seed, its layer and its id
    alone. Raises InputError for unknown names and options, and for statistics that lack what `collect_for` names.
    """
    kind, given = _kind(name), check_options(name, options)
    heads = _some(heads)
    if kind.compact is not None:
        return kind.compact(statistics, heads, **given)
    rows = [target_of(kind.dense(statistics, HeadSet([head]), **given)) for head in heads]
    return Target(*(torch.cat(column) for column in zip(*rows, strict=True)))


def exact_pattern(
    statistics: AttentionStatistics, heads: Iterable[Head], name: str, **options: Any
) -> CompactPattern | None:
    """Return the patterns of `heads` where this kind is compact by nature; None where it must be fitted.

    Options and errors are those of `target`.
    """
    kind, given = _kind(name), check_options(name, options)
    return None if kind.exact is None else kind.exact(statistics, _some(heads), **given)


def dense_pattern(
    statistics: AttentionStatistics,
    heads: Iterable[Head],
    name: str = "mean",
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DensePattern:
    """Return the pattern of `heads`, in order, entry by entry, rounded to `dtype`.

    Options and errors are those of `target`.
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype must be floating point; got {dtype}")
    kind, given = _kind(name), check_options(name, options)
    # Head by head: what a pattern is made from takes several times its own memory.
    return DensePattern(
        torch.cat([kind.dense(statistics, HeadSet([head]), **given).to(dtype) for head in _some(heads)])
    )


def check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a pattern takes, a generator given as `seed` replaced by a seed that it draws.

    `seed` may be given to all patterns. Raises InputError for other options and for what is no seed.
    """
    known = check_keywords(f"pattern {name!r}", options.keys() - {"seed"}, _kind(name).dense)
    given = {key: value for key, value in options.items() if key in known}
    if "seed" in given:
        given["seed"] = seed_of(given["seed"])
    return given


def _some(heads: Iterable[Head]) -> HeadSet:
    """Return heads as a set; raise InputError when there are none."""
    chosen = HeadSet(heads)
    if not len(chosen):
        raise InputError("a pattern needs at least one head; got none")
    return chosen


def _kind(name: str) -> PatternKind:
    """Return a kind of pattern by name; raise InputError for an unknown one."""
    if not isinstance(name, str) or name not in PATTERNS:
        raise InputError(f"unknown pattern {name!r}; expected one of {sorted(PATTERNS)}{did_you_mean(name, PATTERNS)}")
    return PATTERNS[name]
