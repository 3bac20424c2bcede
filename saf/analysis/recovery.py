"""How the training loss recovers after an intervention: its gap to the ordinary run, smoothed (paper, appendix A.4)."""

from dataclasses import dataclass
from math import expm1
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.analysis.model import SILENT, Record, Watch
from saf.arguments import at_least, check_fields
from saf.errors import InputError
from saf.records import paper
from saf.records.events import EventRecord, read_events
from saf.records.files import read_lines
from saf.records.quantities import MISSING, percent, signed
from saf.records.result import result_header
from saf.records.table import Part, Table
from saf.settings import documented

METRICS = "metrics.jsonl"
POINTS = 500
"""Most points of a curve that are kept: as many as a figure can show."""


@documented
@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Compare the training loss of runs after their intervention with the ordinary run's, update by update."""

    ordinary: Annotated[Path, tyro.conf.Positional]
    """The run that was trained on without an intervention."""
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Runs that went on from its checkpoints with frozen or pruned heads, on the same data in the same order."""
    window: Annotated[int, at_least(1)] = 210
    """Updates of the centred mean; at the ends it is over those that there are."""
    after: Annotated[int, at_least(1)] = 200
    """Updates after the intervention at which the gap is told."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)
        if not self.runs:
            raise InputError("expected one run at least to compare with the ordinary one; got none")


def measure(settings: Recovery, watch: Watch = SILENT) -> dict[str, Any]:
    """Compare, and return the record."""
    ordinary = _losses(settings.ordinary)
    curves = [_curve(settings, ordinary, path) for path in settings.runs]
    files = {"ordinary": settings.ordinary / METRICS}
    files |= {f"run {place}": path / METRICS for place, path in enumerate(settings.runs, 1)}
    head = result_header("recovery", vars(settings), files=files)
    return {**head, "window": settings.window, "after": settings.after, "runs": curves}


def tables(record: Record) -> list[Part]:
    """Return what every run's intervention cost at once, and its gap afterwards."""
    after = f"gap {record['after']:,} updates later, nats"
    rows = [
        [percent(run["share"]), signed(run["at_once"], 2), _nats(run["gap_after"]), _nats(run["gap_at_end"])]
        for run in record["runs"]
    ]
    conditions = (
        f"Training loss after an intervention minus the ordinary run's at the same update, mean of {record['window']} "
        "updates around each; perplexity at once is on the controller's windows."
    )
    notes = paper.notes(paper.RECOVERY)
    head = ["intervention after", "perplexity at once", after, "gap at the end, nats"]
    return [conditions, Table.of("", head, rows, notes=notes)]


def centred_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of the `window` values around each; at the ends, of those of them that there are.

    An even window has one value more before than after.
    """
    before, after = window // 2, (window - 1) // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = ((max(0, at - before), min(len(values), at + after + 1)) for at in range(len(values)))
    return [(sums[last] - sums[first]) / (last - first) for first, last in bounds]


def _curve(settings: Recovery, ordinary: dict[int, dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return one run's smoothed gap after its event, and what the event cost at once.

    Of an event after the ordinary run's last update there is no gap: none follows.
    """
    event = _event(path)
    begin = event.update or 0
    ended = begin == max(ordinary)
    own = {} if ended else _losses(path)
    updates = [update for update in sorted(own) if update > begin and update in ordinary]
    if not updates and not ended:
        raise InputError(f"{path} shares no update after its event at {begin} with {settings.ordinary}")
    if any(own[update]["tokens"] != ordinary[update]["tokens"] for update in updates):
        raise InputError(f"{path} and {settings.ordinary} trained on different numbers of tokens at the same update")
    gaps = [] if ended else centred_mean([own[at]["loss"] - ordinary[at]["loss"] for at in updates], settings.window)
    before, later = event.values.get("loss_before"), event.values.get("loss_after")
    at_once = None if before is None or later is None else 100.0 * expm1(later - before)
    kept = range(0, len(updates), max(1, -(-len(updates) // POINTS)))
    return {
        "run": path,
        "update": begin,
        "share": begin / max(ordinary),
        "heads": len(event.heads),
        "at_once": at_once,
        "gap_after": dict(zip(updates, gaps, strict=True)).get(begin + settings.after),
        "gap_at_end": gaps[-1] if gaps else None,
        "updates": [updates[place] for place in kept],
        "gap": [gaps[place] for place in kept],
    }


def _event(path: Path) -> EventRecord:
    """Return a run's first intervention that was kept; raise InputError when there is none."""
    kept = [event for event in read_events(path) if event.undone_by is None and event.kind != "undo"]
    if not kept:
        raise InputError(f"{path} has no intervention that was kept; expected a run with frozen or pruned heads")
    return kept[0]


def _losses(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run's metrics by update; raise InputError when it has none."""
    lines = {int(line["update"]): line for line in read_lines(path / METRICS)}
    if not lines:
        raise InputError(f"{path / METRICS} has no updates; expected the folder of a run")
    return lines


def _nats(value: float | None) -> str:
    return MISSING if value is None else signed(value, 4, "")
