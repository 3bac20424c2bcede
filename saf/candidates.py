"""Candidates of an event are heads in the order of a score; fits and joint cost accept as many as are requested."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from saf.calibration import Batch, QKGradient, Sequences, gate_gradients, head_outputs, read_sequences
from saf.errors import InputError, SafWarning, SelectionError
from saf.fitted_heads import Editor, FittedHead
from saf.freeze_config import COMPARING, FreezeConfig
from saf.heads import Head, HeadSet
from saf.joint_cost import JointCost, accept_jointly
from saf.loss_guard import perplexity_rise
from saf.models.adapter import Adapter, adapter_for
from saf.scores import HeadOutputs, Score, required_inputs, score, score_name
from saf.selection import Chooser, chooser, ranking, select
from saf.statistics import AttentionStatistics

CANDIDATES = 3
"""Heads of lowest score that are tried for each one that joint cost may take."""
_REPLACING = ("residual_cosine", "relative_output_change")
"""Scores of how the mean pattern changes held-out sequences: nothing where these are the calibration's one sequence."""


def all_scores(
    adapter: Adapter,
    sequences: Sequences,
    statistics: AttentionStatistics,
    config: FreezeConfig,
    heldout: Iterable[Batch] | None,
    inputs: Mapping[str, Any],
) -> dict[str | Score, Tensor]:
    """Return every score that the settings name, `[L, H]`; raise InputError for one that tells no heads apart.

    What scores read beside the statistics is in `inputs`, or measured here: gates on the calibration batches (paper,
    appendix C), outputs on the held-out ones.
    """
    scores: dict[str | Score, Tensor] = {}
    for name in config.score_names:
        needed: dict[str, Any] = {"seed": config.seed} if name == "random" else {}
        for key in required_inputs(name):
            source = inputs.get(key, heldout if key == "outputs" else None)
            if key == "gates" and source is None:
                source = gate_gradients(adapter.model, sequences)
            elif key == "outputs" and source is not None and not isinstance(source, HeadOutputs):
                texts = read_sequences(source)
                together = [*sequences.without_padding(), *texts.without_padding()]
                if name in _REPLACING and read_sequences(together).num_different < 2:
                    raise InputError(f"score {name!r} compares sequences: two must differ, got copies of one")
                source = head_outputs(adapter.model, texts, statistics)
            elif isinstance(source, QKGradient):
                source = source.scores()
            needed[key] = source
        scores[name] = score(statistics, name, **needed)
        if config.heads is None:
            _check_ranks(name, scores[name], statistics, adapter.dtype)
    return scores


def _check_ranks(name: str | Score, values: Tensor, statistics: AttentionStatistics, dtype: torch.dtype) -> None:
    """Raise InputError for a score `[L, H]` that is the same for all heads, or differs by rounding alone.

    Of N equal patterns a mean in precision eps misses each entry p by at most N eps p. Squares of a row's entries sum
    to 1 at most, so Eq. (1) is at most N/(N-1) (N eps)^2 / T; logarithms add 2 eps |log p| to Eq. (2), whose rows are
    at most eps (N + 2 log T). A float64 model is measured in float64.
    """
    live = values[~values.isnan()]
    same = len(live) > 1 and bool((live == live[0]).all())
    if not same and name in COMPARING:
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        count, length = statistics.num_sequences, statistics.length
        if name == "forward_kl":
            measured, rounding = statistics.forward_kl, eps * (count + 2 * math.log(length))
        else:
            measured, rounding = statistics.variance, count / max(count - 1, 1) * (count * eps) ** 2 / length
        same = bool((measured[statistics.measured] <= rounding).all())
    if same:
        raise InputError(
            f"score {score_name(name)!r} must differ between heads, got {live[0].item():.2g} for all of them but for "
            "rounding; calibrate on sequences that differ"
        )


