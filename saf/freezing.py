"""`freeze_` is the paper's Algorithm 1: measure every head, fit the lowest ones, install the fits that are close.

The file follows the algorithm, whose line numbers stand beside the code: what may be frozen, scores (lines 4 to 6),
fits and their acceptance (7 to 20), installation (21). The caller trains before (1 to 3) and after (22 to 26). Settings
are in saf/freeze_config.py, the record of an event in saf/freeze_report.py, and what heads cost on held-out text in
saf/heldout.py.
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
from saf.freeze_config import COMPARING, FreezeConfig, calibration_collect, check_heads
from saf.freeze_report import FreezeReport
from saf.heads import EDITED, Head, HeadSet
from saf.heldout import (
    GUARD_SEQUENCES,
    MAX_RISE,
    JointCost,
    accept_jointly,
    halves,
    heldout_loss,
    perplexity_rise,
    worst_layer,
)
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for, rows_of
from saf.ops import choose_backend
from saf.patterns import Pattern
from saf.scores import HeadOutputs, Score, required_inputs, score, score_name
from saf.selection import Chooser, ranking, select
from saf.statistics import AttentionStatistics
from saf.surgery import check_editable, install_, prune_, uninstall_, value_dtypes
from saf.targets import FITTED, collect_for, dense_pattern, exact_pattern, target

CANDIDATES = 3
"""Heads of lowest score that are tried for each one that joint cost may take."""
_REPLACING = ("residual_cosine", "relative_output_change")
"""Scores of how the mean pattern changes held-out sequences: nothing where these are the calibration's one sequence."""


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
    adapter, inputs = adapter_for(model), score_inputs or {}
    timer = Stopwatch(adapter.device)
    choosing, reporting = _texts(heldout, config)
    sequences = on_rank0(lambda: _read(adapter, batches, config, reporting, allow_empty))
    if reporting is None and optimizer is None:
        reporting = _own_text(adapter, sequences)

    # Line 4: measure attention in evaluation mode, weights held fixed, and its variance, Eq. (1).
    options = {"collect": calibration_collect(config, inputs), "capture_bytes": capture_bytes, "progress": progress}
    statistics = on_rank0(lambda: calibrate(model, sequences, timer=timer, **options))
    loss_before = _loss(model, reporting, timer)

    # Lines 5 and 6: sort the heads by score, the lowest first; k = round(r L H).
    with timer("score"):
        scores = on_rank0(lambda: _scores(adapter, sequences, statistics, config, choosing, inputs))
    with timer("select"):
        layout = adapter.sites()[0].layout
        order = head_order(scores, config, group_size=layout.num_heads // layout.num_kv_heads, allow_empty=allow_empty)

    # Lines 7 to 20: fit head after head until k are within the tolerance; fewer are refused or warned of.
    fit = partial(fit_heads, model, sequences, statistics, config=config, timer=timer)
    fits, rejected = on_rank0(lambda: accept_fits(order, fit, config, allow_empty=allow_empty))
    editor = Editor(model, config, optimizer, fits)

    # Past the paper: of more candidates than k, accept those that cost least together.
    joint = None
    if config.jointly:
        with timer("joint cost"):
            texts = choosing, (reporting, loss_before)
            joint = on_rank0(lambda: _within_budget(editor, *texts, joint_progress, allow_empty=allow_empty))
    accepted = fits if joint is None else joint.accepted
    ranked = sorted(accepted, key=lambda head: (float(scores[config.score][head]), head))
    heads, deferred = HeadSet(ranked[:max_heads]), () if max_heads is None else tuple(ranked[max_heads:])

    # Line 21: install the patterns; value and output weights and the optimiser's state stay.
    before = {kind: count for kind in EDITED if (count := len(adapter.heads(kind)))}
    loss_after, worst = loss_before, None
    if len(heads):
        with timer("prune" if config.operation == "prune" else "install"), _undone_unless_all_edit(editor, heads):
            editor.edit_(heads)
    # Past the paper: measure what it costs, and undo it where that is too much and no training follows.
    if len(heads) and loss_before is not None:
        accept = {"accept": accept_loss, "refuse": heldout is not None}
        loss_after, worst = _guard(editor, heads, reporting, loss_before, timer, **accept)

    own = {head: fits[head] for head in heads if fits[head].pattern is not None}
    tried = {head: fits[head] for head in accepted} | rejected
    report = FreezeReport(
        heads=heads,
        patterns=_stacked([fit.pattern for fit in own.values() if fit.pattern is not None]),
        fit_kl={head: fit.fit_kl for head, fit in own.items()},
        rejected={head: fit.fit_kl for head, fit in rejected.items()},
        requested=order.total if joint is None else config.requested(statistics.variance.numel()),
        before=before,
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


def _texts(heldout: Iterable[Batch] | None, config: FreezeConfig) -> tuple[Any, Any]:
    """Return the held-out text that scores and joint cost read, and that on which the loss is reported."""
    if heldout is None and config.jointly:
        raise InputError("joint cost is measured on held-out text: give heldout= sequences")
    text = heldout if heldout is None or isinstance(heldout, Tensor | Mapping) else list(heldout)
    if isinstance(text, list) and not text:
        raise InputError("heldout must have at least one sequence, got none; give text beyond the calibration's")
    return halves(text) if text is not None and config.jointly else (text, text)


def _read(
    adapter: Adapter, batches: Iterable[Batch], config: FreezeConfig, heldout: Any, allow_empty: bool
) -> Sequences:
    """Return the batches, read once; raise a SafError for what cannot be measured or frozen, before anything is."""
    sequences, longest, sites = read_sequences(batches), adapter.max_length, adapter.sites()
    length, freezes = sequences.length, config.operation == "freeze"  # pruned heads have no pattern that ends
    if freezes and longest is not None and length != longest:
        shorter = "once heads are frozen, longer inputs are refused"
        longer = "attention is measured beyond its context"
        warnings.warn(
            f"calibration has {length} tokens, the model takes up to {longest}: "
            f"{shorter if length < longest else longer}; calibrate on {longest} tokens unless this is meant",
            SafWarning,
            stacklevel=5,  # the caller of freeze_, past on_rank0
        )
    check_heads(config, [site.layout for site in sites], allow_empty=allow_empty)
    if config.heads is not None:
        measurable_heads(adapter, config.heads)
    config.check_calibration(sequences=sequences.num_different)
    if heldout is not None or "gates" in config.needs:
        adapter.check_next_token()
    if freezes and heldout is not None and (tokens := read_sequences(heldout).length) > length + 1:
        raise InputError(f"heldout must have at most {length + 1} tokens a sequence, by the calibration, got {tokens}")
    if freezes:
        kinds = {"trainable": config.trainable, "exponential": config.storage == "exponential"}
        for device, dtypes in {(rows_of(site, "value").parameter.device, value_dtypes(site)) for site in sites}:
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
    return [row[None] for row in sequences.tokens[:GUARD_SEQUENCES] if len(row) > 1] or None


# --- lines 5 and 6: scores, and the order in which heads are tried


def _scores(
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
                together = [row[None] for row in [*sequences.tokens, *texts.tokens]]
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
        return Chooser(ranked, count=len(config.heads), only=config.heads, **limits)
    too_high = [] if config.below is None else (ranked >= config.below).nonzero().tolist()
    options: dict[str, Any] = {"only": config.only, "exclude": {*config.exclude, *map(tuple, too_high)}, **limits}
    total: dict[str, Any] = {"rate": config.rate} if config.count is None else {"count": config.count}
    if config.jointly:
        total = {"count": min(CANDIDATES * config.requested(ranked.numel()), int((~ranked.isnan()).sum()))}
    if config.match_heads is not None:
        order = Chooser(ranked, match=config.match_heads, **options)
    elif config.match is not None:
        matched = select(scores[config.match], **total, **{**options, "exclude": config.exclude})
        order = Chooser(ranked, match=matched, **options)
    else:
        order = Chooser(ranked, **total, max_per_layer=config.max_per_layer, **options)
    lowest = ranking(ranked, config.exclude, only=config.only)[:1]
    if config.below is not None and order.is_empty and lowest and not allow_empty:
        unit = "KV group" if config.whole_groups else "head"
        raise SelectionError(
            f"no {unit} that may be {config.kind} scores below {config.below:g} by {score_name(config.score)}: the "
            f"lowest score is {float(ranked[lowest[0]]):.6g}. Raise below, or leave it out"
        )
    return order


# --- lines 7 to 20: fits, and which are accepted


@dataclass(frozen=True)
class FittedHead:
    """Hold a head's pattern, on the CPU, and how its compact fit went; a pruned head has neither."""

    pattern: Pattern | None = None
    fit_kl: float = 0.0
    """Row-averaged KL from the target to the fit, nats; 0 without a fit."""
    certificate: dict[str, Any] | None = None
    """The fit's `Certificate` in plain values; None without a fit."""
    exponential: dict[str, Any] | None = None
    """With exponential storage, the numbers of `saf.fit.ExponentialFit` and the pattern's kind; None otherwise."""


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
    while proposed:  # lines 7 to 10: none is proposed once k are accepted
        fits |= fit(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Line 16. Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: fits[head] for head in unit if not fits[head].fit_kl <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                order.accept(unit)  # lines 17 and 18
        if rejected and strict:
            listed = ", ".join(f"{head}: {rejected[head].fit_kl:.3f}" for head in sorted(rejected))
            remedy = "name others" if named else "lower the rate, or leave strict out"
            raise SelectionError(
                f"all {order.total} {'named' if named else f'lowest-{score_name(config.score)}'} heads must fit within "
                f"{config.max_fit_kl} nats, {len(rejected)} do not ({listed}): raise max_fit_kl, {remedy}"
            )
        proposed = order.propose()  # line 19: the next heads
    if not order.attained(len(order)) and (not config.jointly or not len(order)):  # line 20
        reason = (
            f"no further head fits within {config.max_fit_kl} nats" if rejected else f"no other may be {config.kind}"
        )
        if not len(order) and not allow_empty:
            raise SelectionError(f"at least 1 head must be {config.kind}, got 0 of {order.total}: {reason}")
        message = f"only {len(order)} of {order.total} heads could be {config.kind}: {reason}"
        warnings.warn(message, SafWarning, stacklevel=5)  # the caller of freeze_, past on_rank0
    return {head: fits[head] for head in HeadSet(order)}, rejected


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
    of_compact, of_exponential = split_options(config.fitter, config.fitter_options, config.storage)
    # Lines 13 to 15: key and distance logits, Z of Eq. (3), and the KL of the fit from the pattern.
    compact, certificate = fit_with_certificate(*goal[:2], fitter=config.fitter, **of_compact)
    kls, certificates = fit_kl(compact, *goal).tolist(), certificate.to_dicts()
    if config.storage == "compact":
        return [*map(FittedHead, compact.to(device="cpu").singles(), kls, certificates)]
    fits = []
    for number, fit in enumerate(fit_exponential_heads(compact, *goal[:2], **of_exponential)):
        # A head whose exponential pattern is outside the tolerance is judged by its compact one.
        kl = kls[number] if fit.pattern.kind == "compact" else kls[number] + fit.extra_kl
        pattern, kl = (fit.pattern, kl) if kl <= config.max_fit_kl else (compact[number], kls[number])
        numbers = {name: value for name, value in vars(fit).items() if name != "pattern"} | {"kind": pattern.kind}
        fits.append(FittedHead(pattern.to(device="cpu"), kl, certificates[number], numbers))
    return fits


def _within_budget(
    editor: "Editor",
    text: Any,
    reporting: tuple[Any, float | None],
    progress: Callable[[int, int], None] | None,
    *,
    allow_empty: bool,
) -> JointCost:
    """Return which of the fitted heads cost least together, within the budget; raise SelectionError where none is.

    `text` decides their order and, with the text and loss of `reporting`, how many there are.
    """
    config, sites = editor.config, adapter_for(editor.model).sites()
    most = config.requested(sum(site.layout.num_heads for site in sites))
    budget = math.inf if config.budget is None else config.budget
    edits: dict[str, Any] = {"edit_": editor.edit_, "undo_": editor.undo_}
    joint = accept_jointly(editor.model, editor.fits, text, most, budget=budget, progress=progress, **edits)
    if joint.accepted and config.budget is not None:
        joint = _confirmed(editor, joint, *reporting)
    if joint.accepted or allow_empty:
        return joint
    least = perplexity_rise(0.0, min(joint.alone.values()))
    raise SelectionError(
        f"at least 1 head must keep perplexity within {100 * budget:+.3g}% on both halves of the text, got none of "
        f"{len(joint.alone)}: the cheapest costs {100 * least:+.3g}% alone where heads are chosen; raise budget"
    )


def _confirmed(editor: "Editor", joint: JointCost, text: Any, loss: float | None) -> JointCost:
    """Return the first of the accepted heads that keep the budget on other text, too.

    Few tokens choose heads that fit them alone: on SmolLM2-135M 14 heads chosen by 4,096 tokens lower perplexity there
    by 0.3% and raise it by 3.4% elsewhere.
    """

    def within(count: int) -> bool:
        heads = HeadSet(joint.accepted[:count])
        editor.edit_(heads)
        try:
            return perplexity_rise(loss, heldout_loss(editor.model, text)) <= (editor.config.budget or 0.0)
        finally:
            editor.undo_(heads)

    few, middle, many = 0, len(joint.accepted), len(joint.accepted) + 1  # `few` keep the budget, `many` do not
    while many - few > 1:
        few, many = (middle, many) if within(middle) else (few, middle)
        middle = (few + many) // 2
    refused = joint.refused + joint.accepted[few:]
    return replace(joint, accepted=joint.accepted[:few], rises=joint.rises[:few], refused=refused)


# --- line 21: installation, and the loss around it


@dataclass(frozen=True)
class Editor:
    """Freezes or prunes heads of a model as the settings of an event say, and undoes it."""

    model: nn.Module
    config: FreezeConfig
    optimizer: torch.optim.Optimizer | None
    fits: Mapping[Head, FittedHead]

    def edit_(self, heads: HeadSet) -> None:
        """Install the heads' patterns, or remove the heads."""
        if self.config.operation == "prune":
            prune_(self.model, heads, optimizer=self.optimizer)
            return
        execution = {"backend": self.config.backend, "trainable": self.config.trainable}
        patterns: Any = [self.fits[head].pattern for head in heads]
        install_(self.model, heads, patterns, optimizer=self.optimizer, **execution)

    def undo_(self, heads: HeadSet) -> None:
        """Make the heads live again, exactly as they were."""
        uninstall_(self.model, heads, optimizer=self.optimizer)


def _stacked(patterns: Sequence[Pattern]) -> Pattern | list[Pattern] | None:
    """Stack compact or dense patterns over `[F]`; others differ in shape and stay a list. None when there are none."""
    if not patterns or {one.kind for one in patterns} not in ({"compact"}, {"dense"}):
        return list(patterns) or None
    kind: Any = type(patterns[0])
    return kind.stack(patterns)


@contextmanager
def _undone_unless_all_edit(editor: Editor, heads: HeadSet) -> Iterator[None]:
    """Let an edit succeed in every process of the group; where one fails, undo it in the others."""
    edited = False
    try:
        with all_ranks_or_raise():
            yield
            edited = True
    except Exception:
        if edited:
            editor.undo_(heads)
        raise


def _loss(model: nn.Module, text: Iterable[Batch] | None, timer: Stopwatch) -> float | None:
    """Return the loss of the held-out text, nats a token, measured in the first process; None without text."""
    if text is None:
        return None
    with timer("loss"):
        return on_rank0(lambda: heldout_loss(model, text))


def _guard(
    editor: Editor,
    heads: HeadSet,
    text: Any,
    before: float,
    timer: Stopwatch,
    *,
    accept: bool | None,
    refuse: bool,
) -> tuple[float | None, tuple[int, float] | None]:
    """Return the loss after the event, and the worst layer of a rise beyond the limit that no training follows.

    A rise that is not accepted is undone and raises LossError: by default one on held-out text; on calibration text it
    warns.
    """
    model, training = editor.model, editor.optimizer is not None
    try:
        after = _loss(model, text, timer)
    except Exception:
        editor.undo_(heads)
        raise
    rise = perplexity_rise(before, after)
    # Not "rise > MAX_RISE": a loss that is NaN is never within it.
    if rise <= MAX_RISE or (training and accept is not False):
        return after, None
    editor.undo_(heads)
    layer, alone = on_rank0(lambda: worst_layer(model, heads, text, editor.edit_, editor.undo_))
    words = f"layer {layer} costs most ({len(heads.in_layer(layer))} heads, alone {alone:.1%}): freeze fewer there"
    if accept is False or (accept is None and refuse):
        raise LossError(
            f"held-out perplexity must rise by at most {MAX_RISE:.0%}, got {rise:.1%}; {words}, or pass "
            "accept_loss=True (--accept-loss)"
        )
    editor.edit_(heads)
    if accept is None:
        message = f"perplexity rose by {rise:.1%} on the calibration text; {words}, or train on"
        warnings.warn(message, SafWarning, stacklevel=3)
    return after, (layer, alone)
