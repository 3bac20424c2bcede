"""Which runs of a report are compared with which, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saf.errors import SafError
from saf.evaluate.compare import compare_runs
from saf.records.head import read_result
from saf.records.run import RecordedRun


@dataclass(frozen=True)
class Comparison:
    """Pair a frozen run with the report's ordinary run; `record` is None when they could not be compared."""

    name: str
    ordinary: RecordedRun
    frozen: RecordedRun
    record: dict[str, Any] | None
    reason: str | None = None


def compare_all(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[Comparison]:
    """Compare every frozen run with the first ordinary one; differences and failures are kept to be shown."""
    ordinary = next((run for run in runs if run.arm == "ordinary"), None)
    if ordinary is None:
        return []
    found = []
    for run, name in zip(runs, names, strict=True):
        if run.arm != "frozen":
            continue
        try:
            record, reason = compare_runs(ordinary.folder, run.folder, allow_differences=True), None
        except SafError as error:
            record = recorded(ordinary, run)
            reason = str(error) if record is None else None
        found.append(Comparison(name, ordinary, run, record, reason))
    return found


def recorded(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any] | None:
    """Return what `saf compare` once wrote into the frozen run's folder, if it is about these two results.

    Archived runs keep their results but not the log-probabilities of every token.
    """
    path = frozen.folder / "compare.json"
    if not path.is_file():
        return None
    record = read_result(path)
    for arm, run in (("ordinary", ordinary), ("frozen", frozen)):
        if not math.isclose(record[f"ppl_{arm}"], run.finished_result()["report_perplexity"], rel_tol=1e-9):
            return None
    return record


def arm_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a name for each run: its folder's, with as much of the path before it as makes all names differ."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} {number}" for number, path in enumerate(parts, start=1)]
