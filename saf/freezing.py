"""`freeze_` is the paper's Algorithm 1: measure every head, fit the lowest ones, install the fits that are close.

Its settings are `FreezeConfig` (saf/freeze_config.py), its outcome a `FreezeReport` (saf/freeze_report.py). Which heads
are tried and accepted is in saf/candidates.py, how their patterns are made in saf/fitted_heads.py, and what they cost
on held-out text in saf/loss_guard.py and saf/joint_cost.py.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration import Batch, Sequences, calibrate_together, read_sequences
from saf.calibration.capture import check_heads as check_measurable
from saf.candidates import accept_fits, all_scores, head_order, within_budget
from saf.distributed import all_ranks_or_raise, on_rank0
from saf.errors import InputError, LossError, SafWarning, UnsupportedError
from saf.fitted_heads import Editor, FittedHead, fit_heads
from saf.freeze_config import FreezeConfig, calibration_collect, check_heads
from saf.freeze_report import FreezeReport
from saf.heads import EDITED, Head, HeadSet
from saf.joint_cost import halves
from saf.loss_guard import GUARD_SEQUENCES, MAX_RISE, heldout_loss, worst_layer
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for, rows_of
from saf.ops import choose_backend
from saf.patterns import Pattern
from saf.surgery import check_editable, value_dtypes


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
        score_inputs: Inputs of the score beside the statistics, by name; `gradient` may be the `QKGradient` itself,
            and `outputs` the held-out sequences.
        max_heads: Freeze only so many of the heads chosen, those of lowest score; the report's `deferred` names the
            others, for `FreezeConfig(only=...)` later.
        allow_empty: Freeze no head where none may be chosen or none fits, with a warning, in place of raising.
        capture_bytes: Most memory for queries and keys kept at once; see `calibrate`.
        progress: Called with (layers measured, layers).
        joint_progress: Called with (heads measured alone or accepted, heads) while joint cost is measured.

    Raises:
        InputError: Batches or settings that cannot be used, a score that lacks an input or is the same for all heads,
            heads that do not exist or are not live, an optimiser that does not hold the model's weights.
        UnsupportedError: A backend that cannot run the model's frozen heads, or heads that cannot be measured.
        SelectionError: No head that may be chosen and fits; with `strict`, fewer than k. The model is unchanged.
        LossError: A rise of held-out perplexity that is not accepted. The model is as it was.
    """
    config = FreezeConfig() if config is None else config
    check_editable(model, optimizer)  # now, not after the whole measurement
    adapter = adapter_for(model)
    timer = Stopwatch(adapter.device)
    choosing, reporting = _texts(heldout, config)
    sequences = on_rank0(lambda: _read(adapter, batches, config, reporting, allow_empty))
    held_out = reporting is not None
    if not held_out and optimizer is None:
        reporting = _own_text(adapter, sequences)

    # Algorithm 1, line 4: measure attention in evaluation mode, weights held fixed, and its variance, Eq. (1).
    inputs = score_inputs or {}
    options = {"collect": calibration_collect(config, inputs), "capture_bytes": capture_bytes, "progress": progress}
    statistics = calibrate_together(model, sequences, timer=timer, **options)
    loss_before = _loss(model, reporting, timer)

    # Lines 5 and 6: sort the heads by score, the lowest first; k = round(r L H).
    with timer("score"):
        scores = on_rank0(lambda: all_scores(adapter, sequences, statistics, config, choosing, inputs))
    with timer("select"):
        layout = adapter.sites()[0].layout
        group_size = layout.num_heads // layout.num_kv_heads
        order = head_order(scores, config, group_size=group_size, allow_empty=allow_empty)

    # Lines 7 to 20: fit one head after another until k are within the tolerance; fewer are refused or warned of.
    def fit(heads: HeadSet) -> dict[Head, FittedHead]:
        return fit_heads(model, sequences, statistics, heads, config, timer)

    fits, rejected = on_rank0(lambda: accept_fits(order, fit, config, allow_empty=allow_empty))
    editor = Editor(model, config, optimizer, fits)

    # Past the paper: of more candidates than k, accept those that cost least together.
    joint = None
    if config.jointly:
        with timer("joint cost"):
            choice = partial(within_budget, fits, choosing, config, editor, joint_progress, allow_empty=allow_empty)
            joint = on_rank0(choice)
    accepted = fits if joint is None else joint.accepted
    ranked = sorted(accepted, key=lambda head: (float(scores[config.score][head]), head))
    heads, deferred = HeadSet(ranked[:max_heads]), () if max_heads is None else tuple(ranked[max_heads:])

    # Line 21: install the patterns; value and output weights and the optimiser's state stay.
    before = {kind: count for kind in EDITED if (count := len(adapter.heads(kind)))}
    if len(heads):
        name = "prune" if config.operation == "prune" else "install"
        with timer(name), _in_all_or_none(partial(editor.undo_, heads)):
            editor.edit_(heads)
    own = {head: fits[head] for head in heads if fits[head].pattern is not None}
    tried = {head: fits[head] for head in accepted} | rejected
    report = FreezeReport(
        heads=heads,
        patterns=_stacked([one.pattern for one in own.values() if one.pattern is not None]),
        fit_kl={head: one.fit_kl for head, one in own.items()},
        rejected={head: one.fit_kl for head, one in rejected.items()},
        requested=order.total if joint is None else config.requested(statistics.variance.numel()),
        before=before,
        deferred=deferred,
        scores=scores[config.score],
        statistics=statistics,
        config=config.to_dict(),
        certificates={head: one.certificate for head, one in tried.items() if one.certificate is not None},
        exponential={head: one.exponential for head, one in own.items() if one.exponential is not None},
        joint_cost=joint,
        loss_before=loss_before,
        loss_after=None if len(heads) else loss_before,
        seconds={},
    )

    # Past the paper: measure what it costs, and undo it where that is too much and no training follows.
    if reporting is not None and len(heads):
        report = _guard(report, reporting, editor, timer, accept=accept_loss, refuse=held_out)
    if len(heads):
        adapter.remember(report.known())
    return replace(report, seconds=on_rank0(lambda: timer.seconds))


