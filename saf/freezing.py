"""`freeze_` is the paper's Algorithm 1: measure every head, fit the lowest ones, install the fits that are close.

Where its lines are: scores, 4 to 6, in `freeze_`; the order of heads and which are accepted, 7 to 10 and 16 to 20, in
`accept_fits` with `Chooser` of saf/selection.py; the mean pattern and its marginals, 11 and 12, in calibration (line 4
reads all it takes); the fit, 13 to 15, in `_fit`; the installation, 21, at the end of `freeze_`. The caller trains
before, 1 to 3, and after, 22 to 26. Settings are in saf/freeze_config.py, the record of an event in
saf/freeze_report.py, what heads cost on held-out text in saf/heldout.py.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration import (
    Batch,
    QKGradient,
    Sequences,
    calibrate,
    gate_gradients,
    head_outputs,
    heads_at_a_time,
    read_sequences,
)
from saf.calibration.capture import measurable_heads
from saf.distributed import all_ranks_or_raise, on_rank0
from saf.errors import InputError, LossError, SafWarning, SelectionError, UnsupportedError
from saf.fit import fit_exponential_heads, fit_kl, fit_with_certificate, split_options
from saf.freeze_config import FreezeConfig, check_heads, head_order
from saf.freeze_report import FreezeReport
from saf.heads import EDITED, Head, HeadSet
from saf.heldout import (
    GUARD_SEQUENCES,
    MAX_RISE,
    JointCost,
    Trial,
    accept_jointly,
    halves,
    heldout_loss,
    perplexity_rise,
    within_budget,
    worst_layer,
)
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for, rows_of
from saf.ops import choose_backend
from saf.patterns import CompactPattern, Pattern
from saf.scores import HeadOutputs, Score, required_inputs, score, score_name
from saf.selection import Chooser
from saf.statistics import AttentionStatistics
from saf.surgery import check_editable, install_, prune_, uninstall_, value_dtypes
from saf.targets import FITTED, collect_for, dense_pattern, exact_pattern, target

_AT_CALLER = {"category": SafWarning, "stacklevel": 5}
"""Warnings show the line that called `freeze_`, past a function here, its lambda and `on_rank0`."""


def freeze_(
    model: nn.Module,
    batches: Iterable[Batch],
    config: FreezeConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    heldout: Iterable[Batch] | None = None,
    accept_loss: bool | None = None,
    score_inputs: Mapping[str, Any] | None = None,
    max_heads: int | None = None,
    allow_empty: bool = False,
    capture_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    joint_progress: Callable[[int, int], None] | None = None,
) -> FreezeReport:
    """Freeze the heads whose attention depends least on the input, changing the model in place.

    With `FreezeConfig(operation="prune")` the heads chosen are removed by `prune_` instead, and nothing is fitted.
    In a `torch.distributed` group every process calls it with the same weights, and all install what the first one
    decides, or none where one of them fails. Wrap for data parallelism again afterwards.

    Args:
        model: The project's `GPT` or another supported causal language model.
        batches: Calibration sequences: LongTensors `[B, T]` or mappings with `input_ids`. Patterns cover T
            positions, so longer inputs are refused afterwards; a T below the model's own limit warns. A score that
            reads gates takes its loss at the mappings' `targets` `[B, T]` where they have them (-100 is none), at
            every next token otherwise.
        config: Settings; the paper's recipe at 25% by default.
        optimizer: The optimiser that trains the model: its state follows the retained rows, and it takes on the
            logits of trainable patterns.
        heldout: Further sequences of the same length. Their loss before and after is reported, and output-aware scores
            read them. By joint cost, heads are chosen by the first half of them and reported on by the second. Without
            them and an `optimizer`, a model of transformers is measured on 8 of the calibration sequences, and a rise
            of perplexity by more than 5% warns.
        accept_loss: Whether to keep a model whose perplexity on that text rises by more than 5%. By default that is
            refused without an `optimizer`; with one, training follows.
        score_inputs: Inputs of the score beyond the statistics, by name; `gradient` may be the `QKGradient` itself,
            and `outputs` the held-out sequences.
        max_heads: Freeze only so many of the heads chosen, those of lowest score; the report's `deferred` names the
            others, for `FreezeConfig(only=...)` later.
        allow_empty: Freeze no head where none may be chosen or none fits, with a warning, in place of raising.
        capture_bytes: Most memory for queries and keys at once; see `calibrate`.
        progress: Called with (layers measured, layers).
        joint_progress: Called with (heads measured alone or accepted, heads) while joint cost is measured.

    Raises:
        InputError: Batches or settings that cannot be used, a score without its inputs or the same for all heads, heads
            that do not exist or are not live, an optimiser that does not hold the model's weights.
        UnsupportedError: A backend that cannot run the model's frozen heads, or heads that cannot be measured.
        SelectionError: No head that may be chosen and fits; with `strict`, fewer than k. The model is unchanged.
        LossError: A rise of held-out perplexity that is not accepted. The model is as it was.
    """
    config, inputs = config or FreezeConfig(), score_inputs or {}
    check_editable(model, optimizer)  # now, not after the whole measurement
    adapter = adapter_for(model)
    timer = Stopwatch(adapter.device)
    sequences = on_rank0(lambda: _read(adapter, batches, config, allow_empty))
    choosing, reporting = _texts(adapter, sequences, heldout, config, training=optimizer is not None)

    # Line 4: measure attention in evaluation mode, weights held fixed, and its variance, Eq. (1).
    options = {"collect": config.collect, "capture_bytes": capture_bytes, "progress": progress}
    statistics = on_rank0(lambda: calibrate(model, sequences, timer=timer, **options))
    loss_before = loss_after = worst = None
    if reporting is not None:
        with timer("loss"):
            loss_before = loss_after = on_rank0(lambda: heldout_loss(model, reporting))

    # Lines 5 and 6: sort the heads by score, the lowest first; k = round(r L H).
    with timer("score"):
        scores = on_rank0(lambda: _scores(adapter, sequences, statistics, config, choosing, inputs))
    with timer("select"):
        layout = adapter.sites()[0].layout
        order = head_order(scores, config, group_size=layout.num_heads // layout.num_kv_heads)

    # Lines 7 to 20: fit head after head until k are within the tolerance; fewer are refused or warned of.
    fit = partial(fit_heads, model, sequences, statistics, config=config, timer=timer)
    fits, rejected = on_rank0(lambda: accept_fits(order, fit, config, allow_empty=allow_empty))
    if config.storage == "exponential":  # past the paper: patterns that run in linear time
        with timer("fit"):
            fits = on_rank0(partial(fit_exponential_forms, fits, config, adapter.device))

    # Past the paper: of more candidates than k, accept those that cost least together.
    edit_ = partial(_edit_, model, fits=fits, config=config, optimizer=optimizer)
    undo_ = partial(uninstall_, model, optimizer=optimizer)
    trial = partial(_trial, edit_, undo_)  # edits heads for the length of a measurement
    joint = None
    if config.jointly:
        texts = choosing, reporting, loss_before
        with timer("joint cost"):
            joint = on_rank0(lambda: _cheapest_together(model, fits, config, texts, trial, joint_progress, allow_empty))
    accepted = fits if joint is None else joint.accepted
    ranked = sorted(accepted, key=lambda head: (float(scores[config.score][head]), head))
    heads, deferred = HeadSet(ranked[:max_heads]), () if max_heads is None else tuple(ranked[max_heads:])

    # Past the paper: measure what they cost, and refuse it where that is too much and no training follows.
    if len(heads) and loss_before is not None:
        by_default = "train" if optimizer is not None else "warn" if heldout is None else "refuse"
        on_rise = {None: by_default, True: "accept", False: "refuse"}[accept_loss]
        with timer("loss"):
            loss_after, worst = on_rank0(lambda: _cost(model, heads, reporting, loss_before, trial, on_rise))

    # Line 21: install the patterns; value and output weights and the optimiser's state stay.
    if len(heads):
        with timer("prune" if config.operation == "prune" else "install"):
            _on_all_ranks_(edit_, undo_, heads)

    own = {head: fits[head] for head in heads if fits[head].pattern is not None}
    tried = {head: fits[head] for head in accepted} | rejected
    counts = {kind: len(adapter.heads(kind)) for kind in EDITED}
    report = FreezeReport(
        heads=heads,
        patterns=_stacked([fit.pattern for fit in own.values() if fit.pattern is not None]),
        fit_kl={head: fit.fit_kl for head, fit in own.items()},
        rejected={head: fit.fit_kl for head, fit in rejected.items()},
        requested=config.requested(statistics.variance.numel()),
        in_all={kind: count for kind, count in counts.items() if count or kind == config.kind},
        deferred=deferred,
        scores=scores[config.score],
        statistics=statistics,
        config=config.to_dict(),
        certificates={head: fit.certificate for head, fit in tried.items() if fit.certificate is not None},
        exponential={head: fit.exponential for head, fit in own.items() if fit.exponential is not None},
        joint_cost=joint,
        loss_before=loss_before,
        loss_after=loss_after,
        worst_layer=worst,
        seconds=on_rank0(lambda: timer.seconds),
    )
    if len(heads):
        adapter.remember(report.known())
    return report


# --- what is read, before anything is measured


def _read(adapter: Adapter, batches: Iterable[Batch], config: FreezeConfig, allow_empty: bool) -> Sequences:
    """Return the batches, read once; raise a SafError for what cannot be measured or frozen, before anything is."""
    sequences, longest, sites = read_sequences(batches), adapter.max_length, adapter.sites()
    length, freezes = sequences.length, config.operation == "freeze"  # pruned heads have no pattern that ends
    if freezes and longest is not None and length != longest:
        shorter = "once heads are frozen, longer inputs are refused"
        longer = "attention is measured beyond its context"
        warnings.warn(
            f"calibration has {length} tokens, the model takes up to {longest}: "
            f"{shorter if length < longest else longer}; calibrate on {longest} tokens unless this is intended",
            **_AT_CALLER,
        )
    check_heads(config, [site.layout for site in sites], allow_empty=allow_empty)
    if config.heads is not None:
        measurable_heads(adapter, config.heads)
    config.check_calibration(sequences=sequences.num_different)
    if "gates" in config.needs:
        adapter.check_next_token()
    if freezes:
        kinds = {"trainable": config.trainable, "exponential": config.storage == "exponential"}
        for device, dtypes in {(rows_of(site, "value").parameter.device, value_dtypes(site)) for site in sites}:
            choose_backend(config.backend, device=device, dtypes=dtypes, **kinds)
    return sequences


def _texts(
    adapter: Adapter, sequences: Sequences, heldout: Iterable[Batch] | None, config: FreezeConfig, *, training: bool
) -> tuple[Any, Any]:
    """Return the held-out text that scores and joint cost read, and that on which the loss is reported.

    Without any, a pretrained model of another library that is not in training reports on calibration sequences.
    """
    if heldout is None:
        if config.jointly:
            raise InputError("joint cost is measured on held-out text: give heldout= sequences")
        if training or adapter.saves_weights:
            return None, None
        try:
            adapter.check_next_token()
        except UnsupportedError:
            return None, None
        return None, [row[None] for row in sequences.tokens[:GUARD_SEQUENCES] if len(row) > 1] or None
    adapter.check_next_token()
    if isinstance(heldout, list) and not heldout:
        raise InputError("heldout must have at least one sequence, got none; give text beyond the calibration's")
    text = read_sequences(heldout)
    if config.operation == "freeze" and text.length > sequences.length + 1:
        longest = f"{sequences.length + 1} tokens a sequence, by the calibration"
        raise InputError(f"heldout must have at most {longest}, got {text.length}")
    return halves(text) if config.jointly else (text, text)


# --- lines 5 and 6: scores


def _scores(
    adapter: Adapter,
    sequences: Sequences,
    statistics: AttentionStatistics,
    config: FreezeConfig,
    heldout: Iterable[Batch] | None,
    inputs: Mapping[str, Any],
) -> dict[str | Score, Tensor]:
    """Return every score that the settings name, `[L, H]`; raise InputError for one that is the same for all heads.

    What scores read beyond the statistics is in `inputs`, or measured here: gates on the calibration batches (paper,
    appendix C), outputs on the held-out ones.
    """
    scores: dict[str | Score, Tensor] = {}
    for name in config.score_names:
        needed: dict[str, Any] = {"seed": config.seed} if name == "random" else {}
        for key in required_inputs(name):
            source = inputs.get(key, heldout if key == "outputs" else None)
            if isinstance(source, QKGradient):
                source = source.scores()
            elif key == "gates" and source is None:
                source = gate_gradients(adapter.model, sequences)
            elif key == "outputs" and source is not None and not isinstance(source, HeadOutputs):
                source = head_outputs(adapter.model, read_sequences(source), statistics)
            needed[key] = source
        scores[name] = score(statistics, name, **needed)
        live = scores[name][~scores[name].isnan()]
        if config.heads is None and len(live) > 1 and bool((live == live[0]).all()):
            raise InputError(f"score {score_name(name)!r} must differ between heads, got {live[0]:.2g} for all of them")
    return scores


# --- lines 7 to 20: fits, and which are accepted


@dataclass(frozen=True)
class FittedHead:
    """Hold a head's pattern, on the CPU, and how its compact fit went; a pruned head has neither."""

    pattern: Pattern | None = None
    fit_kl: float = 0.0
    """Row-averaged KL from the target to the fit, nats; 0 without a fit."""
    certificate: dict[str, Any] | None = None
    """The fit's `Certificate` in plain values; None without a fit."""
    marginals: Tensor | None = None
    """With exponential storage, those of the target by key and by distance, `[2, T]`; None otherwise."""
    exponential: dict[str, Any] | None = None
    """With exponential storage, the numbers of `saf.fit.ExponentialFit` and the pattern's kind; None otherwise."""


