"""`freeze_` is the paper's Algorithm 1: measure every head, fit the lowest ones, install the fits that are close.

Its lines 4 to 21 stand in `freeze_` one after another, those of a fit, 11 to 15, in `fit_heads` below it. The caller
trains before, lines 1 to 3, and after, 22 to 26. Settings are in saf/freeze_config.py, the result in
saf/freeze_report.py, the cost of heads in saf/heldout.py.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

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
from saf.errors import InputError, LengthWarning, LossError, SafWarning, SelectionError, UnsupportedError
from saf.exponential_fit import ExponentialFit, fit_exponential_heads
from saf.fit import fit_kl, fit_with_certificate
from saf.freeze_config import FreezeConfig, check_config, check_heads, head_order
from saf.freeze_report import FittedHead, FreezeReport
from saf.heads import EDITED, Head, HeadSet
from saf.heldout import GUARD_SEQUENCES, MAX_RISE, LossChange, Trial, choose_jointly, halves, worst_layer
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for
from saf.ops import choose_backend
from saf.scores import HeadOutputs, Score, required_inputs, score, score_name
from saf.selection import Chooser
from saf.statistics import AttentionStatistics
from saf.surgery import check_editable, install_, prune_, uninstall_, values_of
from saf.targets import FITTED, collect_for, dense_pattern, exact_pattern, target

# Warnings show the line that called `freeze_`: past a helper below, `choose`, `on_rank0` and `freeze_` itself.
_CALLER = 5


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
        model: The project's `GPT` or another supported causal language model, compiled or not: compiled code follows
            at the next call. Of a data-parallel wrapper pass the `.module`.
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
    config = FreezeConfig() if config is None else config
    check_config(config)  # the default takes None's place alone: 0 or {} would freeze a quarter of the heads
    adapter = check_editable(model, optimizer)  # now, not after the whole measurement
    timer = Stopwatch(adapter.device)

    def choose() -> FreezeReport:
        """Lines 4 to 20 of the algorithm: the first process measures and decides for all."""
        sequences = read_sequences(batches)
        check_event(adapter, sequences, config, allow_empty=allow_empty)
        _warn_of_length(adapter.max_length, sequences.length, config)
        choosing, reporting = _texts(adapter, sequences, heldout, config, training=optimizer is not None)

        # Line 4: measure attention and its variance, Eq. (1), in evaluation mode, weights held fixed.
        statistics = calibrate(
            model, sequences, collect=config.collect, timer=timer, capture_bytes=capture_bytes, progress=progress
        )

        # Line 5: order the heads by increasing score.
        with timer("score"):
            scores = _scores(adapter, sequences, statistics, config, choosing, score_inputs or {})
        with timer("select"):
            order = head_order(scores, config, adapter.sites()[0].layout)

        # Line 6: k = round(r L H); no head is accepted yet.
        k = config.requested(statistics.variance.numel())
        fits, rejected = dict[Head, FittedHead](), dict[Head, FittedHead]()

        # Lines 7 to 10: take the next heads of the order, as many as are still missing, until k are accepted.
        while (units := order.propose()) and not (rejected and config.all_or_none):
            # Lines 11 to 15: fit their mean patterns, and measure the KL of each fit.
            fits |= fit_heads(model, sequences, statistics, HeadSet(chain(*units)), config, timer)
            for unit in units:  # a head, or a KV group
                # Line 16: compare the KL with the tolerance. Not by ">": a KL that is NaN is never within it.
                far = {head: fits[head] for head in unit if not fits[head].fit_kl <= config.max_fit_kl}
                # Lines 17 and 18: accept heads that are within it.
                if not far:
                    order.accept(unit)
                rejected |= far

        # Line 20: verify that k heads are accepted.
        _check_number(order, rejected, config, allow_empty=allow_empty)
        fits = {head: fits[head] for head in HeadSet(order.accepted)}

        # Past the paper: of three times as many, accept the heads that cost least together.
        trial, joint = partial(_trial, model, fits, config, optimizer), None
        if config.uses_joint_cost:
            options = {"budget": config.budget, "allow_empty": allow_empty, "progress": joint_progress}
            with timer("joint cost"):
                joint = choose_jointly(model, fits, (choosing, reporting), k, trial=trial, **options)
            fits = {head: fits[head] for head in joint.accepted}
        ranked = sorted(fits, key=lambda head: (float(scores[config.score][head]), head))
        heads = HeadSet(ranked[:max_heads])

        # Past the paper: measure what they cost, and refuse it where that is too much and no training follows.
        # On calibration text alone a rise only warns: patterns are fitted to it, and it may be a few short sequences.
        by_default = "train" if optimizer is not None else "warn" if heldout is None else "refuse"
        on_rise = by_default if accept_loss is None else "accept" if accept_loss else "refuse"
        loss, worst = _cost(model, heads, reporting, trial, on_rise, timer)

        in_all = {kind: len(adapter.heads(kind)) for kind in EDITED}
        in_all[config.kind] += len(heads)
        # Pruned heads have no patterns: their record names no storage, so that it is settings again.
        stored = {} if config.operation == "prune" else {"storage": config.storage_at(statistics.length)}
        return FreezeReport(
            heads=heads,
            deferred=tuple(ranked[len(heads) :]),
            fits=fits,
            rejected_fits=rejected,
            requested=k,
            scores=scores[config.score],
            statistics=statistics,
            config=config.to_dict() | stored,
            in_all=in_all,
            seconds=timer.seconds,
            joint_cost=joint,
            loss=loss,
            loss_text="calibration" if heldout is None else "held-out",
            worst_layer=worst,
        )

    report = on_rank0(choose)  # on every rank the first one's report, or its error
    if len(report.heads):
        # Line 21: install the patterns; value and output weights and the optimiser's state stay.
        # On all ranks or on none: where one fails, the others undo theirs.
        with timer("prune" if config.operation == "prune" else "install"), ExitStack() as undo:
            with all_ranks_or_raise():
                _edit_(model, report.fits, config, optimizer, report.heads)
                undo.callback(uninstall_, model, report.heads, optimizer=optimizer)
            undo.pop_all()
        report = replace(report, seconds=on_rank0(lambda: timer.seconds))  # with those of installing
        adapter.record_event(report.model_config_entries)
    return report


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
    collect = collect_for(config.pattern, config.storage_at(statistics.length))
    fits, size, measured = dict[Head, FittedHead](), max(1, len(heads)), statistics
    device = adapter_for(model).device
    if collect:
        size = heads_at_a_time(model, collect, sequences=statistics.num_sequences, length=statistics.length)
    for start in range(0, len(heads), size):
        some = HeadSet(heads[start : start + size])
        if collect:
            measured = calibrate(model, batches, collect=collect, heads=some, timer=timer)
        with timer("fit"):
            fits |= zip(some, _fit(measured, some, config, device), strict=True)
    return fits


def _fit(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> list[FittedHead]:
    """Return the patterns of heads from statistics that have all they need; fits run on `device`."""
    options: dict[str, Any] = {"seed": config.seed} | config.pattern_options
    storage = config.storage_at(statistics.length)
    if storage not in FITTED:
        return [FittedHead(one) for one in dense_pattern(statistics, heads, config.pattern, **options).singles()]
    if (exact := exact_pattern(statistics, heads, config.pattern, **options)) is not None:
        return [FittedHead(one) for one in exact.canonical().singles()]
    # Lines 11 and 12: the pattern, its entries floored at 1e-9 and its rows normalised, enters by its marginals, the
    # sums over queries by key and by distance, and by its entropy, Eq. (S.4).
    eta_abs, eta_rel, entropy = (part.to(device) for part in target(statistics, heads, config.pattern, **options))
    # Lines 13 and 14: fit alpha and rho to the marginals, Eq. (4); Z follows from them, Eq. (3).
    compact_options, exponential_options = config.fit_options(storage)
    compact, certificate = fit_with_certificate(eta_abs, eta_rel, fitter=config.fitter, **compact_options)
    # Line 15: kappa, the row-averaged KL from the pattern to its fit, Eq. (S.7).
    kl = fit_kl(compact, eta_abs, eta_rel, entropy).tolist()
    fits = list(map(FittedHead, compact.to(device="cpu").singles(), kl, certificate.to_dicts()))
    close = [number for number, fit in enumerate(fits) if fit.fit_kl <= config.max_fit_kl]
    if storage == "exponential" and close:  # past the paper: patterns that run in linear time
        forms = fit_exponential_heads(compact[close], eta_abs[close], eta_rel[close], **exponential_options)
        for number, form in zip(close, forms, strict=True):
            fits[number] = _in_linear_time(fits[number], form, config.max_fit_kl)
    return fits


def _in_linear_time(fit: FittedHead, form: ExponentialFit, max_fit_kl: float) -> FittedHead:
    """Return a head with its exponential pattern, or as it is where that one is outside the tolerance."""
    kl = fit.fit_kl + form.extra_kl  # the two add up: `extra_kl` is the loss of Eq. (4) above the compact fit's
    if form.pattern.kind == "exponential" and kl <= max_fit_kl:
        fit = replace(fit, pattern=form.pattern.to(device="cpu"), fit_kl=kl)
    assert fit.pattern is not None
    numbers = {name: value for name, value in vars(form).items() if name != "pattern"}
    return replace(fit, exponential=numbers | {"kind": fit.pattern.kind})


# --- before line 4: what is checked and read


def check_event(adapter: Adapter, sequences: Sequences, config: FreezeConfig, *, allow_empty: bool) -> None:
    """Raise a SafError for what an event of these settings cannot measure or freeze."""
    sites = adapter.sites()
    check_heads(config, [site.layout for site in sites], allow_empty=allow_empty)
    if config.heads is not None:
        measurable_heads(adapter, config.heads)
    config.check_calibration(sequences=sequences.num_distinct)
    if "gates" in config.needs:
        adapter.check_next_token()
    if config.operation == "freeze":
        kinds = {"trainable": config.trainable, "exponential": config.storage_at(sequences.length) == "exponential"}
        for device, dtypes in {values_of(site) for site in sites}:
            choose_backend(config.backend, device=device, dtypes=dtypes, **kinds)


def _warn_of_length(longest: int | None, length: int, config: FreezeConfig) -> None:
    """Warn of calibration sequences that are not of the model's length; pruned heads have no pattern that ends."""
    if config.operation == "prune" or longest is None or length == longest:
        return
    effect = "attention is measured beyond its context"
    if length < longest:
        effect = "once heads are frozen, longer inputs are refused"
    warnings.warn(
        f"calibration has {length} tokens, the model takes up to {longest}: {effect}; calibrate on {longest} "
        "tokens unless this is intended",
        LengthWarning if length < longest else SafWarning,
        stacklevel=_CALLER,
    )


