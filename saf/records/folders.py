"""Folders that are on the disk whole or not at all, that one process holds, and whose files a manifest lists."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from saf.errors import CheckpointError, InputError, SafError
from saf.records.files import check_file, entries_hash, file_hash, flush, read_json, write_json

# Prefixes of hidden folders beside a folder of the same name; PENDING lies inside the folder its files are for.
TEMPORARY, DELETED, REPLACED, PENDING = ".writing-", ".deleted-", ".replaced-", ".pending"
_NO_ROOM = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the quota on the disk is used up",
    errno.EFBIG: "a file would exceed the limit on file sizes (`ulimit -f`)",
}

# --- whole or not at all


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; flush and rename it on success, remove it on any error.

    With `replace`, the folder that is there gives way at the rename. A process killed inside leaves only hidden folders
    beside `path`, which the next `new_folder` of the same name or `remove_leftovers_` clears. Where the disk is full,
    the error is an OSError that names the folder, whichever library met it.
    """
    temporary, replaced = (path.with_name(f"{prefix}{path.name}") for prefix in (TEMPORARY, REPLACED))
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in [*sorted(temporary.iterdir()), temporary]:
            flush(each)
        if replace and path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_replaced_(path)
        code = _no_room_code(error)
        if code and not getattr(error, "filename", None):
            raise OSError(code, _NO_ROOM[code], str(path)) from error
        raise
    flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files all go into `folder` on success, beside what is there, or none of them.

    A process killed in between leaves them whole in a hidden folder; `finish_files_` puts them in place.
    """
    if not folder.exists():
        with new_folder(folder) as temporary:
            yield temporary
        return
    finish_files_(folder)
    with new_folder(folder / PENDING) as temporary:
        yield temporary
    finish_files_(folder)


def finish_files_(folder: Path) -> None:
    """Put into `folder` the files that `new_files` had written whole when its process was killed."""
    pending = folder / PENDING
    if pending.is_dir():
        for path in sorted(pending.iterdir()):
            path.replace(folder / path.name)
        flush(folder)
        pending.rmdir()


def restore_replaced_(path: Path) -> None:
    """Put a folder back that a process killed between the two renames of a replacement had moved aside."""
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if replaced.is_dir() and not path.exists():
        replaced.rename(path)


def remove_folder_(path: Path) -> None:
    """Remove a folder so that no reader ever sees half of it under its own name."""
    doomed = path.with_name(f"{DELETED}{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers_(parent: Path) -> None:
    """Clear what killed writes and removals left in `parent`; only for the process that owns the folder."""
    for path in parent.glob(f"{REPLACED}*"):
        restore_replaced_(parent / path.name.removeprefix(REPLACED))
    for path in [path for prefix in (TEMPORARY, DELETED, REPLACED) for path in parent.glob(f"{prefix}*")]:
        shutil.rmtree(path, ignore_errors=True)


def no_room(error: BaseException) -> str | None:
    """Return why a file could not grow, for an error of a full disk or quota; None for any other."""
    return _NO_ROOM.get(_no_room_code(error) or 0)


def _no_room_code(error: BaseException) -> int | None:
    match = re.search(r"os error (\d+)", str(error))  # of safetensors, whose errors have no errno
    code = getattr(error, "errno", None) or (match and int(match[1]))
    return code if code in _NO_ROOM else None


# --- one process at a time


def lock_folder(folder: Path) -> AbstractContextManager[object]:
    """Return a lock on a folder, held from now until its context ends; InputError while another process holds it."""
    return _lock(folder / ".lock", InputError(f"another process trains in {folder}; wait for it, then resume"))


@contextmanager
def locked_beside(path: Path, busy: SafError) -> Iterator[None]:
    """Hold the name of a folder that may not be there yet; raise `busy` while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    with _lock(file, busy):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _lock(path: Path, busy: SafError) -> AbstractContextManager[object]:
    try:
        return FileLock(path).acquire(timeout=0)
    except Timeout:
        raise busy from None


# --- the manifest of a checkpoint

MANIFEST = "manifest.json"
SCHEMA = "saf.checkpoint/1"


def write_manifest(folder: Path, *, update: int, parent: str | None) -> str:
    """List every file of `folder` with its SHA-256 in manifest.json and return the checkpoint's hash.

    The hash is the SHA-256 of the manifest's other entries; `parent` is the hash of the checkpoint that the run
    started from.
    """
    files = {path.name: {"sha256": file_hash(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    entries = {"schema": SCHEMA, "update": update, "parent": parent, "files": files}
    entries["hash"] = entries_hash(entries)
    write_json(folder / MANIFEST, entries)
    return str(entries["hash"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError when it is missing or was changed."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    entries = read_json(path, error=CheckpointError)
    if entries.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} has schema {entries.get('schema')!r}; expected {SCHEMA!r}")
    if (recorded := entries.get("hash")) != (computed := entries_hash(entries)):
        raise CheckpointError(f"{path} is damaged: expected hash {recorded}, got {computed}")
    return entries


def verify(folder: Path, *, without: str | None = None) -> dict[str, Any]:
    """Check every file against its sum, but those whose names begin with `without`, and return the manifest.

    Raises:
        CheckpointError: A file is missing or differs; the message names it with the expected and actual sums.
    """
    entries = read_manifest(folder)
    for name, recorded in entries["files"].items():
        if without is None or not name.startswith(without):
            check_file(folder / name, size=recorded["bytes"], sha256=recorded["sha256"], error=CheckpointError)
    return entries
