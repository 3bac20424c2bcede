"""The likeness of two selections of one model, for example a quarter and half through its training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from experiments import paper
from experiments.analyses.common import Output, Record, header, mask_of, matrix, spearman, subplots
from saf.checkpoint import checkpoint_hash, find_checkpoint
from saf.errors import InputError
from saf.heads import HeadSet
from saf.records.files import read_json
from saf.records.run import chosen, events_file, read_events
from saf.records.table import Part, Table, correlation


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Compare two selections of one model: their overlap against chance within layers, and their scores' ranks."""

    first: tyro.conf.Positional[Path]
    """An events.jsonl, or the run or checkpoint that holds one; its newest freeze counts."""
    second: tyro.conf.Positional[Path]
    """Another one."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record; `expected` is the mean overlap of random sets with as many heads in each layer."""
    paths = {"first": settings.first, "second": settings.second}
    selections = []
    for path in paths.values():
        if (selection := chosen(read_events(path))) is None:
            raise InputError(f"{path} has no event with heads and scores; expected a run's events.jsonl, or its folder")
        selections.append(selection)
    one, other = (HeadSet(each["heads"]) for each in selections)
    scores = [matrix(each["scores"]) for each in selections]
    width = scores[0].shape[1]
    # Layers are independent; within one the overlap of random sets is hypergeometric.
    a, b = (np.array([len(heads.in_layer(layer)) for layer in range(len(scores[0]))]) for heads in (one, other))
    variance = (a * b * (width - a) * (width - b)).sum() / (width**2 * max(1, width - 1))
    checkpoints = {role: _checkpoint(path) for role, path in paths.items()}
    head = header(
        "stability",
        settings,
        checkpoints={role: path and checkpoint_hash(path) for role, path in checkpoints.items()},
        data={
            role: path and read_json(path / "state.json").get("data_fingerprint") for role, path in checkpoints.items()
        },
        files={role: events_file(path) for role, path in paths.items()},
    )
    return {
        **head,
        **{"of": [settings.first, settings.second], "first": len(one), "second": len(other)},
        "overlap": len(one & other),
        "expected": float((a * b).sum() / width),
        "standard_deviation": float(np.sqrt(variance)),
        "rank_correlation": spearman(*scores),
        "heads": [one.to_list(), other.to_list()],
        "scores": scores,
    }


def _checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that `path` is or lies in, a run's newest; None for a run whose checkpoints are gone."""
    try:
        return find_checkpoint(path if path.is_dir() else path.parent)
    except InputError:
        return None


def tables(record: Record) -> list[Part]:
    """Return overlap and rank correlation beside the paper's."""
    beside = paper.STABILITY
    chance = f"{record['expected']:.2f} ± {record['standard_deviation']:.2f}"
    rows = [
        ["heads in both", record["overlap"], beside["overlap"]],
        ["expected by chance in each layer", chance, beside["expected"]],
        ["rank correlation of the scores", correlation(record["rank_correlation"]), beside["rank_correlation"]],
    ]
    columns = ["", "ours", "paper, 25% and 50% of training"]
    conditions = f"Stability of the selection: {record['first']} and {record['second']} heads."
    return [conditions, Table.of("", columns, rows, paper.notes(paper.SELECTION_TEXT))]


def figure(records: Sequence[Record]) -> Figure:
    """Return both scores of every head, coloured by the sets it is in."""
    record, *_ = records
    one, other = (matrix(rows).numpy() for rows in record["scores"])
    first, second = (mask_of(HeadSet(heads), one.shape).numpy() for heads in record["heads"])
    drawn, axis = subplots(size=(7, 5))
    for name, heads in (("in neither", ~first & ~second), ("in one", first ^ second), ("in both", first & second)):
        axis.plot(one[heads], other[heads], "o", ms=4, label=name)
    if min(np.nanmin(one), np.nanmin(other)) > 0:
        axis.set(xscale="log", yscale="log")
    title = f"{record['overlap']} heads in both selections, of {record['first']} and {record['second']}"
    axis.set(title=title, xlabel="score at the first selection", ylabel="score at the second selection")
    axis.legend()
    return drawn
