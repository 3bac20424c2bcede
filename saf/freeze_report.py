"""`FreezeReport` records what an event that froze or pruned heads measured, chose and cost."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.heads import Head, HeadSet
from saf.healing import Healing
from saf.heldout import JointCost, LossChange, perplexity_rise
from saf.patterns import Pattern
from saf.records.run import STATE_AFTER, EventRecord, append_event, total_in_words
from saf.records.table import Table, markdown_of, number, percent, signed
from saf.statistics import AttentionStatistics

SCHEMA = "saf.freezing.recipe/1"
# Values of a report that a model's configuration keeps: people read config.json, so scores of all heads stay out.
_IN_MODEL_CONFIG = (
    *("heads", "requested", "score_name", "fit_kl", "num_sequences", "length", "sequences_hash"),
    *("loss_before", "loss_after", "loss_tokens", "loss_sequences", "loss_error", "loss_text", "worst_layer"),
)


@dataclass(frozen=True)
class FittedHead:
    """A head's pattern, on the CPU, and how its compact fit went; a pruned head has neither."""

    pattern: Pattern | None = None
    fit_kl: float = 0.0  # row-averaged KL from the target to the fit, nats, Eq. (S.7); 0 without a fit
    certificate: dict[str, Any] | None = None  # the fit's `saf.fit.Certificate` in plain values; None without a fit
    # With exponential storage, `extra_kl` and `cancellation` of an `ExponentialFit` and the pattern's `kind`, compact
    # where these did not pass; None otherwise.
    exponential: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class FreezeReport:
    """The result of `freeze_`; `print(report)` shows its cost and a table, `save` writes JSON and safetensors."""

    heads: HeadSet  # frozen, or pruned
    deferred: tuple[Head, ...] = ()  # accepted too but left live because of `max_heads`, by ascending score
    fits: dict[Head, FittedHead]  # patterns and fits of `heads` and `deferred`
    rejected_fits: dict[Head, FittedHead]  # of heads skipped because their KL was above the limit
    requested: int  # k, the number of heads that the settings request
    scores: Tensor  # `[L, H]`; NaN for heads that were frozen or pruned before
    statistics: AttentionStatistics
    config: dict[str, Any]
    in_all: dict[str, int]  # numbers of "frozen" and "pruned" heads after the event, earlier events' included
    seconds: dict[str, float]  # wall clock of capture, statistics, score, select, fit, install or prune, held-out loss
    joint_cost: JointCost | None = None  # with a budget: heads accepted together, refused, and what each costs alone
    loss: LossChange | None = None  # None without a text to measure
    loss_text: str = "held-out"  # kind of that text: held-out or calibration
    # If the loss rose beyond the guard's limit and was accepted: the layer whose heads alone, with all others live,
    # raise perplexity most, and by which share on the first 4 held-out sequences.
    worst_layer: tuple[int, float] | None = None
    healing: Healing | None = None  # losses after training this model and the ordinary one alike

    @cached_property
    def patterns(self) -> Pattern | list[Pattern] | None:
        """Patterns `[F, T]` (dense: `[F, T, T]`) in the heads' order; a list, one a head, if any is exponential.

        None where no head was frozen, or heads were pruned.
        """
        patterns = [pattern for head in self.heads if (pattern := self.fits[head].pattern) is not None]
        # Exponential patterns differ in their numbers of poles and keys, so they do not stack.
        if not patterns or {one.kind for one in patterns} not in ({"compact"}, {"dense"}):
            return patterns or None
        kind: Any = type(patterns[0])
        return kind.stack(patterns)

    @property
    def fit_kl(self) -> dict[Head, float]:
        """Row-averaged KL of each frozen head's target to its compact fit, nats; empty where nothing is fitted."""
        fits = {head: self.fits[head] for head in self.heads}
        return {head: fit.fit_kl for head, fit in fits.items() if fit.certificate is not None}

    @property
    def rejected(self) -> dict[Head, float]:
        """The KL of heads skipped because it was above the limit."""
        return {head: fit.fit_kl for head, fit in self.rejected_fits.items()}

    @property
    def exponential(self) -> dict[Head, dict[str, Any]]:
        """With exponential storage, the numbers of each frozen head's `FittedHead.exponential`."""
        return {head: form for head in self.heads if (form := self.fits[head].exponential) is not None}

    @property
    def kind(self) -> str:
        """What the heads are after the event: frozen or pruned."""
        return STATE_AFTER[self.config["operation"]]

    # --- as plain values

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        fits = sorted((self.fits | self.rejected_fits).items())
        values = {
            "schema": SCHEMA,
            "config": self.config,
            "requested": self.requested,
            "heads": self.heads.to_list(),
            **{f"{kind}_in_all": count for kind, count in self.in_all.items()},
            "score_name": self.config["score"],
            "scores": [[None if math.isnan(value) else value for value in row] for row in self.scores.tolist()],
            "fit_kl": [[*head, kl] for head, kl in self.fit_kl.items()],
            "rejected": [[*head, kl] for head, kl in sorted(self.rejected.items())],
            "certificates": [{"head": list(head), **fit.certificate} for head, fit in fits if fit.certificate],
            "seconds": self.seconds,
            "num_sequences": self.statistics.num_sequences,
            "length": self.statistics.length,
            "sequences_hash": self.statistics.sequences_hash,
        }
        if self.loss is not None:
            values |= {f"loss_{name}": value for name, value in vars(self.loss).items()} | {"loss_text": self.loss_text}
        optional = {
            "exponential": [{"head": list(head), **each} for head, each in self.exponential.items()],
            "lengths": list(self.statistics.lengths),
            "deferred": [list(head) for head in self.deferred],
            "joint_cost": self.joint_cost and self.joint_cost.to_dict(),
            "healing": self.healing and asdict(self.healing),
            "worst_layer": self.worst_layer and list(self.worst_layer),
        }
        return values | {name: value for name, value in optional.items() if value}

    def model_config_entries(self) -> dict[str, Any]:
        """Return what a model's configuration keeps: the heads, how they were chosen, and their cost."""
        entries = {name: value for name, value in self.to_dict().items() if name in _IN_MODEL_CONFIG}
        settings = {name: self.config[name] for name in ("pattern", "budget")}
        return {"kind": self.kind, "named": self.config["heads"] is not None, **settings, **entries}

    def tensors(self) -> dict[str, Tensor]:
        """Return marginals `[L, H, T]`, statistics `[L, H]` and, of fitted patterns, their logits `[F, T]`.

        Dense patterns are left out: the model's own files have them (saf.safetensors, or a checkpoint).
        """
        # Marginals are most of the file, T numbers a head of every layer, and exact enough in float32.
        tensors = {name: getattr(self.statistics, name).float() for name in ("eta_abs", "eta_rel")}
        tensors |= {name: getattr(self.statistics, name) for name in ("variance", "forward_kl", "row_entropy")}
        # Without normalisers, which take T**2 operations a head and follow from these two.
        logits = [pattern.logits() for head in self.heads if (pattern := self.fits[head].pattern) is not None]
        if logits and None not in logits:
            alpha, rho = (torch.stack(part).float() for part in zip(*logits, strict=True))  # type: ignore
            tensors |= {"alpha": alpha, "rho": rho}
        return tensors

    def save(self, folder: str | Path, **extra: Any) -> EventRecord:
        """Record this event, with `extra` values, in the `events.jsonl` of an existing folder, and its tensors."""
        return append_event(Path(folder), self.config["operation"], self.to_dict() | extra, self.tensors())

    # --- for people

    @property
    def summary(self) -> str:
        """How many heads were frozen or pruned, and by what; after earlier events also how many are in all."""
        by = f"by {self.config['score']}" if self.config["heads"] is None else "as named"
        in_all = total_in_words({self.kind: len(self.heads)}, self.in_all)
        later = f"; {len(self.deferred)} chosen for later" if self.deferred else ""
        return f"{len(self.heads)} of {self.scores.numel()} heads {self.kind} {by}{in_all}{later}"

    @property
    def cost(self) -> str:
        """What the event cost, and which layer costs most, or has the worst fit if that is not known."""
        layer = ""
        if self.worst_layer is None and self.fit_kl:
            (worst, _), kl = max(self.fit_kl.items(), key=lambda each: each[1])
            limit = number(self.config["max_fit_kl"], 3)
            layer = f"; layer {worst} has the worst fit ({number(kl, 3)} nats; limit {limit})"
        return f"Cost: {cost_words(self.to_dict())}{layer}."

    def table(self) -> Table:
        """Return one row a layer that lost heads: these, their score range and worst fit; totals in the note."""
        rows, fit_kl = [], self.fit_kl
        for layer in sorted({layer for layer, _ in self.heads}):
            chosen = self.heads.in_layer(layer)
            scores = [self.scores[layer, head].item() for head in chosen]
            span = " to ".join(dict.fromkeys(number(score, 3) for score in (min(scores), max(scores))))
            row = [layer, " ".join(map(str, chosen)), span]
            if fit_kl:
                row.append(f"{max(fit_kl[layer, head] for head in chosen):.4f}")
            rows.append(row)
        notes = []
        if fit_kl or self.rejected:
            stay = f", above which {len(self.rejected)} heads stay live" if self.rejected else ""
            notes.append(f"limit of a fit: {number(self.config['max_fit_kl'], 3)} nats{stay}")
        if self.exponential:
            notes.append(exponential_words(self.to_dict()["exponential"]))
        if (joint := self.joint_cost) is not None:
            rise = signed(100 * perplexity_rise(0.0, joint.rise), 2)
            notes.append(
                f"{len(joint.accepted)} of {len(joint.alone)} candidates taken: together they change perplexity by "
                f"{rise} on the text that chose them"
            )
        if self.healing is not None:
            notes.append(healing_words(asdict(self.healing)))
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        notes.append(f"{sum(self.seconds.values()):.2f} s ({parts})")
        columns = ["layer", f"{self.kind} heads (numbers)", f"{self.config['score']} ({self.kind})"]
        if fit_kl:
            columns.append("worst fit, nats")
        return Table.of(self.summary, columns, rows, notes=["; ".join(notes)])

    def __repr__(self) -> str:
        """Return one line: its tensors would fill a notebook."""
        return f"<FreezeReport: {self.summary}; print() shows the table>"

    def __str__(self) -> str:
        try:
            from rich.console import Console
        except ModuleNotFoundError:  # it comes with the command line, not with the library
            return f"{self.cost}\n\n{markdown_of(self.table())}"
        text = io.StringIO()
        self.table().print(Console(width=100, file=text, highlight=False))
        return f"{self.cost}\n{text.getvalue().rstrip()}"


