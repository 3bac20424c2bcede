"""The page about runs: one self-contained HTML file."""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saf.errors import InputError, SafError
from saf.evaluate.recall import recall_tables
from saf.evaluate.side_by_side import JUDGED, Comparison, Judged, arm_colours, arm_names, arms_table, compare_all
from saf.records.events import EventRecord
from saf.records.files import write_atomically
from saf.records.quantities import number, seconds
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table
from saf.report.page import page, section, text
from saf.report.runs.page_data import arm_data, freeze_data, gap_data
from saf.report.runs.picture import picture
from saf.report.runs.summary import dek, doing, headline, key_figures, past_of, probe_sentence, warning

SCRIPTS = ("theme.js", "draw.js", "chart.js", "heads.js", "rank.js", "detail.js", "page.js")
HEADS = """
<div class="script">
<p class="intro" id="map-intro"></p>
<div class="heads">
  <div class="map">
    <div class="controls" id="map-controls"></div>
    <div id="map"></div>
    <div id="map-legend"></div>
  </div>
  <article class="detail" id="detail"></article>
  <div id="rank" class="rank"></div>
</div>
<details class="numbers"><summary>All heads as a table</summary><div id="head-table"></div></details>
</div>
"""
_TRAINING = '<div class="script"><div id="loss"></div><div id="gap"></div></div>'
_STILL = "Scripts do not run here, so this figure stands still"


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
        scripts=SCRIPTS,
    )


