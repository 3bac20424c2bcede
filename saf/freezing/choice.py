"""Which heads an event freezes or prunes: what its scores need, whom they propose, and whose fit is accepted."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import Batch, QKGradient, gate_gradients, head_outputs, read_sequences
from saf.calibration.capture import check_heads as check_measured
from saf.errors import InputError, SafWarning, SelectionError
from saf.freezing.config import COMPARING, REPLACING, FreezeConfig
from saf.heads import Head, HeadLayout, HeadSet
from saf.patterns import Pattern
from saf.scores import HeadOutputs, Score, required_inputs, score_name
from saf.selection import Chooser, chooser, existing, ranking, select
from saf.statistics import AttentionStatistics


@dataclass(frozen=True)
class Judged:
    """Hold how the compact fit of one head went; of a head that is pruned, that there was none."""

    fit_kl: float = field(default=0.0, kw_only=True)
    """Row-averaged KL from what was fitted to the fit, nats; 0 without a fit."""
    certificate: dict[str, Any] | None = field(default=None, kw_only=True)
    """The fit's `Certificate` in plain values; None without a fit."""


@dataclass(frozen=True)
class Made(Judged):
    """Hold one head's pattern, on the CPU, and how its compact fit went."""

    pattern: Pattern
    exponential: dict[str, Any] | None = field(default=None, kw_only=True)
    """With exponential storage, the numbers of `saf.fit.ExponentialFit` and the pattern's kind; None otherwise."""


def check_heads(config: FreezeConfig, layouts: Sequence[HeadLayout]) -> None:
    """Raise InputError unless the heads asked for are there.

    That is for heads that do not exist or are frozen, a count above the live ones, a rate of less than one head, none
    that is live, fewer heads than the smallest KV group where whole ones are asked for, and pruning that would leave no
    head in the whole model.
    """
    live = torch.tensor([[head in layout.live for head in range(layout.num_heads)] for layout in layouts])
    for heads in (config.exclude, config.only, config.match_heads):
        existing(live, heads or ())
    if frozen := sorted(head for head in existing(live, config.heads or ()) if not live[head]):
        raise InputError(f"{frozen} are frozen or pruned already; name live heads")
    left, total = int(live.sum()), live.numel()
    if not left:
        raise InputError(f"all {total} heads are frozen or pruned already; take a model with live heads")
    if config.count is not None and config.count > left:
        raise InputError(f"{config.count} heads asked for; {left} of {total} are live: ask for no more than these")
    asked, there = config.requested(total), sum(layout.num_slots for layout in layouts)
    if not asked and config.rate and config.count is None and config.heads is None and config.match_heads is None:
        raise InputError(f"a rate of {config.rate:g} of {total} heads is less than one: raise it, or give count")
    if config.whole_groups and 0 < asked < (smallest := _smallest_group(layouts)):
        raise InputError(
            f"whole_groups freezes at least {smallest} heads, a KV group's live ones, and {asked} are asked for: raise "
            "rate or count, or leave whole_groups out"
        )
    if config.operation == "prune" and min(asked, left) == there:
        raise InputError(
            f"pruning {asked} of {total} heads would leave the model none, and no token would read another: ask for "
            f"less than all {there} that are left"
        )


def check_room(config: FreezeConfig, layouts: Sequence[HeadLayout]) -> None:
    """Raise InputError where limits leave no head to choose, or with `strict` fewer than are asked for.

    What frozen heads of events to come leave is not known here: a run asks once, before its first event.
    """
    asked = config.requested(sum(layout.num_heads for layout in layouts))
    if config.heads is not None or config.match_heads is not None or not asked:
        return
    named = {(layer, head) for layer, layout in enumerate(layouts) for head in layout.live} - {*config.exclude}
    named = named if config.only is None else named & {*config.only}
    most = config.max_per_layer
    there = sum(count if most is None else min(count, most) for count in Counter(layer for layer, _ in named).values())
    if not there or (config.strict and there < asked and not config.whole_groups):  # a group may end beyond a budget
        raise InputError(
            f"{asked} heads are to be {config.kind}, and only, exclude and max_per_layer leave {there}: ask for fewer, "
            "or leave more to choose from"
        )