def cost_words(event: Mapping[str, Any]) -> str:
    """Return in words what an event cost, from the values of `to_dict`, events.jsonl or `model_config_entries`."""
    if (loss := loss_of(event)) is None:
        return "not measured: there is no held-out text"
    ends = [signed(100 * end) for end in loss.interval or ()]
    interval = f" (95% interval {' to '.join(ends)})" if ends else ""
    text = f"{loss.tokens:,} {event.get('loss_text', 'held-out')} tokens" if loss.tokens else "held-out text"
    losses = f"{loss.before:.4f} nats before, {loss.after:.4f} after"
    worst = f"; {worst_layer_words(event['worst_layer'])}" if event.get("worst_layer") else ""
    return f"perplexity {signed(100 * loss.rise)}{interval} on {text} ({losses}){budget_words(event)}{worst}"


def loss_of(event: Mapping[str, Any]) -> LossChange | None:
    """Return the loss before and after an event from its values; None where it was not measured."""
    values: Any = {each.name: event.get(f"loss_{each.name}") for each in fields(LossChange)}
    return None if values["before"] is None or values["after"] is None else LossChange(**values)


def current_events(events: Sequence[Mapping[str, Any]], edited: HeadSet) -> list[dict[str, Any]]:
    """Return the events that still have some of the `edited` heads, with their number as `remaining`.

    A head that was frozen, undone and frozen again counts for its last event.
    """
    current = []
    for event in reversed(events):
        heads = edited & HeadSet(event["heads"])
        edited = edited - heads
        if len(heads):
            current.append({**event, "remaining": len(heads)})
    return current[::-1]