def _texts(heldout: Iterable[Batch] | None, config: FreezeConfig) -> tuple[Any, Any]:
    """Return the held-out text that scores and joint cost read, and that on which the loss is reported."""
    if heldout is None and config.jointly:
        raise InputError("joint cost is measured on held-out text: give heldout= sequences")
    text = heldout if heldout is None or isinstance(heldout, Tensor | Mapping) else list(heldout)
    if isinstance(text, list) and not text:
        raise InputError(
            "heldout must have at least one sequence, got none; give text beyond the calibration sequences"
        )
    return halves(text) if text is not None and config.jointly else (text, text)


def _read(
    adapter: Adapter, batches: Iterable[Batch], config: FreezeConfig, heldout: Any, allow_empty: bool
) -> Sequences:
    """Return the batches, read once; raise a SafError for what cannot be measured or frozen, before anything is."""
    sequences, longest, sites = read_sequences(batches), adapter.max_length, adapter.sites()
    length = sequences.length
    # The fifth frame up is the caller of freeze_, past on_rank0. Pruned heads have no pattern that ends anywhere.
    warn = partial(warnings.warn, category=SafWarning, stacklevel=5)
    if config.operation == "freeze" and longest is not None and length > longest:
        warn(
            f"calibration has {length} tokens, the model is made for {longest}: attention is measured beyond its "
            f"context, and patterns will cover {length} tokens; calibrate on {longest} tokens unless this is meant"
        )
    if config.operation == "freeze" and longest is not None and length < longest:
        warn(
            f"calibration has {length} tokens, the model takes up to {longest}: once heads are frozen, inputs of more "
            f"than {length} tokens are refused; calibrate on {longest} tokens to keep them"
        )
    check_heads(config, [site.layout for site in sites], allow_empty=allow_empty)
    if config.heads is not None:
        check_measurable(adapter, config.heads)
    config.check_calibration(sequences=sequences.num_different, length=length)
    if heldout is not None or "gates" in config.needs:
        adapter.check_next_token()
    if config.operation == "freeze":
        if heldout is not None and (tokens := read_sequences(heldout).length) > length + 1:
            raise InputError(
                f"heldout must have at most {length + 1} tokens a sequence, by the calibration, got {tokens}"
            )
        for device, dtypes in {(rows_of(site, "value").parameter.device, value_dtypes(site)) for site in sites}:
            kinds = {"trainable": config.trainable, "exponential": config.storage == "exponential"}
            choose_backend(config.backend, device=device, dtypes=dtypes, **kinds)
    return sequences