def check_heads_of(model: nn.Module, config: FreezeConfig) -> None:
    """Raise what `check_heads` does for a model's heads.

    Raises UnsupportedError for heads named in layers that stay ordinary, which are not measured.
    """
    adapter = adapter_for(model)
    check_heads(config, [site.layout for site in adapter.sites()])
    if config.heads is not None:
        check_measured(adapter, config.heads)


def _smallest_group(layouts: Sequence[HeadLayout]) -> int:
    """Return how many live heads the KV group has that has fewest, of groups with any."""
    size = layouts[0].num_heads // layouts[0].num_kv_heads
    return min(count for layout in layouts for count in Counter(head // size for head in layout.live).values())


def check_ranks(name: str | Score, values: Tensor, statistics: AttentionStatistics, dtype: torch.dtype) -> None:
    """Raise InputError for a score `[L, H]` that tells no live heads apart; a float64 model is measured in float64.

    That is one that is the same for all, or ranks what sequences change in attention where rounding alone explains it.
    Of N equal patterns a mean in precision eps misses each entry p by at most N eps p. Squares of a row's entries sum
    to 1 at most, so Eq. (1) is at most N/(N-1) (N eps)^2 / T; logarithms add 2 eps |log p| to Eq. (2), whose rows are
    at most eps (N + 2 log T).
    """
    live = values[~values.isnan()]
    same = len(live) > 1 and bool((live == live[0]).all())
    if not same and name in COMPARING:
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        count, length = statistics.num_sequences, statistics.length
        if name == "forward_kl":
            read, rounding = statistics.forward_kl, eps * (count + 2 * math.log(length))
        else:
            read, rounding = statistics.variance, count / max(count - 1, 1) * (count * eps) ** 2 / length
        same = bool((read[statistics.measured] <= rounding).all())
    if same:
        raise InputError(
            f"score {score_name(name)!r} must differ between heads, got {live[0].item():.2g} for all of them but for "
            "rounding; calibrate on sequences that differ"
        )


def scores_collect(config: FreezeConfig, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the first calibration keeps beside the statistics, for scores that read more than `given` brings."""
    names = {name for name in (config.score, config.match) if name is not None}
    return tuple(sorted({kept for name in names for kept in _collect_for_score(name, given)}))


def _collect_for_score(name: str | Score, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what `calibrate(collect=...)` must keep for a score, unless what it serves is given already."""
    return (
        ("mean_rows",)
        if "outputs" in required_inputs(name) and not isinstance(given.get("outputs"), HeadOutputs)
        else ()
    )


def gather(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    name: str | Score,
    *,
    given: Mapping[str, Any],
    heldout: Iterable[Batch] | None,
) -> dict[str, Any]:
    """Return what a score needs: from `given`, or measured here where sequences suffice.

    `gates` are taken on the calibration `batches` (paper, appendix C), `outputs` on `heldout` ones or on those that
    `given` has. What only training can measure, and `outputs` without held-out sequences, is left to `score` to miss.

    Raises InputError for a score that replaces patterns by their mean where all sequences are alike: nothing changes.
    """
    found: dict[str, Any] = {}
    for key in required_inputs(name):
        source = given.get(key, heldout if key == "outputs" else None)
        if key == "gates" and source is None:
            found[key] = gate_gradients(model, batches)
        elif key == "outputs" and source is not None and not isinstance(source, HeadOutputs):
            texts = read_sequences(source)
            together = [*read_sequences(batches).without_padding(), *texts.without_padding()]
            if name in REPLACING and read_sequences(together).num_different < 2:
                raise InputError(f"score {name!r} compares sequences: two must differ, got copies of one")
            found[key] = head_outputs(model, texts, statistics)
        elif source is not None:
            found[key] = source.scores() if isinstance(source, QKGradient) else source
    return found


def choose_by(scores: Mapping[str | Score, Tensor], config: FreezeConfig, *, group_size: int) -> Chooser:
    """Return what proposes heads by the configured score, budget and conditions, in a model of such KV groups."""
    needs: dict[str, Any] = {"group_size": group_size if config.whole_groups else 1}
    ranked = scores[config.score]
    if config.heads is not None:
        return chooser(ranked, count=len(config.heads), only=config.heads, **needs)
    needs["only"] = config.only
    exclude = {*config.exclude, *_from(ranked, config.below)}
    if config.match_heads is not None:
        return chooser(ranked, match=config.match_heads, exclude=exclude, **needs)
    total: dict[str, Any] = {"rate": config.rate} if config.count is None else {"count": config.count}
    if config.match is None:
        return chooser(ranked, **total, max_per_layer=config.max_per_layer, exclude=exclude, **needs)
    matched = select(scores[config.match], **total, exclude=config.exclude, **needs)
    return chooser(ranked, match=matched, exclude=exclude, **needs)


def _from(scores: Tensor, least: float | None) -> list[Head]:
    """Return the heads whose score `[L, H]` is at least `least`; none without it."""
    return [] if least is None else [(layer, head) for layer, head in (scores >= least).nonzero().tolist()]


def check_below(scores: Tensor, config: FreezeConfig) -> None:
    """Raise SelectionError where the settings' `below` is why no head may be chosen by these `scores` `[L, H]`."""
    order = ranking(scores, config.exclude, only=config.only)
    if config.below is None or not order:
        return
    lowest = float(scores[order[0]])
    what, told = "head", f"the lowest score is {lowest:.6g}"
    if config.whole_groups and lowest < config.below:
        what, told = "whole KV group", f"the lowest score of a head is {lowest:.6g}, and all of a group must score less"
    raise SelectionError(
        f"no {what} that may be {config.kind} scores below {config.below:g} by {score_name(config.score)} (below): "
        f"{told}. Raise below, or leave it out"
    )


def accept(
    choose: Chooser, make: Callable[[HeadSet], Mapping[Head, Judged]], config: FreezeConfig, *, before: int
) -> tuple[dict[Head, Judged], dict[Head, Judged]]:
    """Make patterns of heads in score order until k pass (paper, Algorithm 1); return them and the rejected ones.

    Candidates are taken in batches of as many as are still missing. Heads chosen together pass together. Warns of
    fewer than k, and of how many that makes with those `before`.
    """
    strict = config.strict or config.heads is not None
    made: dict[Head, Judged] = {}
    rejected: dict[Head, Judged] = {}
    proposed = choose.propose()
    available = sum(map(len, proposed))
    # Named heads are exactly those; a budget may end inside a KV group.
    if strict and (available < choose.total if config.heads is not None else not choose.attained(available)):
        raise SelectionError(f"the event asks for {choose.total} heads; {available} can be {config.kind}")
    while proposed:
        made |= make(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: made[head] for head in unit if not made[head].fit_kl <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                choose.accept(unit)
        if rejected and strict:
            listed = ", ".join(f"{head}: {rejected[head].fit_kl:.3f}" for head in sorted(rejected))
            those, way_out = (
                f"lowest-{score_name(config.score)}",
                "raise max_fit_kl, lower the rate, or leave strict out",
            )
            if config.heads is not None:
                those, way_out = "named", "raise max_fit_kl or name others"
            raise SelectionError(
                f"{len(rejected)} of the {choose.total} {those} heads do not fit within {config.max_fit_kl} nats "
                f"({listed}); {way_out}"
            )
        proposed = choose.propose()
    if not choose.attained(len(choose)):
        kind = config.kind
        reason = f"no further head fits within {config.max_fit_kl} nats" if rejected else f"no other may be {kind}"
        more, in_all = (" more", f"; {before + len(choose)} are {kind} in all") if before else ("", "")
        message = f"only {len(choose)} of {choose.total}{more} heads could be {kind}: {reason}{in_all}"
        warnings.warn(message, SafWarning, stacklevel=6)
    return {head: made[head] for head in HeadSet(choose)}, rejected
