"""How many queries a model answers: its most likely token, of all it knows, against the target at each query."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.calibration.capture import evaluation_mode
from saf.errors import DivergenceError, InputError
from saf.machine.execution import Execution, autocast
from saf.machine.processes import shared_out
from saf.models import GPT
from saf.records.table import Table

NO_TARGET = -100
"""Target of a position that is no query."""
RECALL = "recall.json"
"""Name of the file of accuracies by condition in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """Hold what a model answered on the examples of one condition."""

    hits: tuple[int, ...]
    """Queries answered rightly, by example."""
    queries: tuple[int, ...]
    """Queries asked, by example."""
    loss: float
    """Mean negative log-likelihood of the answers, nats per query."""

    @property
    def accuracy(self) -> float:
        """Return the share of all queries that were answered rightly."""
        return sum(self.hits) / sum(self.queries)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, hits by example among them, so that two models can be compared in pairs."""
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "examples": len(self.hits),
            "queries": sum(self.queries),
            "hits": list(self.hits),
        }


def answer_queries(
    model: GPT, inputs: Tensor, targets: Tensor, *, batch_size: int = 4, precision: str = "auto"
) -> Recalled:
    """Return how a model answers the queries of `inputs [N, T]`, whose answers are `targets [N, T]`, -100 elsewhere.

    All output classes compete for an answer, whichever of them a task uses (paper, appendix on associative recall).
    Processes of a group share the batches out, and all return the same.

    Raises:
        InputError: Tensors of different shapes, an example without a query, or inputs longer than the model takes.
        DivergenceError: Outputs that are not finite.
    """
    if inputs.shape != targets.shape or inputs.dim() != 2:
        raise InputError(
            f"inputs and targets must both be [examples, length]; got {list(inputs.shape)} and {list(targets.shape)}"
        )
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1; got {batch_size}")
    asked = (targets != NO_TARGET).sum(1)
    if not len(asked) or not int(asked.min()):
        raise InputError("every example needs a query, a target that is not -100; one has none, or there are none")
    device = model.embed.weight.device

    def answered(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the hits of each example and the loss at each query of a batch."""
        some, answers = (part.to(device) for part in batch)
        where = answers != NO_TARGET
        logits = F.linear(model.hidden(some)[where], model.embed.weight).float()
        right = torch.zeros_like(where)
        right[where] = logits.argmax(1) == answers[where]
        return right.sum(1).cpu(), F.cross_entropy(logits, answers[where], reduction="none").double().cpu()

    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    with evaluation_mode(model), torch.no_grad(), autocast(device, precision):
        hits, losses = zip(*shared_out(answered, batches), strict=True)
    loss = float(torch.cat(losses).mean())
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss at queries is {loss}: the model's outputs are not finite")
    return Recalled(hits=tuple(torch.cat(hits).tolist()), queries=tuple(asked.tolist()), loss=loss)


def recall_conditions(
    model: GPT,
    execution: Execution,
    conditions: Mapping[tuple[int, int], tuple[Tensor, Tensor]],
    *,
    batch_size: int = 4,
) -> list[dict[str, Any]]:
    """Return a record for each condition, examples by (tokens, pairs), in the order given."""
    records = []
    for (length, pairs), (inputs, targets) in conditions.items():
        found = answer_queries(model, inputs, targets, batch_size=batch_size, precision=execution.precision)
        records.append({"length": length, "pairs": pairs, **found.to_dict()})
    return records


def not_learnt(recall: Mapping[str, Any]) -> str | None:
    """Return a sentence where the ordinary arm did not pass its gate, so that no arm has learnt; None where it did.

    `recall` is that of a run's result: `gate_passed`, `gate_accuracy`, `gate` and `gate_of`, the ordinary run if it is
    another one.
    """
    if recall["gate_passed"]:
        return None
    whose = f"by {recall['gate_of']}" if recall["gate_of"] else "here"
    return (
        f"the task is not learnt: {100 * recall['gate_accuracy']:.1f}% of the development queries are answered "
        f"{whose}, {100 * recall['gate']:g}% are asked of the ordinary arm before others are compared with it"
    )


def recall_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a run of recall: by tests at its end, and by updates where it was judged in between."""
    if "recall" not in result:
        return []
    tables = [recall_table(result["recall"]["tests"], title="queries answered")]
    if reports := {update: one["recall"]["tests"] for update, one in result["reports"].items()}:
        columns = ("tokens / pairs", *(f"{int(update):,} updates" for update in reports))
        tests = zip(*reports.values(), strict=True)
        rows = [
            [f"{each[0]['length']:,} / {each[0]['pairs']}", *(f"{100 * one['accuracy']:.2f}" for one in each)]
            for each in tests
        ]
        tables.append(Table.of("queries answered, %, by updates", columns, rows))
    return tables


def recall_table(records: Sequence[Mapping[str, Any]], *, title: str = "recall") -> Table:
    """Return the accuracy by tokens and pairs, as percentages of queries, with the loss at queries."""
    rows = [
        [f"{one['length']:,}", one["pairs"], f"{100 * one['accuracy']:.2f}", f"{one['loss']:.4f}", one["queries"]]
        for one in records
    ]
    return Table.of(title, ("tokens", "pairs", "accuracy, %", "loss, nats", "queries"), rows)
