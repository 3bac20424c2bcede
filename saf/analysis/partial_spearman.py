"""How scores go with the cost of single heads beyond the layer, and beyond layer and entropy (paper, appendix A.3)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from saf.analysis.correlation import matrix, partial_spearman, spearman
from saf.analysis.model import SILENT, Record, Watch
from saf.arguments import check_fields
from saf.errors import InputError
from saf.records import paper
from saf.records.quantities import correlation
from saf.records.result import read_result, result_header
from saf.records.table import Part, Table
from saf.settings import documented


@documented
@dataclass(frozen=True, kw_only=True)
class PartialSpearman:
    """Correlate the ranks of a score and of single heads' costs beyond the layer, and beyond layer and entropy."""

    one_head: Annotated[Path, tyro.conf.Positional]
    """What `saf analyze one-head --out` wrote."""
    profiles: Path | None = None
    """What `saf analyze profiles --out` wrote about the same model; adds the control for entropy."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)


def measure(settings: PartialSpearman, watch: Watch = SILENT) -> dict[str, Any]:
    """Correlate every score of the file with the costs of accepted heads, and return the record."""
    costs = _read(settings.one_head, "one-head")
    change = matrix(costs["nll_change"])
    allowed = torch.zeros_like(change, dtype=torch.bool)
    for layer, head in costs["eligible"]:
        allowed[layer, head] = True
    change = change.masked_fill(~allowed, torch.nan)
    profiles = None if settings.profiles is None else _read(settings.profiles, "profiles")
    entropy = None if profiles is None else matrix(profiles["profiles"]["entropy"])
    found: dict[str, dict[str, float]] = {}
    for name, rows in costs["scores"].items():
        values = matrix(rows)
        found[name] = {"spearman": spearman(values, change), "layer": partial_spearman(values, change)}
        if entropy is not None:
            found[name]["layer_entropy"] = partial_spearman(values, change, covariates=[entropy])
            found[name]["with_entropy"] = spearman(values, entropy.masked_fill(~allowed, torch.nan))
    files = {"one_head": settings.one_head}
    if profiles is not None and settings.profiles is not None:
        _check_alike(settings, costs, profiles)
        files["profiles"] = settings.profiles
    origin = {name: costs["provenance"][name] for name in ("checkpoints", "data")}
    return {
        **result_header("partial-spearman", vars(settings), **origin, files=files),
        "heads": int(allowed.sum()),
        "correlations": found,
    }


def tables(record: Record) -> list[Part]:
    """Return rank correlations beyond layer and entropy."""
    names = {"spearman": "Spearman", "layer": "beyond layer", "layer_entropy": "beyond layer and entropy"}
    names["with_entropy"] = "with entropy"
    rows = []
    for name, each in record["correlations"].items():
        beside = paper.PARTIAL if name == "variance" else {}
        cells = [
            correlation(each.get(key)) + (f" (paper {beside[key]})" if key in beside and key in each else "")
            for key in names
        ]
        rows.append([name.replace("_", " "), *cells])
    table = Table.of("", ["score", *names.values()], rows, notes=paper.notes(paper.SELECTION_TEXT))
    return [f"Scores and the cost of single heads, layer and entropy held: {record['heads']} heads.", table.used()]


def _read(path: Path, name: str) -> dict[str, Any]:
    record = read_result(path)
    if record["kind"] != name:
        raise InputError(f"{path} is not what `saf analyze {name} --out` writes; its kind is {record['kind']!r}")
    return record


def _check_alike(settings: PartialSpearman, costs: Record, profiles: Record) -> None:
    """Raise InputError for files about two checkpoints, as their hashes tell, or about models of two shapes."""
    one, other = (record["provenance"]["checkpoints"].get("model") for record in (costs, profiles))
    shapes = [list(matrix(rows).shape) for rows in (costs["nll_change"], profiles["profiles"]["entropy"])]
    if (one and other and one != other) or shapes[0] != shapes[1]:
        raise InputError(
            f"expected two files about one model; {settings.one_head} is about checkpoint {one}, heads {shapes[0]}, "
            f"{settings.profiles} about {other}, heads {shapes[1]}: measure both on the same checkpoint"
        )
