"""The header of every result: one JSON object of a benchmark, an analysis, a run, an evaluation or a comparison.

schema       "saf.result/2", for every kind
kind         what the rest holds: "update", "one-head", "run", "evaluation", "comparison" and so on
settings     the settings by their names
provenance   commit, source_hash, command, versions, device, date, checkpoints {role: hash}, data {role:
             fingerprint}, and files {role: SHA-256} where files were the only input
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import file_hash, read_json, to_json
from saf.records.provenance import command, commit, source_hash, versions

SCHEMA = "saf.result/2"
_WRITTEN = "a file that `saf bench`, `saf evaluate`, `saf compare` or a run wrote"


def result_header(
    kind: str,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    checkpoints: Mapping[str, str | None] | None = None,
    data: Mapping[str, str | None] | None = None,
    files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the header of a result that this process computes now; the result's own entries follow it.

    It calls git and hashes all sources: call it once a result, not once a measurement. `checkpoints` are hashes by role
    ("model", "parent", "final"), `data` fingerprints by use ("train", "report", "calibration"); None is left out.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "settings": to_json(settings),
        "provenance": {
            "commit": commit(),
            "source_hash": source_hash(),
            "command": command(),
            "versions": versions(),
            "device": device,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "checkpoints": _known(checkpoints),
            "data": _known(data),
            **({"files": {role: file_hash(path) for role, path in files.items()}} if files else {}),
        },
    }


def read_result(path: Path, *, advice: str = f"give {_WRITTEN}") -> dict[str, Any]:
    """Read a result; raise InputError, ending with `advice`, for a file that is missing or is none."""
    record = read_json(path, advice=advice)
    if record.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is not a result: its schema is {record.get('schema')!r}, expected {SCHEMA!r}; {advice}"
        )
    return record


def _known(hashes: Mapping[str, str | None] | None) -> dict[str, str]:
    return {role: value for role, value in (hashes or {}).items() if value is not None}