def fit_heads(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    heads: HeadSet,
    config: FreezeConfig,
    timer: Stopwatch,
) -> dict[Head, FittedHead]:
    """Return each head's pattern, with the KL and certificate of its compact fit.

    What the pattern needs beyond the statistics is measured for these heads, as many at a time as memory allows.
    """
    if config.operation == "prune":
        return dict.fromkeys(heads, FittedHead())
    collect = collect_for(config.pattern, config.storage)
    size = heads_at_a_time(model, collect, sequences=statistics.num_sequences, length=statistics.length)
    device, ordered = adapter_for(model).device, list(heads)
    fits: dict[Head, FittedHead] = {}
    for start in range(0, len(ordered), size):
        some = HeadSet(ordered[start : start + size])
        measured = calibrate(model, batches, collect=collect, heads=some, timer=timer) if collect else statistics
        with timer("fit"):
            fits |= zip(some, _fit(measured, some, config, device), strict=True)
    return fits


def _fit(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> list[FittedHead]:
    """Make the patterns of heads from statistics that have all they need; fits run on `device`."""
    options = {"seed": config.seed} | config.pattern_options
    if config.storage not in FITTED:
        dtype = torch.bfloat16 if config.storage == "dense_bfloat16" else torch.float32
        return [*map(FittedHead, dense_pattern(statistics, heads, config.pattern, dtype=dtype, **options).singles())]
    if (exact := exact_pattern(statistics, heads, config.pattern, **options)) is not None:
        return [*map(FittedHead, exact.canonical().singles())]
    # Lines 11 and 12: the floored, renormalised mean pattern enters by its marginals, Eq. (4), and its entropy alone.
    goal = [part.to(device) for part in target(statistics, heads, config.pattern, **options)]
    options, _ = split_options(config.fitter, config.fitter_options, config.storage)
    # Lines 13 to 15: key and distance logits, Z of Eq. (3), and the KL of the fit from the pattern.
    compact, certificate = fit_with_certificate(*goal[:2], fitter=config.fitter, **options)
    fits = [compact.to(device="cpu").singles(), fit_kl(compact, *goal).tolist(), certificate.to_dicts()]
    if config.storage == "exponential":
        fits.append(torch.stack(goal[:2], 1).cpu().unbind())
    return [*map(FittedHead, *fits)]


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
    strict = config.strict or config.heads is not None
    fits: dict[Head, FittedHead] = {}
    rejected: dict[Head, FittedHead] = {}
    # Lines 7 to 10, and 19 for the next heads: none is proposed once k are accepted.
    while (proposed := order.propose()) and not (rejected and strict):
        fits |= fit(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Line 16. Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: fits[head] for head in unit if not fits[head].fit_kl <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                order.accept(unit)  # lines 17 and 18
    fewer = not order.attained(len(order))
    if fewer and (strict or not len(order) or not config.jointly):  # line 20
        reason = "no other may be chosen" + ("" if config.below is None else f" and scores below {config.below:g}")
        if rejected:
            listed = ", ".join(f"{head}: {fit.fit_kl:.3f}" for head, fit in sorted(rejected.items())[:4])
            reason = f"{len(rejected)} do not fit within max_fit_kl={config.max_fit_kl} nats ({listed})"
        if strict or not (len(order) or allow_empty):
            least = order.total if strict else 1
            raise SelectionError(f"at least {least} of {order.total} heads must be {config.kind}, and {reason}")
        warnings.warn(f"only {len(order)} of {order.total} heads could be {config.kind}: {reason}", **_AT_CALLER)
    return {head: fits[head] for head in HeadSet(order)}, rejected


def fit_exponential_forms(
    fits: Mapping[Head, FittedHead], config: FreezeConfig, device: torch.device
) -> dict[Head, FittedHead]:
    """Return accepted heads with exponential patterns; a head whose one is outside the tolerance stays compact."""
    if not fits:
        return {}
    patterns: Any = [fit.pattern for fit in fits.values()]
    compact = CompactPattern.stack(patterns).to(device=device)
    marginals = torch.stack([fit.marginals for fit in fits.values() if fit.marginals is not None], 1).to(device)
    _, options = split_options(config.fitter, config.fitter_options, config.storage)
    forms = {}
    found = fit_exponential_heads(compact, *marginals, **options)
    for (head, fit), own, form in zip(fits.items(), patterns, found, strict=True):
        kl = fit.fit_kl if form.pattern.kind == "compact" else fit.fit_kl + form.extra_kl
        pattern, kl = (form.pattern.to(device="cpu"), kl) if kl <= config.max_fit_kl else (own, fit.fit_kl)
        numbers = {name: value for name, value in vars(form).items() if name != "pattern"} | {"kind": pattern.kind}
        forms[head] = replace(fit, pattern=pattern, fit_kl=kl, marginals=None, exponential=numbers)
    return forms


# --- joint cost, the guard and installation


def _edit_(
    model: nn.Module,
    heads: HeadSet,
    *,
    fits: Mapping[Head, FittedHead],
    config: FreezeConfig,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Install the heads' patterns, or remove the heads where the settings prune."""
    if config.operation == "prune":
        prune_(model, heads, optimizer=optimizer)
        return
    patterns: Any = [fits[head].pattern for head in heads]
    install_(model, heads, patterns, optimizer=optimizer, backend=config.backend, trainable=config.trainable)


@contextmanager
def _trial(edit_: Callable[[HeadSet], None], undo_: Callable[[HeadSet], None], heads: HeadSet) -> Iterator[None]:
    """Edit heads within the block."""
    edit_(heads)
    try:
        yield
    finally:
        undo_(heads)


def _on_all_ranks_(edit_: Callable[[HeadSet], None], undo_: Callable[[HeadSet], None], heads: HeadSet) -> None:
    """Edit heads on every rank, or on none: where the edit of one rank fails, the others undo theirs."""
    edited = False
    try:
        with all_ranks_or_raise():
            edit_(heads)
            edited = True
    except Exception:
        if edited:
            undo_(heads)
        raise


def _cheapest_together(
    model: nn.Module,
    fits: Mapping[Head, FittedHead],
    config: FreezeConfig,
    texts: tuple[Any, Any, Any],
    trial: Trial,
    progress: Callable[[int, int], None] | None,
    allow_empty: bool,
) -> JointCost:
    """Return which of the fitted heads cost least together, within the budget; raise SelectionError where none is.

    `texts` are the text by which heads are accepted, other text on which the budget must hold, and the loss there.
    """
    choosing, reporting, loss = texts
    most = config.requested(sum(site.layout.num_heads for site in adapter_for(model).sites()))
    budget = math.inf if config.budget is None else config.budget
    joint = accept_jointly(model, fits, choosing, most, trial=trial, budget=budget, progress=progress)
    if config.budget is not None:
        joint = within_budget(joint, model, reporting, loss, budget=budget, trial=trial)
    if not joint.accepted and not allow_empty:
        least = perplexity_rise(0.0, min(joint.alone.values()))
        raise SelectionError(
            f"at least 1 head must keep perplexity within {100 * budget:+.3g}% on both halves of the text, got none of "
            f"{len(joint.alone)}: the cheapest costs {100 * least:+.3g}% alone where heads are chosen; "
            "raise budget (--budget)"
        )
    return joint


def _cost(
    model: nn.Module, heads: HeadSet, text: Any, before: float, trial: Trial, on_rise: str
) -> tuple[float, tuple[int, float] | None]:
    """Return the loss with the heads frozen, and the worst layer of a rise beyond the limit that no training follows.

    Such a rise raises LossError, warns, or is accepted.
    """
    with trial(heads):
        after = heldout_loss(model, text)
    rise = perplexity_rise(before, after)
    if rise <= MAX_RISE or on_rise == "train":  # a rise that is NaN is never within the limit
        return after, None
    layer, alone = worst_layer(model, heads, text, trial)
    advice = (
        f"layer {layer} costs most (its {len(heads.in_layer(layer))} heads alone {alone:.1%}); freeze fewer there, "
        "choose heads by joint cost (budget=0.01)"
    )
    if on_rise == "refuse":
        raise LossError(
            f"held-out perplexity must rise by at most {MAX_RISE:.0%}, got {rise:.1%}: {advice}, or pass "
            "accept_loss=True (--accept-loss)"
        )
    if on_rise == "warn":
        warnings.warn(f"perplexity rose by {rise:.1%} on the calibration text: {advice}, or train on", **_AT_CALLER)
    return after, (layer, alone)


def _stacked(patterns: Sequence[Pattern]) -> Pattern | list[Pattern] | None:
    """Stack compact or dense patterns over `[F]`; others differ in shape and stay a list. None when there are none."""
    if not patterns or {one.kind for one in patterns} not in ({"compact"}, {"dense"}):
        return list(patterns) or None
    kind: Any = type(patterns[0])
    return kind.stack(patterns)
