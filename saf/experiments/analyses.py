"""The analyses beside the package, as this engine uses them; without a checkout there are none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saf.records.table import Part, Table

Record = Mapping[str, Any]

ANALYSES: dict[str, Any] = {}
"""Modules by name."""
draw: Callable[[Record], str]
"""Returns the SVG of a record."""
analyze: Callable[[Sequence[str]], int]
"""Runs an analysis by the words of its command, and returns the exit code."""
try:
    from experiments.analyses import ANALYSES, svg as draw  # noqa: F401, I001
    from experiments.analyses.__main__ import main as analyze  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("experiments", "matplotlib", "pandas"):
        raise


def tables(record: Record) -> list[Part]:
    """Return the paragraphs and tables of an analysis's record."""
    return [
        part
        if isinstance(part, str)
        else Table.of(part.attrs["title"], list(part.columns), part.to_numpy().tolist(), part.attrs["notes"])
        for part in ANALYSES[record["kind"]].tables(record)
    ]
