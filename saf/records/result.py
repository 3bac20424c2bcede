"""The header of every result: one JSON object of a benchmark, an analysis, a run, an evaluation or a comparison.

schema       "saf.result/2"
kind         the kind of the other entries: "update", "one-head", "run", "evaluation", "comparison" and so on
settings     the settings by their names
provenance   commit, source_hash, command, versions, device, date, checkpoints {role: hash}, data {use: fingerprint},
             and files {role: SHA-256} where files were the only input
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import file_hash, read_json, to_json
from saf.records.provenance import command, commit, source_hash, versions

SCHEMA = "saf.result/2"


def result_header(
    kind: str,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    checkpoints: Mapping[str, str | None] | None = None,
    data: Mapping[str, str | None] | None = None,
    files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the header of a result that this process computes; the result's own entries follow it.

    It calls git and hashes all sources: call it once a result, not once a measurement. `checkpoints` are hashes by role
    ("model", "parent", "final"), `data` fingerprints by use ("train", "report", "calibration"); None is left out.
    """
    provenance = {
        "commit": commit(),
        "source_hash": source_hash(),
        "command": command(),
        "versions": versions(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoints": {role: value for role, value in (checkpoints or {}).items() if value is not None},
        "data": {use: value for use, value in (data or {}).items() if value is not None},
    }
    if files:
        provenance["files"] = {role: file_hash(path) for role, path in files.items()}
    return {"schema": SCHEMA, "kind": kind, "settings": to_json(settings), "provenance": provenance}


def read_result(
    path: Path, *, advice: str = "give a file that `saf bench`, `saf evaluate`, `saf compare` or a run wrote"
) -> dict[str, Any]:
    """Read a result; raise InputError, ending with `advice`, for a file that is missing or is none."""
    record = read_json(path, advice=advice)
    if record.get("schema") != SCHEMA:
        found = record.get("schema")
        raise InputError(f"{path} is not a result: its schema is {found!r}, expected {SCHEMA!r}; {advice}")
    return record