def _own_text(adapter: Adapter, sequences: Sequences) -> list[Tensor] | None:
    """Return calibration sequences to measure the loss on where a pretrained model of another library gets no text."""
    if adapter.saves_weights:
        return None
    try:
        adapter.check_next_token()
    except UnsupportedError:
        return None
    return [row[None] for row, _ in islice(sequences.rows(), GUARD_SEQUENCES) if len(row) > 1] or None


def _stacked(patterns: Sequence[Pattern]) -> Pattern | list[Pattern] | None:
    """Stack compact or dense patterns over `[F]`; others differ in shape and stay a list. None when there are none."""
    if not patterns or {one.kind for one in patterns} not in ({"compact"}, {"dense"}):
        return list(patterns) or None
    kind: Any = type(patterns[0])
    return kind.stack(patterns)


@contextmanager
def _in_all_or_none(undo_: Callable[[], None]) -> Iterator[None]:
    """Let an edit succeed in every process of the group; where one fails, undo it in the others."""
    edited = False
    try:
        with all_ranks_or_raise():
            yield
            edited = True
    except Exception:
        if edited:
            undo_()
        raise


def _loss(model: nn.Module, text: Iterable[Batch] | None, timer: Stopwatch) -> float | None:
    """Return the loss of the held-out text, nats a token, measured in the first process; None without text."""
    if text is None:
        return None
    with timer("loss"):
        return on_rank0(lambda: heldout_loss(model, text))


def _guard(
    report: FreezeReport,
    text: Iterable[Batch],
    editor: Editor,
    timer: Stopwatch,
    *,
    accept: bool | None,
    refuse: bool,
) -> FreezeReport:
    """Return the report with the loss after the event; undo it and raise LossError for a rise that is not accepted.

    With an optimiser a rise is accepted by default, on calibration text it warns. Without one, a rise beyond the limit
    names the layer whose heads cost most together.
    """
    model, heads, training = editor.model, report.heads, editor.optimizer is not None
    try:
        report = replace(report, loss_after=_loss(model, text, timer))
    except Exception:
        editor.undo_(heads)
        raise
    # Not "rise > MAX_RISE": a loss that is NaN is never within it.
    if report.perplexity_rise <= MAX_RISE or (training and accept is not False):
        return report
    editor.undo_(heads)
    layer, rise = on_rank0(lambda: worst_layer(model, heads, text, editor.edit_, editor.undo_))
    words = f"layer {layer} costs most ({len(heads.in_layer(layer))} heads, alone {rise:.1%}): freeze fewer there"
    if accept is False or (accept is None and refuse):
        raise LossError(
            f"held-out perplexity must rise by at most {MAX_RISE:.0%}, got {report.perplexity_rise:.1%}; {words}, or "
            "pass accept_loss=True (--accept-loss)"
        )
    editor.edit_(heads)
    if accept is None:
        message = f"perplexity rose by {report.perplexity_rise:.1%} on the calibration text; {words}, or train on"
        warnings.warn(message, SafWarning, stacklevel=3)
    return replace(report, worst_layer=(layer, rise))
