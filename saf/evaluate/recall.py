"""Associative recall: how many queries a model answers, its most likely token of all against the target at each.

Here are the measurement, its record, the paired change of two models, and the tables.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import CompareError, DivergenceError, InputError
from saf.evaluate.answers import NO_TARGET
from saf.evaluate.paired import paired_hits
from saf.evaluate.passes import run_batches
from saf.models import GPT
from saf.records.files import read_json
from saf.records.run import RecordedRun
from saf.records.table import Table

RECALL = "recall.json"
"""Name of the file of accuracies by test in a run's folder."""
GATE = 0.8
"""The paper compares arms only where the ordinary one answers this share of the development queries."""


def answer_queries(
    model: GPT, inputs: Tensor, targets: Tensor, *, batch_size: int = 4, precision: str = "auto"
) -> dict[str, Any]:
    """Answer the queries of `inputs [N, T]`, whose answers are `targets [N, T]`, -100 elsewhere.

    All output classes compete for an answer, whichever of them a task uses (paper, appendix on associative recall).
    Processes of a group share the batches out. Returns `accuracy` over all queries, `loss` (nats per query), the
    numbers of `examples` and `queries`, and `hits`, the queries answered rightly by example.
    """
    queries = (targets != NO_TARGET).sum(1)
    if inputs.shape != targets.shape or not len(queries) or not int(queries.min()):
        shapes = f"{list(inputs.shape)} and {list(targets.shape)}"
        raise InputError(f"inputs and targets must both be [examples, length], a query in each, got {shapes}")
    device = model.embed.weight.device

    def answer(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, answers = (part.to(device) for part in batch)
        where = answers != NO_TARGET
        logits = F.linear(model.hidden(ids)[where], model.embed.weight).float()
        right = torch.zeros_like(where)
        right[where] = logits.argmax(1) == answers[where]
        return right.sum(1).cpu(), F.cross_entropy(logits, answers[where], reduction="none").double().cpu()

    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    hits, losses = map(torch.cat, zip(*run_batches(model, answer, batches, precision=precision), strict=True))
    loss, count = float(losses.mean()), int(queries.sum())
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss at queries is {loss}: the model's outputs are not finite")
    record = {"accuracy": int(hits.sum()) / count, "loss": loss, "examples": len(hits), "queries": count}
    return {**record, "hits": hits.tolist()}


def without_hits(test: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a test as result.json holds it, without the answers to every example."""
    return {name: value for name, value in test.items() if name != "hits"}


def read_recall(run: RecordedRun) -> list[dict[str, Any]]:
    """Read a finished run's tests with the hits of every example; InputError for other answers than the result's."""
    tests = read_json(run.folder / RECALL)["tests"]
    if list(map(without_hits, tests)) != run.finished_result()["recall"]["tests"]:
        raise InputError(f"{run.folder / RECALL} holds other answers than result.json; restore it")
    return tests


def unlearnt_reason(recall: Mapping[str, Any]) -> str | None:
    """Return why no run is to be compared with one of this `recall` in its result; None where it learnt the task."""
    if (share := recall["development"]["accuracy"]) >= GATE:
        return None
    return f"the task is not learnt: {100 * share:.1f}% of the development queries are answered, below {100 * GATE:g}%"


def paired_tests(ordinary: Sequence[Mapping[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the paired change of each test that both models have, and the mean change, in shares of queries."""
    first, second = ({(test["length"], test["pairs"]): test for test in tests} for tests in (ordinary, frozen))
    tasks = {}
    for length, pairs in [key for key in first if key in second]:
        one, other = first[length, pairs], second[length, pairs]
        change = paired_hits(one["hits"], other["hits"], pairs)  # an example has a query for each pair
        shared = {"questions": one["queries"], "accuracy": [one["accuracy"], other["accuracy"]]}
        tasks[f"{length:,} tokens, {pairs} pairs"] = {**shared, **change}
    if not tasks:
        raise CompareError(f"the runs share no test of recall: one has {sorted(first)}, the other {sorted(second)}")
    return {"tasks": tasks, "mean_difference": math.fsum(task["difference"] for task in tasks.values()) / len(tasks)}


def recall_tables(result: Mapping[str, Any]) -> list[Table]:
    """Tabulate a run of recall: its tests at the end, and by updates where it was measured in between."""
    if "recall" not in result:
        return []
    rows = [
        [f"{one['length']:,}", one["pairs"], f"{100 * one['accuracy']:.2f}", f"{one['loss']:.4f}", one["queries"]]
        for one in result["recall"]["tests"]
    ]
    tables = [Table.of("queries answered", ("tokens", "pairs", "accuracy, %", "loss, nats", "queries"), rows)]
    if reports := {update: one["recall"]["tests"] for update, one in result["reports"].items()}:
        columns = ("tokens / pairs", *(f"{int(update):,} updates" for update in reports))
        rows = [
            [f"{each[0]['length']:,} / {each[0]['pairs']}", *(f"{100 * one['accuracy']:.2f}" for one in each)]
            for each in zip(*reports.values(), strict=True)
        ]
        tables.append(Table.of("queries answered, %, by updates", columns, rows))
    return tables
