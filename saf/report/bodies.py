"""What the document of results says about one record, whatever its kind."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saf.analysis import ANALYSES
from saf.records.paper import footnotes
from saf.records.table import Part, Table
from saf.report import anything
from saf.report.error_tables import error_tables
from saf.report.interventions import intervention_tables
from saf.report.kernels import attention_table, kernel_words
from saf.report.measured import groups_of, is_speeds
from saf.report.nanogpt import nanogpt_tables
from saf.report.protocol import protocol
from saf.report.speeds import UNFINISHED, bound_notes, caveats, left_out, memory_table, quoted_in, speed_table, ways

TITLES = {
    "update": "Updates: speed",
    "memory": "Updates: peak memory",
    "nanogpt": "Updates: beside nanoGPT",
    "prefill": "Prefill",
    "op": "One layer's attention",
    "calibration": "Freezing: seconds",
    "errors": "Numerical errors",
    "analysis": "Analyses",
}
"""Of the kinds of records, in their order."""
_TABLES: dict[str, Callable[[Mapping[str, Any]], list[Part]]] = {
    "calibration": intervention_tables,
    "errors": error_tables,
    "nanogpt": nanogpt_tables,
}


def body_of(record: Mapping[str, Any]) -> list[str]:
    """Return Markdown paragraphs: how it was measured, tables, what to know about them."""
    return [part.markdown() if isinstance(part, Table) else part for part in parts_of(record)]


def parts_of(record: Mapping[str, Any]) -> list[Part]:
    """Return the paragraphs, each table as such."""
    if is_speeds(record):
        return _speeds(record)
    if analysis := ANALYSES.get(str(record.get("kind"))):
        return analysis.tables(record)
    if tables := _TABLES.get(str(record.get("kind"))):
        return [*tables(record), *_left_out(record)]
    return _anything(record)


def _speeds(record: Mapping[str, Any]) -> list[Part]:
    groups = groups_of(record)
    parts: list[Part] = []
    if groups:
        parts.append(" ".join(filter(None, [protocol(record, groups), kernel_words(record)])))
    several = ways(groups)
    for way, chosen in several.items():
        parts += [f"**{way}**", speed_table(chosen)]
    if record["memory"]:
        parts += [_memory_words(record), memory_table(record)]
    if record["kernels"]:
        parts += ["**Attention kernels in one pass**", attention_table(record)]
    quotes = quoted_in(record, groups)
    notes = [f"Paper, {note}" for note in footnotes(quotes)] or ["The paper has no number at these shapes."]
    return [*parts, _list([*caveats(record, groups), *bound_notes(groups), *notes])]


def _memory_words(record: Mapping[str, Any]) -> str:
    kind = {"allocated": "what PyTorch's allocator handed out", "resident": "the process's resident set"}
    measured = kind[record["memory"][0]["kind"]]
    return f"Peak memory since the warm-up, one arm a process ({measured}). Baseline: the ordinary model."


def _anything(record: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    for name, table in anything.tables(record):
        parts += [f"**{name}**", table]
    return [*parts, *_left_out(record)]


def _left_out(record: Mapping[str, Any]) -> list[str]:
    notes = left_out(record)
    if record.get("finished") is False:
        notes.insert(0, UNFINISHED)
    return [_list(notes)] if notes else []


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