def _texts(
    adapter: Adapter, sequences: Sequences, heldout: Iterable[Batch] | None, config: FreezeConfig, *, training: bool
) -> tuple[Any, Any]:
    """Return the held-out text that scores and joint cost read, and that on which the loss is reported.

    Without any, a pretrained model of another library that is not in training reports on calibration sequences.
    """
    if heldout is None:
        if config.uses_joint_cost:
            raise InputError("joint cost is measured on held-out text: give heldout= sequences")
        if training or adapter.is_gpt:  # it is trained on, or measured by its run
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
    # One token more than the patterns cover: the last token of a sequence is predicted, and never read.
    if config.operation == "freeze" and text.length > sequences.length + 1:
        longest = f"{sequences.length + 1} tokens a sequence, by the calibration"
        raise InputError(f"heldout must have at most {longest}, got {text.length}")
    return halves(text) if config.uses_joint_cost else (text, text)


# --- lines 5 and 20: scores, and the number of heads


def _scores(
    adapter: Adapter,
    sequences: Sequences,
    statistics: AttentionStatistics,
    config: FreezeConfig,
    heldout: Iterable[Batch] | None,
    inputs: Mapping[str, Any],
) -> dict[str | Score, torch.Tensor]:
    """Return every score that the settings name, `[L, H]`; raise InputError for one that is the same for all heads.

    What scores read beyond the statistics is in `inputs`, or measured here: gates on the calibration batches (paper,
    appendix C), outputs on the held-out ones.
    """
    scores: dict[str | Score, torch.Tensor] = {}
    for name in config.score_names:
        needed: dict[str, Any] = {"seed": config.seed} if name == "random" else {}
        for key in required_inputs(name):
            source = inputs.get(key, heldout if key == "outputs" else None)
            if isinstance(source, QKGradient):
                source = source.scores()
            elif key == "gates" and source is None:
                source = gate_gradients(adapter.model, sequences)
            elif key == "outputs" and source is not None and not isinstance(source, HeadOutputs):
                source = head_outputs(adapter.model, source, statistics)
            needed[key] = source
        scores[name] = score(statistics, name, **needed)
        live = scores[name][~scores[name].isnan()]
        # Equal scores would choose heads by their number, without a word.
        if config.heads is None and len(live) > 1 and bool((live == live[0]).all()):
            raise InputError(f"score {score_name(name)!r} must differ between heads, got {live[0]:.2g} for all of them")
    return scores


