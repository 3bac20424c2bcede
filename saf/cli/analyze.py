"""`saf analyze`: analyses of heads, selections and patterns; each prints a table and writes JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from saf.analysis.correlation import spearman
from saf.analysis.partial import partial_spearman
from saf.analysis.stability import selection_stability
from saf.cli.analyze_base import Written
from saf.cli.analyze_distributions import Distributions
from saf.cli.analyze_fits import Fits
from saf.cli.analyze_model import Geometry, JointCost, Profiles
from saf.cli.analyze_one_head import OneHead
from saf.cli.command import Command
from saf.errors import InputError
from saf.heads import HeadSet
from saf.records.events import read_events
from saf.records.head import read_result, result_head
from saf.records.table import Table
from saf.report.analysis_figures import write_figure


@dataclass(kw_only=True)
class PartialSpearman(Written):
    """A score and the cost of single heads: their rank correlation beyond the layer, and beyond layer and entropy."""

    one_head: Annotated[Path, tyro.conf.Positional]
    """What `saf analyze one-head --out` wrote."""
    profiles: Path | None = None
    """What `saf analyze profiles --out` wrote about the same model; adds the control for entropy."""

    def run(self) -> dict[str, Any]:
        """Correlate every score of the file, show, write and return the record."""
        self.check()
        record = _recorded(self.one_head, "one-head")
        change = matrix(record["nll_change"])
        allowed = torch.zeros_like(change, dtype=torch.bool)
        for layer, head in record["eligible"]:
            allowed[layer, head] = True
        change = change.masked_fill(~allowed, torch.nan)
        entropy = None
        if self.profiles is not None:
            entropy = matrix(_recorded(self.profiles, "profiles")["profiles"]["entropy"])
        found: dict[str, dict[str, float]] = {}
        for name, rows in record["scores"].items():
            values = matrix(rows)
            found[name] = {"spearman": spearman(values, change), "layer": partial_spearman(values, change)}
            if entropy is not None:
                found[name]["layer_entropy"] = partial_spearman(values, change, covariates=[entropy])
                found[name]["with_entropy"] = spearman(values, entropy.masked_fill(~allowed, torch.nan))
        head = ["score", "Spearman", "beyond layer"]
        head += ["beyond layer and entropy", "with entropy"] if entropy is not None else []
        rows = [[name, *(f"{value:.3f}" for value in each.values())] for name, each in found.items()]
        title = f"scores and the cost of {int(allowed.sum())} single heads"
        result = {
            **result_head("partial-spearman", self.settings()),
            "heads": int(allowed.sum()),
            "correlations": found,
        }
        return self.finish(result, Table.of(title, head, rows))


@dataclass(kw_only=True)
class Stability(Written):
    """Two selections of one model: their overlap against what chance gives in each layer, and their ranks."""

    first: Annotated[Path, tyro.conf.Positional]
    """An events.jsonl, or the run or checkpoint that holds one; its newest freeze counts."""
    second: Annotated[Path, tyro.conf.Positional]
    """Another one."""

    def run(self) -> dict[str, Any]:
        """Compare, show, write and return the record."""
        self.check()
        records = [_selection(path) for path in (self.first, self.second)]
        scores = (matrix(records[0]["scores"]), matrix(records[1]["scores"]))
        one, other = (HeadSet.from_list(record["heads"]) for record in records)
        found = selection_stability(one, other, num_heads=scores[0].shape[1], scores=scores)
        rows = {
            "heads": f"{found.first} and {found.second}",
            "in both": f"{found.overlap}",
            "expected by chance in each layer": f"{found.expected:.2f} ± {found.standard_deviation:.2f}",
            "rank correlation of the scores": f"{found.rank_correlation:.3f}",
        }
        result = {**result_head("stability", self.settings()), "of": [self.first, self.second], **asdict(found)}
        result |= {"heads": [one.to_list(), other.to_list()], "scores": scores}
        return self.finish(result, Table.facts("stability of the selection", rows))


@dataclass(kw_only=True)
class Draw(Command):
    """Draw the figure of an analysis from the JSON that its --out wrote."""

    record: Annotated[Path, tyro.conf.Positional]
    """What `saf analyze NAME --out` wrote, a partial record of one-head included."""
    out: Annotated[Path, tyro.conf.Positional]
    """The SVG to write."""

    def run(self) -> dict[str, Any]:
        """Draw, and return where."""
        write_figure(read_result(self.record), self.out)
        print(self.out)
        return {"figure": str(self.out)}


def _selection(path: Path) -> dict[str, Any]:
    """Return the newest record of heads and scores in a file or folder; raise InputError when there is none."""
    selections = [event.values for event in read_events(path) if {"heads", "scores"} <= event.values.keys()]
    if not selections:
        raise InputError(f"{path} has no event with heads and scores; expected events.jsonl, or a folder that holds it")
    return selections[-1]


def matrix(rows: list[list[float | None]]) -> Tensor:
    """Return values by layer and head, `[L, H]` float64, as JSON has them: null for NaN."""
    filled = [[torch.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=torch.float64)


def _recorded(path: Path, name: str) -> dict[str, Any]:
    record = read_result(path)
    if record["kind"] != name:
        raise InputError(f"{path} is not what `saf analyze {name} --out` writes")
    return record


COMMANDS = {
    "one-head": OneHead,
    "joint-cost": JointCost,
    "partial-spearman": PartialSpearman,
    "profiles": Profiles,
    "stability": Stability,
    "geometry": Geometry,
    "fits": Fits,
    "distributions": Distributions,
    "draw": Draw,
}