def report_data(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return everything that the page draws, as plain JSON values."""
    colours = dict(zip(names, arm_colours(runs), strict=True))
    paired = [c for c in comparisons if c.record and not c.record["differences"]]
    gaps = [gap_data(c.ordinary, c.frozen, c.name, colours[c.name]) for c in paired]
    freezes = [freeze_data(run, name, colours[name]) for run, name in zip(runs, names, strict=True)]
    return {
        "arms": [arm_data(run, name, colours[name]) for run, name in zip(runs, names, strict=True)],
        "gaps": [gap for gap in gaps if gap],
        "freezes": [freeze for freeze in freezes if freeze],
    }


def _sections(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison], data: dict[str, Any]
) -> str:
    """Return the HTML of the page's sections: heads and training where they were recorded, arms, provenance."""
    parts = []
    if data["freezes"]:
        still = f"{_STILL}: with them every head can be chosen, and shows its pattern."
        drawn = base64.b64encode(picture(runs).encode()).decode()
        words = f"Which heads {past_of(runs)}, and what training did"
        figure = f'<img class="still" src="data:image/svg+xml;base64,{drawn}" alt="{words}">'
        into = ", and into what" if any(run.frozen_heads for run in runs) else ""
        parts.append(section("heads", f"Which heads {past_of(runs)}{into}", f"{HEADS}{_without(still, figure)}"))
    if any(arm["raw"]["x"] for arm in data["arms"]):
        still = "The curves of training are drawn by scripts, which do not run here."
        still += " Those of losses stand beside the map of heads above." * bool(data["freezes"])
        probe = probe_sentence(runs, names)
        told = f"<p>{probe}</p>" if probe else ""
        parts.append(
            section("training", "What training did", f"{told}{_TRAINING}{_without(still)}{events_table(runs, names)}")
        )
    table = arms_table(runs, names, comparisons).html()
    parts.append(section("arms", "Cost and saving", table + costs(data["freezes"], doing(runs))))
    for name, tables_of in _TASKS.items():
        if judged := [(run, arm) for run, arm in zip(runs, names, strict=True) if JUDGED[name].has(run)]:
            tables = [*tables_of(judged), *_compared(JUDGED[name], comparisons)]
            parts.append(section(name, name.capitalize(), "".join(each.html() for each in tables)))
    parts.append(section("provenance", "Provenance", provenance_table(runs, names)))
    return "\n".join(parts)


def _answers(runs: Sequence[tuple[RecordedRun, str]]) -> list[Table]:
    """Return the accuracy of finetuned runs."""
    rows = []
    for run, name in runs:
        found = run.finished_result()
        share, error = (f"{100 * found[part]:.2f}" for part in ("accuracy", "standard_error"))
        rows.append([name, f"{share}% ± {error}", found["questions"], found["judged_by"], found["shortened"]])
    columns = ("run", "accuracy ± standard error", "questions", "judged by", "text shortened")
    return [Table.of("Accuracy", columns, rows)]


def _recalled(runs: Sequence[tuple[RecordedRun, str]]) -> list[Table]:
    """Return the queries that runs of recall answer."""
    return [
        replace(table, title=f"{name}: {table.title}")
        for run, name in runs
        for table in recall_tables(run.finished_result())
    ]


_TASKS: dict[str, Callable[[Sequence[tuple[RecordedRun, str]]], list[Table]]] = {
    "answers": _answers,
    "recall": _recalled,
}
"""What is shown of runs of tasks beside their comparisons, by the names of `JUDGED`."""


def _compared(judged: Judged, comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """Yield what each pair of runs that were judged alike answers differently, or why they cannot be compared."""
    for pair in comparisons:
        if judged.has(pair.ordinary) and judged.has(pair.frozen):
            try:
                yield from judged.tables(judged.compare(pair.ordinary, pair.frozen, allow_differences=True))
            except SafError as error:
                yield Table.facts(pair.name, {"not compared": str(error)})


def events_table(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return what every event did, why, and what came of it, a row each; nothing where no run had more than one."""
    if all(len(run.events) < 2 for run in runs):
        return ""
    rows = [[name, *_event_row(event)] for run, name in zip(runs, names, strict=True) for event in run.events]
    columns = ("arm", "event", "after update", "heads", "controller loss, nats", "kept", "took", "reason")
    return Table.of("Events", columns, rows).html()


def _event_row(event: EventRecord) -> list[Any]:
    """Return the cells of one event: what and when, heads, loss before and after, whether it was kept, and seconds."""
    before, after = (event.values.get(name) for name in ("loss_before", "loss_after"))
    losses = None if before is None or after is None else f"{before:.4f} → {after:.4f}"
    kept = "yes" if event.undone_by is None else f"undone by event {event.undone_by}"
    took = seconds(sum(event.seconds.values())) if event.seconds else None
    what = f"{event.number}: {event.kind}"
    return [what, number(event.update), len(event.heads), losses, kept, took, event.values.get("reason")]


def _without(words: str, figure: str = "") -> str:
    """Return what stands in place of a figure where no scripts run."""
    drawn = f'<div class="scroll">{figure}</div>' if figure else ""
    return f'<noscript><p class="intro">{words}</p>{drawn}</noscript>'


def costs(freezes: Sequence[dict[str, Any]], doing: str) -> str:
    """Return bars of the seconds that each part of events took, to one scale, `doing` in words; nothing without any."""
    shown = [freeze for freeze in freezes if freeze["seconds"]]
    if not shown:
        return ""
    longest = max(value for freeze in shown for value in freeze["seconds"].values())
    figures = "".join(_cost(freeze, longest, freeze["name"] if len(shown) > 1 else "") for freeze in shown)
    return f'<h3>What {doing} itself took</h3><div class="all-costs">{figures}</div>'


def _cost(freeze: dict[str, Any], longest: float, name: str) -> str:
    """Return the HTML figure of one intervention's seconds by part, a bar a part."""
    parts = {part: value for part, value in freeze["seconds"].items() if part != "total"}
    rows = "".join(
        f'<div class="cost"><span class="cost-name">{text(part.replace("_", " "))}</span><span class="track"><span '
        f'class="length" style="width:{max(0.4, 100 * value / longest):.2f}%;background:var(--{freeze["colour"]})">'
        f'</span></span><span class="cost-value">{seconds(value)}</span></div>'
        for part, value in parts.items()
    )
    whole = f"{text(name)}: " if name else ""
    often = f"in {freeze['events']} events" if freeze["events"] > 1 else "once"
    caption = f"{whole}{seconds(sum(parts.values()))} in all, {often}"
    return f'<figure class="costs"><figcaption>{caption}</figcaption>{rows}</figure>'


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
    """Return where a run's result comes from, flat and by readable names, ready to be a table."""
    entries = dict((run.result or {}).get("provenance") or {})
    versions = entries.pop("versions", None) or {}
    checkpoints, data = entries.pop("checkpoints", {}), entries.pop("data", {})
    entries |= {f"{role} checkpoint": value for role, value in checkpoints.items()}
    entries |= {f"{role} data": value for role, value in data.items()}
    entries |= {f"sum of {name}": value for name, value in (entries.pop("files", None) or {}).items()}
    if entries.get("seed") is not None:
        entries["seed"] = str(entries["seed"])  # a name, as one types it, and no amount
    entries.pop("pruned", None)
    entries["heads"] = run.heads_in_words
    evaluation = run.evaluation or {}
    entries["data fingerprint"] = (run.config.get("data") or {}).get("fingerprint")
    entries["evaluation windows"] = evaluation.get("windows_hash")
    entries |= {f"{name} version": version for name, version in versions.items()}
    return {key.replace("_", " "): value for key, value in entries.items()}


def _code(value: Any) -> Any:
    return Cell.code_of(value) if isinstance(value, str) else value