def _check_number(
    order: Chooser, rejected: Mapping[Head, FittedHead], config: FreezeConfig, *, allow_empty: bool
) -> None:
    """Warn where fewer heads than requested are accepted; raise SelectionError where that may not be."""
    accepted = len(order.accepted)
    if order.attained(accepted) or (config.uses_joint_cost and accepted):  # joint cost takes a share of its candidates
        return
    reason = "no other may be chosen" + ("" if config.below is None else f" and scores below {config.below:g}")
    if rejected:
        listed = ", ".join(f"{head}: {fit.fit_kl:.3f}" for head, fit in sorted(rejected.items())[:4])
        reason = f"{len(rejected)} do not fit within max_fit_kl={config.max_fit_kl} nats ({listed})"
    if config.all_or_none or not (accepted or allow_empty):
        least = order.total if config.all_or_none else 1
        raise SelectionError(f"at least {least} of {order.total} heads must be {config.kind}, and {reason}")
    warnings.warn(
        f"only {accepted} of {order.total} heads could be {config.kind}: {reason}", SafWarning, stacklevel=_CALLER
    )


# --- the edit, for good at line 21, and for a while where its cost is measured


def _edit_(
    model: nn.Module, fits: Mapping[Head, FittedHead], config: FreezeConfig, optimizer: Any, heads: HeadSet
) -> None:
    """Install the heads' patterns, or remove the heads where the settings prune."""
    if config.operation == "prune":
        prune_(model, heads, optimizer=optimizer)
    else:
        patterns: Any = [fits[head].pattern for head in heads]
        install_(model, heads, patterns, optimizer=optimizer, backend=config.backend, trainable=config.trainable)