def head_order(
    scores: Mapping[str | Score, Tensor], config: FreezeConfig, *, group_size: int = 1, allow_empty: bool = False
) -> Chooser:
    """Return the order of heads by the configured score, within its budget and limits; KV groups have `group_size`.

    Raises SelectionError where the settings' `below` is why no head may be chosen.
    """
    ranked = scores[config.score]
    limits: dict[str, Any] = {"group_size": group_size if config.whole_groups else 1}
    if config.heads is not None:
        return chooser(ranked, count=len(config.heads), only=config.heads, **limits)
    too_high = [] if config.below is None else (ranked >= config.below).nonzero().tolist()
    options: dict[str, Any] = {"only": config.only, "exclude": {*config.exclude, *map(tuple, too_high)}, **limits}
    total: dict[str, Any] = {"rate": config.rate} if config.count is None else {"count": config.count}
    if config.jointly:
        total = {"count": min(CANDIDATES * config.requested(ranked.numel()), int((~ranked.isnan()).sum()))}
    if config.match_heads is not None:
        order = chooser(ranked, match=config.match_heads, **options)
    elif config.match is not None:
        matched = select(scores[config.match], **total, **{**options, "exclude": config.exclude})
        order = chooser(ranked, match=matched, **options)
    else:
        order = chooser(ranked, **total, max_per_layer=config.max_per_layer, **options)
    lowest = ranking(ranked, config.exclude, only=config.only)[:1]
    if config.below is not None and order.is_empty and lowest and not allow_empty:
        unit = "KV group" if config.whole_groups else "head"
        raise SelectionError(
            f"no {unit} that may be {config.kind} scores below {config.below:g} by {score_name(config.score)}: the "
            f"lowest score is {float(ranked[lowest[0]]):.6g}. Raise below, or leave it out"
        )
    return order


def accept_fits(
    order: Chooser,
    fit: Callable[[HeadSet], Mapping[Head, FittedHead]],
    config: FreezeConfig,
    *,
    allow_empty: bool = False,
) -> tuple[dict[Head, FittedHead], dict[Head, FittedHead]]:
    """Fit heads in order until k are within the tolerance, or none is left; return these and the rejected ones.

    Candidates are fitted as many at a time as are still missing. The heads of a KV group are accepted together.
    """
    strict, named = config.strict or config.heads is not None, config.heads is not None
    fits: dict[Head, FittedHead] = {}
    rejected: dict[Head, FittedHead] = {}
    proposed = order.propose()
    available = sum(map(len, proposed))
    # Named heads are exactly those; a budget may end inside a KV group.
    if strict and (available < order.total if named else not order.attained(available)):
        raise SelectionError(f"the event asks for {order.total} heads; {available} can be {config.kind}")
    while proposed:
        fits |= fit(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: fits[head] for head in unit if not fits[head].fit_kl <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                order.accept(unit)
        if rejected and strict:
            listed = ", ".join(f"{head}: {rejected[head].fit_kl:.3f}" for head in sorted(rejected))
            remedy = "name others" if named else "lower the rate, or leave strict out"
            raise SelectionError(
                f"all {order.total} {'named' if named else f'lowest-{score_name(config.score)}'} heads must fit within "
                f"{config.max_fit_kl} nats, {len(rejected)} do not ({listed}): raise max_fit_kl, {remedy}"
            )
        proposed = order.propose()
    if not order.attained(len(order)) and (not config.jointly or not len(order)):
        reason = (
            f"no further head fits within {config.max_fit_kl} nats" if rejected else f"no other may be {config.kind}"
        )
        if not len(order) and not allow_empty:
            raise SelectionError(f"at least 1 head must be {config.kind}, got 0 of {order.total}: {reason}")
        message = f"only {len(order)} of {order.total} heads could be {config.kind}: {reason}"
        warnings.warn(message, SafWarning, stacklevel=5)  # the caller of freeze_, past on_rank0
    return {head: fits[head] for head in HeadSet(order)}, rejected


def within_budget(
    candidates: Iterable[Head],
    text: Any,
    config: FreezeConfig,
    editor: Editor,
    progress: Callable[[int, int], None] | None,
    *,
    allow_empty: bool,
) -> JointCost:
    """Return which candidates cost least together, within the budget; raise SelectionError where none is."""
    most = config.requested(sum(site.layout.num_heads for site in adapter_for(editor.model).sites()))
    budget = math.inf if config.budget is None else config.budget
    edits: dict[str, Any] = {"edit_": editor.edit_, "undo_": editor.undo_}
    joint = accept_jointly(editor.model, candidates, text, most, budget=budget, progress=progress, **edits)
    if joint.accepted or allow_empty:
        return joint
    least = perplexity_rise(0.0, min(joint.alone.values()))
    raise SelectionError(
        f"at least 1 head must keep perplexity within {budget:+.2%}, got none of {len(joint.alone)}: the cheapest "
        f"costs {least:+.2%} alone; raise budget"
    )
