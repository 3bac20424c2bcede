"""Does it matter which layers have the frozen heads? Updates with heads frozen in early layers, and in all alike."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import run
from saf.bench import Update, measure


def both(settings: Update, *, out=None) -> dict:
    """Measure the same rates with both placements; rows of the second name it in their model."""
    record = measure(replace(settings, placement="early"), out=out and out.with_stem(f"{out.stem}-early"))
    even = measure(replace(settings, placement="even"), out=out and out.with_stem(f"{out.stem}-even"))
    for row in even["rows"]:
        row["model"] += ", as many heads in every layer"
    return record | {"rows": record["rows"] + even["rows"]}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    run(Update, both, words, prog="placement")
    return 0


if __name__ == "__main__":
    sys.exit(main())
