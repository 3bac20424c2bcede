"""Writing a report about runs: one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import write_atomically
from saf.records.run import RecordedRun
from saf.report.comparisons import Comparison, arm_names, compare_all
from saf.report.figures import arm_data, freeze_data, gap_data
from saf.report.page import page, section, text
from saf.report.sections import comparison_table, dek, headline, probe_sentence, provenance_table, warning
from saf.report.tiles import tiles

_SCRIPTS = ("theme.js", "draw.js", "chart.js", "heads.js", "rank.js", "detail.js", "page.js")


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
        tiles=tiles(runs, comparisons),
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
        parts.append(section("training", "What training did", f"<p>{probe_sentence(runs)}</p>{_TRAINING}"))
    costs = '<div id="costs"></div>' if any(freeze["seconds"] for freeze in data["freezes"]) else ""
    parts.append(section("arms", "Cost and saving", comparison_table(runs, names, comparisons) + costs))
    parts.append(section("provenance", "Provenance", provenance_table(runs, names)))
    return "\n".join(parts)


def _footer(runs: Sequence[RecordedRun]) -> str:
    dates = [(run.result or {}).get("provenance", {}).get("date") for run in runs]
    last = max((date for date in dates if date), default=None)
    return f"Last run ended {text(last)}. " if last else ""


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
