"""The growing JSON-lines files of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saf.files import read_lines, to_json, write_atomically


class LineLog:
    """Appends one JSON object a line and hands every line to the system at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, record: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def keep_lines_(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSON-lines file with the lines that `keep` accepts; one cut short by a crash goes."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in read_lines(path) if keep(record)]
        write_atomically(path, "".join(kept).encode())