@contextmanager
def _trial(
    model: nn.Module, fits: Mapping[Head, FittedHead], config: FreezeConfig, optimizer: Any, heads: HeadSet
) -> Iterator[None]:
    """Edit heads within the block."""
    _edit_(model, fits, config, optimizer, heads)
    try:
        yield
    finally:
        uninstall_(model, heads, optimizer=optimizer)


def _cost(
    model: nn.Module, heads: HeadSet, text: Any, trial: Trial, on_rise: str, timer: Stopwatch
) -> tuple[LossChange | None, tuple[int, float] | None]:
    """Return the loss before and after, and the worst layer of a rise beyond the limit that no training follows.

    Such a rise raises LossError, warns, or is accepted. Without a text nothing is measured.
    """
    if text is None:
        return None, None
    with timer("loss"):
        # Measured by installing the heads and undoing that: where the model is refused, it is as it was.
        loss = LossChange.measure(model, text, trial(heads))
        # A rise that is NaN is never within the limit.
        if not len(heads) or on_rise == "train" or loss.rise <= MAX_RISE:
            return loss, None
        layer, alone = worst_layer(model, heads, text, trial)
    advice = (
        f"layer {layer} costs most (its {len(heads.in_layer(layer))} heads alone {alone:.1%}); freeze fewer there, "
        "choose heads by joint cost (budget=0.01)"
    )
    if on_rise == "refuse":
        raise LossError(
            f"held-out perplexity must rise by at most {MAX_RISE:.0%}, got {loss.rise:.1%}: {advice}, or pass "
            "accept_loss=True (--accept-loss)"
        )
    if on_rise == "warn":
        message = f"perplexity rose by {loss.rise:.1%} on the calibration text: {advice}, or train on"
        warnings.warn(message, SafWarning, stacklevel=_CALLER)
    return loss, (layer, alone)
