"""What the document of results says about one record, whatever its kind."""

from collections.abc import Mapping
from typing import Any

from saf.analysis import ANALYSES
from saf.bench.harness.recorder import unmeasured
from saf.bench.kinds import KINDS
from saf.records.table import Part, Table
from saf.report import anything

TITLES = {
    "update": KINDS["update"].title,
    "memory": "Updates: peak memory",
    **{name: kind.title for name, kind in KINDS.items()},
    "analysis": "Analyses",
}
"""Of the kinds of records, in their order."""


def body_of(record: Mapping[str, Any]) -> list[str]:
    """Return Markdown paragraphs: how it was measured, tables, what to know about them."""
    return [part.markdown() if isinstance(part, Table) else part for part in parts_of(record)]


def parts_of(record: Mapping[str, Any]) -> list[Part]:
    """Return the paragraphs, each table as such."""
    name = str(record.get("kind"))
    if name in ANALYSES:
        return ANALYSES[name].tables(record)
    if name in KINDS:
        return KINDS[name].tables(record)
    return [*(table.titled(title) for title, table in anything.tables(record)), *unmeasured(record)]