def budget_words(event: Mapping[str, Any]) -> str:
    """Return a clause if the interval of an event's cost ends above its budget, else nothing."""
    budget, loss = event.get("config", event).get("budget"), loss_of(event)
    if budget is None or loss is None or loss.interval is None:
        return ""
    if round(loss.interval[1], 4) <= budget:  # as `cost_words` shows it: "+1.00%" is not above 1%
        return ""
    return f"; its 95% interval ends above the budget of {percent(budget)}"


def worst_layer_words(worst: Sequence[float]) -> str:
    """Return in words which layer costs most, and by which share perplexity rises with its heads alone.

    >>> worst_layer_words((0, 4.5))
    'layer 0 costs most (its heads alone +450.0%)'
    """
    return f"layer {worst[0]} costs most (its heads alone {signed(100 * worst[1], 1)})"


def healing_words(healing: Mapping[str, Any]) -> str:
    """Return in words what the fields of a `Healing` say about the cost of the heads."""
    healed, twin = healing["loss_healed"], healing["loss_twin"]
    rise = signed(100 * perplexity_rise(twin, healed), 1)
    return (
        f"healed on {healing['tokens']:,} tokens: held-out loss {healed:.4f} nats, {twin:.4f} of the ordinary model "
        f"trained alike (perplexity {rise})"
    )


def exponential_words(fits: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how close exponential patterns are to the compact fits, and which heads stayed compact.

    `fits` are the entries of `exponential` in `FreezeReport.to_dict` and events.jsonl.
    """
    sums = [fit for fit in fits if fit["kind"] == "exponential"]
    compact = [":".join(map(str, fit["head"])) for fit in fits if fit["kind"] == "compact"]
    words = [f"{len(sums)} exponential"]
    if sums:
        words.append(f"which adds at most {max(fit['extra_kl'] for fit in sums):.4f} nats to a head's fit KL")
    if compact:
        words.append(f"no exponential pattern fits, so compact: {' '.join(compact)}")
    return ", ".join(words)
