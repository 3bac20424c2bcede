"""What the document of results says about one analysis: tables with the conditions of their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from saf.records.paper import Source
from saf.records.table import Table


@dataclass(frozen=True)
class Analysis:
    """Hold a table with the conditions of its numbers, and where the paper has the like."""

    title: str
    conditions: str
    tables: Mapping[str, Table]
    """By caption; the first one needs none."""
    source: Source | None
