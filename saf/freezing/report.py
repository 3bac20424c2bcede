"""What an event that froze or pruned heads measured, chose and cost."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.freezing.config import BUDGETS
from saf.freezing.heldout import HeldOutFit
from saf.freezing.loss import perplexity_rise
from saf.heads import Head, HeadSet
from saf.patterns import Pattern, pattern_for_each_head
from saf.records.events import MADE, EventRecord, append_event, beside_earlier
from saf.records.quantities import number, signed
from saf.records.table import Table, markdown_of
from saf.statistics import AttentionStatistics

SCHEMA = "saf.freezing.recipe/1"


@dataclass(frozen=True, kw_only=True, repr=False)
class FreezeReport:
    """Hold the result of `freeze_`; `print(report)` shows a table, `save` writes JSON and safetensors."""

    heads: HeadSet
    """The heads frozen, or pruned."""
    patterns: Pattern | list[Pattern] | None
    """`[F, T]` (dense: `[F, T, T]`) in the heads' order, with exponential ones among them a list of one pattern a head;
    None when no head was frozen, or heads were pruned."""
    fit_kl: dict[Head, float]
    """Row-averaged KL of each frozen head's pattern to its compact fit, in nats."""
    rejected: dict[Head, float]
    """Heads skipped because their KL was above the limit, with it."""
    requested: int
    """k, the number of heads asked for."""
    before: dict[str, int] = field(default_factory=dict)
    """How many heads were frozen and how many pruned before, by these words."""
    deferred: tuple[Head, ...] = ()
    """Heads chosen and accepted with them but left live, by ascending score: those after the `first`."""
    scores: Tensor
    """`[L, H]`; NaN for heads that were frozen or pruned before."""
    statistics: AttentionStatistics
    config: dict[str, Any]
    seconds: dict[str, float]
    """Wall-clock seconds of capture, statistics, score, select, fit and install or prune, and of `heldout`."""
    certificates: dict[Head, dict[str, Any]] = field(default_factory=dict)
    """Of each fit, rejected ones included: `saf.fit.Certificate` in plain values; empty where nothing is fitted."""
    exponential: dict[Head, dict[str, Any]] = field(default_factory=dict)
    """With exponential storage, of each frozen head the numbers of `saf.fit.ExponentialFit`: `extra_kl`,
    `cancellation`, `worst_row`, `poles` and `free_keys`; and its `kind`, compact where these did not pass."""
    heldout: HeldOutFit | None = None
    """With `heldout_kl`: the frozen heads' fits on one half of the sequences, and their KL to both halves."""

    loss_before: float | None = None
    """Mean loss on the held-out text before the event, nats a token; None where no such text was given."""
    loss_after: float | None = None
    """The same after it."""

    @property
    def perplexity_rise(self) -> float:
        """Return by which share perplexity rose on the held-out text; NaN where none was given."""
        return perplexity_rise(self.loss_before, self.loss_after)

    @property
    def kind(self) -> str:
        """Return what was made of the heads: frozen or pruned."""
        return MADE[self.config["operation"]]

    @property
    def in_all(self) -> dict[str, int]:
        """Return how many heads are frozen and how many pruned after this event, with those of events before it."""
        return self.before | {self.kind: self.before.get(self.kind, 0) + len(self.heads)}

    @property
    def summary(self) -> str:
        """Say how many heads were frozen or pruned, of how many, by what; after an earlier event also all, by kind."""
        by = f"by {self.config['score']}" if self.config["heads"] is None else "as named"
        more, in_all = beside_earlier({self.kind: len(self.heads)}, self.in_all)
        later = f"; {len(self.deferred)} chosen for later" if self.deferred else ""
        told = " ".join(filter(None, [str(len(self.heads)), more, f"of {self.scores.numel()} heads {self.kind} {by}"]))
        return f"{', '.join(filter(None, [told, in_all]))}{later}"

    def __repr__(self) -> str:
        """Return one line: its tensors would fill a notebook."""
        return f"<FreezeReport: {self.summary}; print() shows the table>"

    @property
    def trainable_parameters(self) -> int:
        """Return how many key and distance logits are trained on, `2 * F * T`; 0 for fixed patterns."""
        return 2 * len(self.heads) * self.statistics.length if self.config["trainable"] else 0

    @property
    def heldout_kl(self) -> dict[Head, tuple[float, float]]:
        """Return the KL of each head's fit on one half to that half and to the other, nats; empty unless asked for."""
        if self.heldout is None:
            return {}
        return {head: (float(self.heldout.own[head]), float(self.heldout.other[head])) for head in self.heads}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        rows = [[None if value != value else value for value in row] for row in self.scores.tolist()]
        deferred = {"deferred": [list(head) for head in self.deferred]} if self.deferred else {}
        lengths = {"lengths": list(self.statistics.lengths)} if self.statistics.lengths else {}
        losses = {} if self.loss_before is None else {"loss_before": self.loss_before, "loss_after": self.loss_after}
        halves = {"heldout_kl": [[*head, *kls] for head, kls in self.heldout_kl.items()]} if self.heldout else {}
        sums = [{"head": list(head), **values} for head, values in self.exponential.items()]
        return {
            "schema": SCHEMA,
            "config": self.config,
            "requested": self.requested,
            "trainable_parameters": self.trainable_parameters,
            "heads": self.heads.to_list(),
            **{f"{kind}_in_all": count for kind, count in self.in_all.items()},
            "score_name": self.config["score"],
            "scores": rows,
            "fit_kl": [[*head, kl] for head, kl in self.fit_kl.items()],
            "rejected": [[*head, kl] for head, kl in sorted(self.rejected.items())],
            "certificates": [{"head": list(head), **values} for head, values in sorted(self.certificates.items())],
            "seconds": self.seconds,
            "num_sequences": self.statistics.num_sequences,
            "length": self.statistics.length,
            "sequences_hash": self.statistics.sequences_hash,
            **({"exponential": sums} if sums else {}),
            **lengths,
            **deferred,
            **halves,
            **losses,
        }

    def known(self) -> dict[str, Any]:
        """Return what of `to_dict` a model is told along with: its heads, how they were chosen, and on what."""
        names = ["heads", "requested", "score_name", "fit_kl", "num_sequences", "length", "sequences_hash"]
        names += [] if self.loss_before is None else ["loss_before", "loss_after"]
        values = self.to_dict()
        made = {"kind": self.kind, "pattern": self.config["pattern"], "named": self.config["heads"] is not None}
        # A rate is the setting of those alone who gave no other.
        others = any(self.config[name] is not None for name in BUDGETS if name != "rate")
        made["rate"] = None if others else self.config["rate"]
        return made | {name: values[name] for name in names}

    def tensors(self) -> dict[str, Tensor]:
        """Return marginals `[L, H, T]`, statistics `[L, H]` and, of fitted patterns, their logits and sums `[F, T]`.

        Dense patterns are left out; they are in the model's own checkpoint or sidecar.
        """
        tensors = {name: getattr(self.statistics, name).float() for name in ("eta_abs", "eta_rel")}
        tensors |= {name: getattr(self.statistics, name) for name in ("variance", "forward_kl", "row_entropy")}
        if self.patterns is not None:
            vectors = [one.vectors() for one in pattern_for_each_head(self.patterns)]
            tensors |= {name: torch.stack([each[name] for each in vectors]).float() for name in vectors[0]}
        return tensors

    def save(self, folder: str | Path, **extra: Any) -> EventRecord:
        """Record this event, with `extra` values, in the `events.jsonl` of an existing folder, and its tensors.

        Raises InputError when there is no such folder.
        """
        if not Path(folder).is_dir():
            what = "is a file" if Path(folder).exists() else "does not exist"
            raise InputError(f"{folder} {what}; expected a folder to record the event in: make it first")
        return append_event(Path(folder), self.config["operation"], self.to_dict() | extra, self.tensors())

    def table(self) -> Table:
        """Return one row a layer: its heads, their score range and worst fit; totals and seconds in the note."""
        total = sum(self.seconds.values())
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        trained = f"{self.trainable_parameters:,} pattern parameters train on; " if self.trainable_parameters else ""
        rows = []
        for layer in range(self.scores.shape[0]):
            chosen = self.heads.in_layer(layer)
            scores = [self.scores[layer, head].item() for head in chosen]
            span = f"{number(min(scores), 3)} to {number(max(scores), 3)}" if scores else ""
            worst = max((kl for (at, _), kl in self.fit_kl.items() if at == layer), default=None)
            rows.append([layer, " ".join(map(str, chosen)), span, "" if worst is None else f"{worst:.4f}"])
        kind, fits = self.kind, "fit KL, nats (worst)"
        head = ["layer", f"{kind} heads", f"{self.config['score']} ({kind})", fits]
        took = f"{self._losses()}{total:.2f} s ({parts})"
        if kind == "pruned":
            return Table.of(self.summary, head, rows, notes=[took]).without([fits])
        exponential = f"{exponential_words(sums)}; " if (sums := self.to_dict().get("exponential")) else ""
        note = f"{len(self.rejected)} rejected; {trained}{exponential}{self._halves()}{took}"
        return Table.of(self.summary, head, rows, notes=[note])

    def __rich__(self) -> Table:
        return self.table()

    def _losses(self) -> str:
        """Return the held-out loss before and after, for the caption; nothing where it was not measured."""
        if self.loss_before is None:
            return ""
        rise = signed(100 * self.perplexity_rise, 1)
        return f"held-out loss {self.loss_before:.4f} nats before, {self.loss_after:.4f} after (perplexity {rise}); "

    def _halves(self) -> str:
        """Return what the fits on halves came to, for the caption; nothing where none was asked for."""
        if not self.heldout_kl:
            return ""
        own, other = (sum(column) / len(self.heads) for column in zip(*self.heldout_kl.values(), strict=True))
        return f"fits on one half miss it by {own:.4f} nats, the other half by {other:.4f} on average; "

    def __str__(self) -> str:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return markdown_of(self.table())
        text = io.StringIO()
        Console(width=100, file=text).print(self)
        return text.getvalue()


def exponential_words(fits: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how close exponential patterns are to the compact fits, and which heads stayed compact.

    `fits` are the entries of `exponential` in `FreezeReport.to_dict` and events.jsonl.
    """
    sums = [fit for fit in fits if fit["kind"] == "exponential"]
    compact = [":".join(map(str, fit["head"])) for fit in fits if fit["kind"] == "compact"]
    parts = [f"{len(sums)} exponential"]
    if sums:
        extra, cancellation = (max(fit[name] for fit in sums) for name in ("extra_kl", "cancellation"))
        poles = " and ".join(str(count) for count in sorted({fit["poles"] for fit in sums}))
        parts.append(f"extra KL at most {extra:.4f} nats, cancellation {cancellation:.1f}, {poles} poles")
    return ", ".join(parts + [f"compact: {' '.join(compact)}"] * bool(compact))
