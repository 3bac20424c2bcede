"""The page about runs: one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.evaluate.side_by_side import Comparison, arm_names, arms_table, compare_all
from saf.records.events import EventRecord
from saf.records.files import write_atomically
from saf.records.quantities import number, seconds
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table
from saf.report.page import page, section, text
from saf.report.runs.page_data import arm_data, freeze_data, gap_data
from saf.report.runs.summary import dek, headline, key_figures, probe_sentence, warning

_SCRIPTS = ("theme.js", "draw.js", "chart.js", "heads.js", "rank.js", "detail.js", "page.js")
_HEADS = """
<p class="intro" id="map-intro"></p>
<div class="heads">
  <div class="map">
    <div class="controls" id="map-controls"></div>
    <div id="map"></div>
    <div id="map-legend"></div>
    <div id="rank" class="rank"></div>
  </div>
  <article class="detail" id="detail"></article>
</div>
<details class="numbers"><summary>All heads as a table</summary><div id="head-table"></div></details>
"""
_TRAINING = '<div id="loss"></div><div id="gap"></div>'


def write_report(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Write one self-contained `report.html` about the given run folders and return its path.

    `out` is the file, or a folder to put `report.html` in. An ordinary and a frozen run are compared; a single run is
    shown for itself. The page asks nothing of the network.

    Raises:
        InputError: No run, or a folder that is none.
    """
    if not runs:
        raise InputError("a report needs at least one run folder")
    opened = [RecordedRun.open(folder) for folder in runs]
    out = Path(out)
    target = out if out.suffix == ".html" else out / "report.html"
    return write_atomically(target, render(opened).encode())


def render(runs: Sequence[RecordedRun]) -> str:
    """Return the page as text."""
    names = arm_names(runs)
    comparisons = compare_all(runs, names)
    data = report_data(runs, names, comparisons)
    return page(
        kicker=" · ".join(names),
        headline=headline(runs, comparisons),
        dek=dek(runs, comparisons),
        warning=warning(comparisons),
        key_figures=key_figures(runs, comparisons),
        sections=_sections(runs, names, comparisons, data),
        footer=_footer(runs),
        data=data,
        scripts=_SCRIPTS,
    )


def report_data(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return everything that the page draws, as plain JSON values."""
    named = list(zip(runs, names, strict=True))
    paired = [c for c in comparisons if c.record and not c.record["differences"]]
    gaps = [gap_data(c.ordinary, c.frozen, c.name) for c in paired]
    freezes = [freeze_data(run, name) for run, name in named]
    return {
        "arms": [arm_data(run, name) for run, name in named],
        "gaps": [gap for gap in gaps if gap],
        "freezes": [freeze for freeze in freezes if freeze],
    }


def _sections(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison], data: dict[str, Any]
) -> str:
    parts = []
    if data["freezes"]:
        parts.append(section("heads", "Which heads froze, and into what", _HEADS))
    if any(arm["raw"]["x"] for arm in data["arms"]):
        body = f"<p>{probe_sentence(runs)}</p>{_TRAINING}{events_table(runs, names)}"
        parts.append(section("training", "What training did", body))
    costs = '<div id="costs"></div>' if any(freeze["seconds"] for freeze in data["freezes"]) else ""
    parts.append(section("arms", "Cost and saving", arms_table(runs, names, comparisons).html() + costs))
    parts.append(section("provenance", "Provenance", provenance_table(runs, names)))
    return "\n".join(parts)


def events_table(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return what every event did, why, and what came of it, a row each; nothing where no run had more than one."""
    if all(len(run.events) < 2 for run in runs):
        return ""
    rows = [[name, *_event_row(event)] for run, name in zip(runs, names, strict=True) for event in run.events]
    columns = ("arm", "event", "after update", "heads", "controller loss, nats", "kept", "took", "reason")
    return Table.of("Events", columns, rows).html()


def _event_row(event: EventRecord) -> list[Any]:
    before, after = (event.values.get(name) for name in ("loss_before", "loss_after"))
    losses = None if before is None or after is None else f"{before:.4f} → {after:.4f}"
    kept = "yes" if event.undone_by is None else f"undone by event {event.undone_by}"
    took = seconds(sum(event.seconds.values())) if event.seconds else None
    what = f"{event.number}: {event.kind}"
    return [what, number(event.update), len(event.heads), losses, kept, took, event.values.get("reason")]


def _footer(runs: Sequence[RecordedRun]) -> str:
    dates = [(run.result or {}).get("provenance", {}).get("date") for run in runs]
    last = max((date for date in dates if date), default=None)
    return f"Last run ended {text(last)}. " if last else ""


def provenance_table(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return hashes, versions, seed, device, commit and command of every run."""
    records = [_provenance(run) for run in runs]
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[key, *(_code(record.get(key)) for record in records)] for key in keys]
    return Table.of("Where these numbers come from", ["", *names], rows).html()


def _provenance(run: RecordedRun) -> dict[str, Any]:
    entries = dict((run.result or {}).get("provenance") or {})
    versions = entries.pop("versions", None) or {}
    checkpoints, data = entries.pop("checkpoints", {}), entries.pop("data", {})
    entries |= {f"{role} checkpoint": value for role, value in checkpoints.items()}
    entries |= {f"{role} data": value for role, value in data.items()}
    entries["heads"] = f"{len(run.frozen_heads)} frozen"
    evaluation = run.evaluation or {}
    entries["data fingerprint"] = (run.config.get("data") or {}).get("fingerprint")
    entries["evaluation windows"] = evaluation.get("windows_hash")
    entries |= {f"{name} version": version for name, version in versions.items()}
    return {key.replace("_", " "): value for key, value in entries.items()}


def _code(value: Any) -> Any:
    return Cell.code_of(value) if isinstance(value, str) else value
