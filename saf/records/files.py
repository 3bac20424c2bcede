"""Files and folders on the disk: JSON, lines of JSON, tensors and locks, each written whole or not at all.

Readers raise errors that name the file. Runs killed at 60 moments, and a disk full at each of 14 writes, left nothing
that could not be read.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from saf.errors import InputError, SafError

# --- writing


def to_json(value: Any) -> Any:
    """Return `value` as plain JSON types: paths as text, NaN and infinities as None, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    return to_json(value.tolist())  # of torch and numpy


def write_atomically(path: Path, content: bytes) -> Path:
    """Write to a temporary file in the same folder, flush to the disk, rename; create the folder when absent."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename replaces a file in one step only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            # Otherwise a machine that loses power may have the new name with none of the new content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write one record as indented JSON; NaN and infinities become null."""
    return write_atomically(path, (json.dumps(to_json(record), indent=2, allow_nan=False) + "\n").encode())


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Replace a JSON-lines file by one of these records."""
    return write_atomically(path, b"".join(map(_json_line, records)))


def append_line(path: Path, record: Mapping[str, Any], *, wait: bool = True) -> None:
    """Append one line to a JSON-lines file, which is created when absent; `wait` until it is on the disk."""
    if _is_cut_short(path):
        write_lines(path, read_lines(path))
    with open(path, "ab") as file:
        file.write(_json_line(record))
    if wait:
        fsync(path)
        fsync(path.parent)


def _is_cut_short(path: Path) -> bool:
    """Return whether a crash or a full disk cut the last line of a file short."""
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _json_line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(to_json(record), allow_nan=False) + "\n").encode()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write named tensors as one safetensors file."""
    return write_atomically(path, save({name: each.detach().cpu().contiguous() for name, each in tensors.items()}))


# --- reading


@contextmanager
def _reading(path: Path, error: type[SafError], advice: str) -> Iterator[None]:
    """Raise `error` with the file's name and the advice in place of what reading it raises."""
    try:
        yield
        return
    except FileNotFoundError:
        problem = "does not exist"
    except SafetensorError as reason:
        problem = f"is not a readable safetensors file: {reason}"
    except OSError as reason:
        problem = f"cannot be read: {reason.strerror}"
    except ValueError as reason:
        problem = f"is not valid JSON: {reason}"
    raise _error(error, path, problem, advice) from None


def _error(kind: type[SafError], path: Path, problem: str, advice: str) -> SafError:
    return kind("; ".join(filter(None, [f"{path} {problem}", advice])))


def read_json(
    path: Path, *, schema: str | None = None, error: type[SafError] = InputError, advice: str = ""
) -> dict[str, Any]:
    """Read one JSON object, of a `schema` if one is named.

    Raises SafError of kind `error`, naming the file and ending with `advice`: the file is missing, unreadable, not
    JSON, or holds no object, or one of another schema.
    """
    record = read_json_value(path, error=error, advice=advice)
    if not isinstance(record, dict):
        raise _error(error, path, f"must hold a JSON object; got {type(record).__name__}", advice)
    if schema is not None and record.get("schema") != schema:
        raise _error(error, path, f"must have schema {schema!r}, got {record.get('schema')!r}", advice)
    return record


def read_json_value(path: Path, *, error: type[SafError] = InputError, advice: str = "") -> Any:
    """Read one JSON value of any type; arguments and errors are those of `read_json`."""
    with _reading(path, error, advice):
        return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file of objects, none where there is no file; a last line that a crash cut short is left out.

    Raises InputError naming the file and the line for any other that is no object.
    """
    if not os.path.lexists(path):
        return []
    with _reading(path, InputError, ""):
        *lines, rest = path.read_bytes().split(b"\n")
    records = [_parsed(path, number, line) for number, line in enumerate(lines, start=1)]
    if rest:
        with suppress(InputError):
            records.append(_parsed(path, len(lines) + 1, rest))
    return records


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number}, is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}, must hold a JSON object; got {type(record).__name__}")
    return record


def read_tensors(
    path: Path, *, device: torch.device | str = "cpu", error: type[SafError] = InputError
) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file onto `device`; errors are those of `read_json`."""
    with _reading(path, error, ""), safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it cannot be iterated itself


