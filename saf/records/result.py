"""The header that every result has: what it is, what was asked for, and where it comes from.

A result is one JSON object: a benchmark, an analysis, the end of a run, an evaluation, a comparison. All have the same
first entries, whatever else they hold:

    schema       "saf.result/2", for every kind
    kind         what the rest holds: "update", "one-head", "run", "evaluation", "comparison" and so on
    settings     what was asked for, by the names of the settings
    provenance   commit, source_hash, command, versions, device, date, and the hashes of what went in:
                 checkpoints {role: hash} and data {role: fingerprint}, empty where there were none; and, of what was
                 computed from files alone, files {role: SHA-256}
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import file_hash, read_json, to_json
from saf.records.provenance import command, commit, source_hash, versions

SCHEMA = "saf.result/2"
_WRITTEN = "a file that `saf bench`, `saf analyze`, `saf evaluate`, `saf compare` or a run wrote"


def result_header(
    kind: str,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    checkpoints: Mapping[str, str | None] | None = None,
    data: Mapping[str, str | None] | None = None,
    files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the header of a result that this process makes now; the result's own entries follow it.

    Asks git for the commit and reads all sources: call it once a result, not once a measurement.

    Args:
        kind: What the result is.
        settings: What was asked for; turned into plain JSON types.
        device: The name of the device that computed; None where no device did.
        checkpoints: Hashes of the checkpoints that the result is of or starts from, by their role ("model", "parent",
            "final"); those that are None are left out.
        data: Fingerprints of the prepared data, by what they served for ("train", "report", "calibration").
        files: The files that it was computed from, by their role; their SHA-256 are recorded.
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
    """Read a result; `advice` ends the message about a file that is none.

    Raises:
        InputError: The file is missing, not JSON, or not a result.
    """
    record = read_json(path, advice=advice)
    if record.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is not a result: its schema is {record.get('schema')!r}, expected {SCHEMA!r}; {advice}"
        )
    return record


def _known(hashes: Mapping[str, str | None] | None) -> dict[str, str]:
    return {role: value for role, value in (hashes or {}).items() if value is not None}
