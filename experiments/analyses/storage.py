"""The bytes that the patterns of a model's frozen heads take, in each form (paper, appendix on storage)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from experiments import paper
from experiments.analyses.common import Output, Record, header
from saf.errors import InputError
from saf.frozen_state import storage_report
from saf.models.adapter import adapter_for
from saf.opening import find_model
from saf.records.table import Part, Table

FORMS = {
    "dense_by_layer": "a matrix for every head of a layer with frozen heads",
    "dense_packed": "a matrix for every frozen head",
    "compact": "key logits, distance logits and normalisers",
    "allocated": "allocated to execute them",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Count the bytes of the patterns of a model's frozen heads: as matrices, as vectors, and as they are executed."""

    model: tyro.conf.Positional[Path]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save; with frozen heads."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record; `reduction` is the paper's, matrices of whole layers over the bytes allocated."""
    source = find_model(settings.model)
    model = source.model(torch.device("cpu"))
    heads = adapter_for(model).heads("frozen")
    if not len(heads):
        raise InputError(f"{settings.model} has no frozen heads; name a checkpoint after its freezing")
    report = storage_report(model)
    return {
        **header("storage", settings, checkpoints={"model": source.hash}),
        "heads": len(heads),
        "layers": len({layer for layer, _ in heads}),
        "bytes": asdict(report),
        "ratio": report.ratio,
        "reduction": report.dense_by_layer / report.allocated if report.allocated else None,
    }


def tables(record: Record) -> list[Part]:
    """Return the size of each form."""
    rows = [[words, f"{record['bytes'][name] / 1e9:.3g} GB", paper.STORAGE.get(name)] for name, words in FORMS.items()]
    conditions = f"Storage of the patterns of {record['heads']} frozen heads in {record['layers']} layers, float32."
    notes = [*paper.notes(paper.IMPLEMENTATION), "The paper's compact buffers are those of its execution."]
    return [conditions, Table.of("", ["form", "ours", "paper"], rows, notes)]