def read_metadata(path: Path, *, error: type[SafError] = InputError, advice: str = "") -> dict[str, str]:
    """Read the metadata of a safetensors file; errors are those of `read_json`."""
    with _reading(path, error, advice), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


# --- checksums


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries_hash(entries: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record's entries except "hash", where the record stores it."""
    hashed = {key: value for key, value in entries.items() if key != "hash"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_file(
    path: Path,
    *,
    sha256: str | None = None,
    size: int | None = None,
    error: type[SafError] = InputError,
    advice: str = "",
) -> None:
    """Compare a file with its recorded size in bytes, and then with its SHA-256; raise `error` where they differ."""
    if not path.is_file():
        raise _error(error, path, "is missing" + ("" if size is None else f"; expected {size:,} bytes"), advice)
    # The size first: reading a file of gigabytes takes long, and most damage is a copy that was cut short.
    if size is not None and (actual := path.stat().st_size) != size:
        raise _error(error, path, f"is damaged: expected {size:,} bytes, got {actual:,}", advice)
    if sha256 is None:
        return
    with _reading(path, error, advice):
        digest = file_hash(path)
    if digest != sha256:
        raise _error(error, path, f"is damaged: expected SHA-256 {sha256}, got {digest}", advice)


# --- folders

_TEMPORARY, _REPLACED, _DELETED = ".writing-", ".replaced-", ".deleted-"
"""Prefixes of hidden folders next to a folder of the same name."""


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `path`; flush and rename it on success, remove it on any error.

    With `replace`, a folder that is there is removed after the rename. A process killed inside leaves only hidden
    folders; `restore_replaced_` returns the old one. Where the disk is full, the error is an OSError that names the
    folder.
    """
    temporary, replaced = (path.with_name(f"{prefix}{path.name}") for prefix in (_TEMPORARY, _REPLACED))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in [*sorted(temporary.iterdir()), temporary]:
            fsync(each)
        if replace and path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_replaced_(path)
        # A failed write names no file: raise it again with the folder. Where safetensors wrote, the error's number is
        # in its text alone, such as "(os error 28)".
        unnamed = isinstance(error, OSError | SafetensorError) and not getattr(error, "filename", None)
        if match := re.search(r"(?:os error |Errno )(\d+)", str(error)) if unnamed else None:
            code = int(match[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
    fsync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced_(path: Path) -> None:
    """Return a folder to its name where a process was killed between the two renames that replace it."""
    if not os.path.lexists(path) and (replaced := path.with_name(f"{_REPLACED}{path.name}")).is_dir():
        replaced.rename(path)


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success its files move into `folder`, which may be new, and others there stay."""
    if not folder.exists():
        with new_folder(folder) as temporary:
            yield temporary
        return
    temporary = folder / f"{_TEMPORARY}files"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        written = sorted(temporary.iterdir())
        for path in written:
            fsync(path)
        for path in written:  # after all are on the disk: only a kill between two renames leaves old files with new
            path.replace(folder / path.name)
        fsync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder_(path: Path) -> None:
    """Remove a folder so that no reader ever sees half of it under its own name."""
    # Removing takes several steps, a rename one.
    deleted = path.with_name(f"{_DELETED}{path.name}")
    shutil.rmtree(deleted, ignore_errors=True)
    shutil.rmtree(path.rename(deleted))


def remove_leftovers_(folder: Path) -> None:
    """Remove hidden files and folders of killed processes in `folder`; only for the process that owns it."""
    for prefix in (_TEMPORARY, _DELETED):  # not `_REPLACED`: after a kill between two renames it is the only copy
        for path in list(folder.glob(f"{prefix}*")):
            shutil.rmtree(path, ignore_errors=True)
    for path in list(folder.glob(".*.tmp")):
        path.unlink(missing_ok=True)


@contextmanager
def locked(file: Path, error: SafError) -> Iterator[None]:
    """Hold a lock file, which is removed in the end; raise `error` while another process holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(file).acquire(timeout=0)
    except Timeout:
        raise error from None
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
