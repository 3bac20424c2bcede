"""The training loss after an intervention: its gap to the ordinary run, smoothed (paper, appendix A.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from matplotlib.figure import Figure

from experiments import paper
from experiments.analyses.common import Analysis, subplots
from experiments.records import Record
from saf.errors import InputError
from saf.records.files import read_lines
from saf.records.run import read_events
from saf.records.table import Part, Table, percent, signed

METRICS = "metrics.jsonl"
MAX_POINTS = 500
"""Points of a curve in a record."""


@dataclass(frozen=True, kw_only=True)
class Recovery(Analysis):
    """Compare the training loss of runs after their intervention with the ordinary run's, update by update."""

    kind = "recovery"
    ordinary: tyro.conf.Positional[Path]
    """The run without an intervention."""
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs that continued from its checkpoints with frozen or pruned heads, on the same data in the same order."""
    window: int = 210
    """Updates of the centred mean; at the ends it is over those that exist."""
    after: int = 200
    """Updates after the intervention at which the gap is shown."""

    def measure(self) -> dict[str, Any]:
        ordinary = _metrics(self.ordinary)
        curves = [_curve(self, ordinary, path) for path in self.runs]
        files = {f"run {place}": path / METRICS for place, path in enumerate((self.ordinary, *self.runs))}
        # A run that was frozen after the last update did no update: it has no metrics.
        head = self.header(files={role: path for role, path in files.items() if path.is_file()})
        return {**head, "window": self.window, "after": self.after, "runs": curves}

    @staticmethod
    def tables(record: Record) -> list[Part]:
        rows = []
        for run in record["runs"]:
            share, gaps = percent(run["share"]), [signed(run[key], 4, "") for key in ("gap_after", "gap_at_end")]
            ours = [signed(run["at_once"], 2), *gaps]
            papers = paper.RECOVERIES.get(share, (None, None, None))
            rows.append([share, *(cell for pair in zip(ours, papers, strict=True) for cell in pair)])
        conditions = (
            "Training loss after an intervention minus the ordinary run's at the same update, mean of "
            f"{record['window']} updates around each; perplexity at once is on the controller's windows."
        )
        measured = ("perplexity at once", f"gap {record['after']:,} updates later, nats", "gap at the end, nats")
        columns = ["intervention after", *(column for name in measured for column in (name, f"paper's {name}"))]
        return [conditions, Table.of("", columns, rows, [paper.RECOVERY.note])]

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure:
        """Return the smoothed gap of every run by the updates after its intervention."""
        record, *_ = records
        drawn, axis = subplots(size=(8, 4.5))
        for run in record["runs"]:
            later = [update - run["update"] for update in run["updates"]]
            axis.plot(later, run["gap"], label=f"after {percent(run['share'])}")
        axis.axhline(0, color="grey", lw=0.8)
        axis.set(title="Training loss minus the ordinary run's", xlabel="updates after the intervention", ylabel="nats")
        axis.legend()
        return drawn


def _curve(settings: Recovery, ordinary: pd.DataFrame, path: Path) -> dict[str, Any]:
    """Return one run's smoothed gap after its first intervention in force, and the cost at once.

    There is no gap after an intervention at the ordinary run's last update.
    """
    events = [event for event in read_events(path) if event.undone_by is None and event.kind != "undo"]
    if not events:
        raise InputError(f"{path} has no intervention in force; name a run with frozen or pruned heads")
    event, last = events[0], int(ordinary.index.to_numpy().max())
    begin = event.update or 0
    gap = pd.Series(dtype=float)
    if begin != last:
        both = _metrics(path).merge(ordinary, left_index=True, right_index=True, suffixes=("", "_ordinary"))
        both = both.loc[begin + 1 :]
        # Both losses must be of the same minibatch, or the gap would be one of data.
        if (both["tokens"] != both["tokens_ordinary"]).any():
            raise InputError(f"{path} and {settings.ordinary} differ in tokens at the same update")
        # An even window has one value more before than after.
        gap = (both["loss"] - both["loss_ordinary"]).rolling(settings.window, center=True, min_periods=1).mean()
    before, after = event.values.get("loss_before"), event.values.get("loss_after")
    # Thousands of points a curve would make the record larger than its figure needs.
    points = gap.iloc[:: max(1, -(-len(gap) // MAX_POINTS))]
    return {
        "run": path,
        "update": begin,
        "share": begin / last,
        "heads": len(event.heads),
        "at_once": None if before is None or after is None else 100.0 * expm1(after - before),
        "gap_after": gap.get(begin + settings.after),
        "gap_at_end": None if gap.empty else float(gap.iloc[-1]),
        "updates": points.index.tolist(),
        "gap": points.tolist(),
    }


def _metrics(path: Path) -> pd.DataFrame:
    lines = list(read_lines(path / METRICS))
    if not lines:
        raise InputError(f"{path / METRICS} has no updates; expected the folder of a run")
    columns = {name: [line[name] for line in lines] for name in ("loss", "tokens")}
    frame = pd.DataFrame(columns, index=[int(line["update"]) for line in lines])
    # A resumed run has done some updates twice: the later line is of the run that went on.
    return frame.groupby(level=0).last()
