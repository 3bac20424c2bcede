"""The list of a checkpoint's files with their SHA-256 sums."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from saf.errors import CheckpointError
from saf.files import file_hash

MANIFEST = "manifest.json"
SCHEMA = "saf.checkpoint/1"


def write_manifest(folder: Path, *, update: int, parent: str | None) -> str:
    """List every file of `folder` in its manifest.json and return the checkpoint's hash.

    The hash is the SHA-256 of the manifest's other entries; `parent` is the hash of the checkpoint that the run
    started from.
    """
    files = {path.name: {"sha256": file_hash(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    entries = {"schema": SCHEMA, "update": update, "parent": parent, "files": files}
    entries["hash"] = entries_hash(entries)
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    return str(entries["hash"])


def entries_hash(entries: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    kept = {key: value for key, value in entries.items() if key != "hash"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError when it is missing or was changed."""
    path = folder / MANIFEST
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        recorded, computed = entries["hash"], entries_hash(entries)
        known = entries["schema"] == SCHEMA
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    if not known:
        raise CheckpointError(f"{path} has schema {entries['schema']!r}; expected {SCHEMA!r}")
    if recorded != computed:
        raise CheckpointError(f"{path} is damaged: expected hash {recorded}, got {computed}")
    return entries


def verify(folder: Path, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Check every file but those `without` against its sum and return the manifest.

    Raises:
        CheckpointError: A file is missing or differs; the message names it with the expected and actual sums.
    """
    entries = read_manifest(folder)
    for name, recorded in entries["files"].items():
        if name in without:
            continue
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the manifest expects {recorded['bytes']:,} bytes")
        if (actual := file_hash(path)) != recorded["sha256"]:
            raise CheckpointError(f"{path} is damaged: expected SHA-256 {recorded['sha256']}, got {actual}")
    return entries
