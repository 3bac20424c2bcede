"""What a table shows of an arm: each column from the record of a run, and of the run it is compared with."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """Describe one column."""

    title: str
    value: Callable[[Record, Record | None], float | None]
    """The number of one seed, from its record and that of the arm it is compared with; None where there is none."""
    places: int
    """Digits behind the point."""
    signed: bool = False
    paired: str | None = None
    """Which arm the second record is: "reference" or "against"; None for a number of the arm alone."""


def _delta(record: Record, other: Record | None) -> float | None:
    """Return by how many percent a run's perplexity is above another's, on the same held-out windows."""
    if other is None or other["key"] == record["key"]:
        return None
    return 100.0 * math.expm1(record["report_loss"] - other["report_loss"])


def _minutes(record: Record, _: Record | None) -> float | None:
    """Return what the whole run took, its parent's part included."""
    seconds = ((record.get("time") or {}).get("everything") or {}).get("seconds")
    return None if seconds is None else seconds / 60


def _edited(record: Record, _: Record | None) -> float | None:
    """Return how many heads of the model are frozen or pruned."""
    frozen = record["provenance"].get("heads")
    return None if frozen is None else float(len(frozen) + len(record["provenance"].get("pruned") or ()))


def _part(*names: str) -> Callable[[Record, Record | None], float | None]:
    """Return what adds up some parts of an intervention, seconds."""

    def value(record: Record, _: Record | None) -> float | None:
        seconds = (record.get("intervention") or {}).get("seconds")
        return None if seconds is None else math.fsum(seconds.get(name, 0.0) for name in names)

    return value


def _intervention(record: Record, _: Record | None) -> float | None:
    event = record.get("intervention")
    return None if event is None else math.fsum(event["seconds"].values())


COLUMNS = {
    "perplexity": Column(title="perplexity", value=lambda run, _: run.get("report_perplexity"), places=3),
    "delta": Column(title="change, %", value=_delta, places=3, signed=True, paired="reference"),
    "difference": Column(title="difference, points", value=_delta, places=3, signed=True, paired="against"),
    "heads": Column(title="heads", value=_edited, places=0),
    "updates": Column(title="updates", value=lambda run, _: run["updates"], places=0),
    "minutes": Column(title="minutes", value=_minutes, places=2),
    "intervention": Column(title="intervention, s", value=_intervention, places=2),
    "capture": Column(title="capture and mean, s", value=_part("capture", "statistics"), places=2),
    "fit": Column(title="fit, s", value=_part("fit"), places=2),
    "update": Column(
        title="update, ms",
        value=lambda run, _: 1e3 * run["update_seconds"]["median"] if run.get("update_seconds") else None,
        places=1,
    ),
    "peak": Column(
        title="peak, GiB",
        value=lambda run, _: run["peak_memory_bytes"] / 2**30 if run.get("peak_memory_bytes") else None,
        places=2,
    ),
}
