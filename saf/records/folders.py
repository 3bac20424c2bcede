"""Folders that are either whole on disk or not there at all."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from saf.errors import CheckpointError, InputError
from saf.records.files import file_hash, flush, flush_folder

TEMPORARY = ".writing-"
DELETED = ".deleted-"
_NO_ROOM = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the quota on the disk is used up",
    errno.EFBIG: "a file would exceed the limit on file sizes (`ulimit -f`)",
}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; flush and rename it on success, remove it on any error.

    A process killed inside leaves only the temporary folder, which `remove_leftovers_` clears.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        flush_folder(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(path.parent)


def remove_folder_(path: Path) -> None:
    """Remove a folder so that no reader ever sees half of it under its own name."""
    doomed = path.with_name(f"{DELETED}{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers_(parent: Path) -> None:
    """Clear what killed writes and removals left in `parent`; for the run that owns the folder."""
    for path in [*parent.glob(f"{TEMPORARY}*"), *parent.glob(f"{DELETED}*")]:
        shutil.rmtree(path, ignore_errors=True)


def no_room(error: BaseException) -> str | None:
    """Return why a file could not grow, when an error, safetensors' own included, says that; None for any other."""
    told = re.search(r"os error (\d+)", str(error))
    number = getattr(error, "errno", None) or (told and int(told[1]))
    return _NO_ROOM.get(number or 0)


def lock_folder(folder: Path) -> IO[str]:
    """Return an open file that holds the folder until it is closed or the process ends, however it ends.

    Raises:
        InputError: Another process trains in this folder.
    """
    import fcntl

    file = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"another process trains in {folder}; wait for it or stop it, then resume") from None
    return file


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
