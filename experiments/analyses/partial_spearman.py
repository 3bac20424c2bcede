"""Rank correlations of scores with the cost of single heads beyond layer and entropy (paper, appendix A.3)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from experiments import paper
from experiments.analyses import common
from experiments.analyses.common import Output, Record, header, mask_of, matrix, spearman
from saf.errors import InputError
from saf.heads import HeadSet
from saf.records.table import Part, Table, correlation

NAMES = {
    "spearman": "Spearman",
    "layer": "beyond layer",
    "layer_entropy": "beyond layer and entropy",
    "with_entropy": "with entropy",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Correlate the ranks of scores and of single heads' costs beyond the layer, and beyond layer and entropy."""

    one_head: tyro.conf.Positional[Path]
    """Record of the analysis one-head."""
    profiles: Path | None = None
    """Record of the analysis profiles of the same model; adds the control for entropy."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record: correlations over the heads whose fit was accepted."""
    costs = common.read_record(settings.one_head, "one-head")
    change = matrix(costs["nll_change"])
    allowed = mask_of(HeadSet(costs["eligible"]), change.shape)
    change = change.masked_fill(~allowed, torch.nan)
    files, entropy = {"one_head": settings.one_head}, None
    if settings.profiles is not None:
        profiles = common.read_record(settings.profiles, "profiles")
        entropy, files["profiles"] = matrix(profiles["profiles"]["entropy"]), settings.profiles
        one, other = (record["provenance"]["checkpoints"].get("model") for record in (costs, profiles))
        if (one and other and one != other) or entropy.shape != change.shape:
            raise InputError(f"the two files must be about one model, got checkpoints {one} and {other}")
    correlations: dict[str, dict[str, float]] = {}
    for name, rows in costs["scores"].items():
        values = matrix(rows)
        each = {"spearman": spearman(values, change), "layer": common.partial_spearman(values, change)}
        if entropy is not None:
            each["layer_entropy"] = common.partial_spearman(values, change, covariates=[entropy])
            each["with_entropy"] = spearman(values, entropy.masked_fill(~allowed, torch.nan))
        correlations[name] = each
    origin = {name: costs["provenance"][name] for name in ("checkpoints", "data")}
    head = header("partial-spearman", settings, **origin, files=files)
    return {**head, "heads": int(allowed.sum()), "correlations": correlations}


def tables(record: Record) -> list[Part]:
    """Return the correlations by score, the paper's behind those of variance."""
    rows = []
    for name, each in record["correlations"].items():
        beside = paper.PARTIAL if name == "variance" else {}
        cells = [
            correlation(each.get(key)) + (f" (paper {beside[key]})" if key in beside and key in each else "")
            for key in NAMES
        ]
        rows.append([name.replace("_", " "), *cells])
    table = Table.of("", ["score", *NAMES.values()], rows, paper.notes(paper.SELECTION_TEXT))
    conditions = f"Scores and the cost of single heads, layer and entropy held: {record['heads']} heads."
    return [conditions, table.used()]
