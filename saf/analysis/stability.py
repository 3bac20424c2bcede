"""How alike two selections of one model are, for example a quarter and half through its training."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor

from saf.analysis.correlation import matrix, spearman
from saf.analysis.model import SILENT, Record, Watch, checkpoint_beside, fingerprint_beside
from saf.arguments import check_fields
from saf.errors import InputError
from saf.heads import HeadSet
from saf.records import paper
from saf.records.events import chosen, events_file, read_events
from saf.records.quantities import correlation
from saf.records.result import result_header
from saf.records.table import Part, Table
from saf.settings import documented


@documented
@dataclass(frozen=True, kw_only=True)
class Stability:
    """Compare two selections of one model: their overlap against what chance gives in each layer, and their ranks."""

    first: Annotated[Path, tyro.conf.Positional]
    """An events.jsonl, or the run or checkpoint that holds one; its newest freeze counts."""
    second: Annotated[Path, tyro.conf.Positional]
    """Another one."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)


def measure(settings: Stability, watch: Watch = SILENT) -> dict[str, Any]:
    """Compare the two selections, and return the record."""
    paths = {"first": settings.first, "second": settings.second}
    events = [_selection(path) for path in paths.values()]
    one, other = (HeadSet.from_list(event["heads"]) for event in events)
    scores = (matrix(events[0]["scores"]), matrix(events[1]["scores"]))
    found = selection_stability(one, other, num_heads=scores[0].shape[1], scores=scores)
    return {
        **result_header(
            "stability",
            vars(settings),
            checkpoints={role: checkpoint_beside(path) for role, path in paths.items()},
            data={role: fingerprint_beside(path) for role, path in paths.items()},
            files={role: events_file(path) for role, path in paths.items()},
        ),
        "of": [settings.first, settings.second],
        **asdict(found),
        "heads": [one.to_list(), other.to_list()],
        "scores": scores,
    }


def tables(record: Record) -> list[Part]:
    """Return how alike two selections are."""
    beside = paper.STABILITY
    chance = f"{record['expected']:.2f} ± {record['standard_deviation']:.2f}"
    rows = [
        ["heads in both", record["overlap"], beside["overlap"]],
        ["expected by chance in each layer", chance, beside["expected"]],
        ["rank correlation of the scores", correlation(record["rank_correlation"]), beside["rank_correlation"]],
    ]
    return [
        f"Stability of the selection: {record['first']} and {record['second']} heads.",
        Table.of("", ["", "ours", "paper, 25% and 50% of training"], rows, notes=paper.notes(paper.SELECTION_TEXT)),
    ]


@dataclass(frozen=True, kw_only=True)
class SelectionOverlap:
    """Hold the overlap of two head sets, beside that of independent sets with as many heads in each layer."""

    first: int
    second: int
    overlap: int
    expected: float
    """Mean of the overlap if each layer's heads were drawn at random."""
    standard_deviation: float
    """Of that overlap."""
    rank_correlation: float | None
    """Spearman's, of the two scores; None without scores."""


def selection_stability(
    first: HeadSet, second: HeadSet, *, num_heads: int, scores: tuple[Tensor, Tensor] | None = None
) -> SelectionOverlap:
    """Compare two head sets of a model with `num_heads` heads a layer, and the scores `[L, H]` that chose them.

    Within a layer the overlap of random sets is hypergeometric; layers are independent. Raises InputError for heads
    that do not exist.
    """
    if any(head >= num_heads for _, head in first | second):
        raise InputError(f"layers have {num_heads} heads; got {(first | second).to_list()}")
    expected = variance = 0.0
    for layer in {layer for layer, _ in first}:
        a, b = len(first.in_layer(layer)), len(second.in_layer(layer))
        expected += a * b / num_heads
        if num_heads > 1:
            variance += a * b * (num_heads - a) * (num_heads - b) / (num_heads**2 * (num_heads - 1))
    return SelectionOverlap(
        first=len(first),
        second=len(second),
        overlap=len(first & second),
        expected=expected,
        standard_deviation=variance**0.5,
        rank_correlation=None if scores is None else spearman(*scores),
    )


def _selection(path: Path) -> dict[str, Any]:
    """Return heads and scores of all events in a file or folder; raise InputError when there are none."""
    if (selection := chosen(read_events(path))) is None:
        raise InputError(f"{path} has no event with heads and scores; expected a run's events.jsonl, or its folder")
    return selection
