"""How many bytes the patterns of a model's frozen heads take, in each form (paper, appendix on storage)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from saf.adapters import adapter_for
from saf.analysis.model import SILENT, Record, Watch
from saf.arguments import check_fields
from saf.errors import InputError
from saf.freezing.storage import storage_report
from saf.opening import find_model
from saf.records import paper
from saf.records.result import result_header
from saf.records.table import Part, Table
from saf.settings import documented

FORMS = {
    "dense_by_layer": "a matrix for every head of a layer with frozen heads",
    "dense_packed": "a matrix for every frozen head",
    "compact": "key logits, distance logits and normalisers",
    "allocated": "allocated to execute them",
}


@documented
@dataclass(frozen=True, kw_only=True)
class Storage:
    """Count the bytes of the patterns of a model's frozen heads: as matrices, as vectors, and as they are executed."""

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save; with frozen heads."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)


def measure(settings: Storage, watch: Watch = SILENT) -> dict[str, Any]:
    """Count, and return the record."""
    source = find_model(settings.model)
    model = source.model(torch.device("cpu"))
    heads = adapter_for(model).frozen_heads()
    if not len(heads):
        raise InputError(f"{settings.model} has no frozen heads; name a checkpoint after its freezing")
    head = result_header("storage", vars(settings), checkpoints={"model": source.hash})
    layers = len({layer for layer, _ in heads})
    found = storage_report(model)
    # The paper's: of the matrices of whole layers to what its execution holds.
    reduction = found.dense_by_layer / found.allocated if found.allocated else None
    told = {"heads": len(heads), "layers": layers, "bytes": asdict(found), "ratio": found.ratio}
    return {**head, **told, "reduction": reduction}


def tables(record: Record) -> list[Part]:
    """Return the size of each form."""
    sizes = record["bytes"]
    rows = [[words, f"{sizes[name] / 1e9:.3g} GB", paper.STORAGE.get(name)] for name, words in FORMS.items()]
    conditions = f"Storage of the patterns of {record['heads']} frozen heads in {record['layers']} layers, float32."
    notes = [*paper.notes(paper.IMPLEMENTATION), "The paper's compact buffers are those of its execution."]
    return [conditions, Table.of("", ["form", "ours", "paper"], rows, notes=notes)]
