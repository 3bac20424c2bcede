"""Whether a data folder is what was prepared: every file's SHA-256 and every token, checked once and then remembered.

What was found whole is remembered in the user's cache folder, so that a data folder may be read-only: the size, times
and inode of each file. A file of which all are as they were is not read again.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from saf.data.shards import FileInfo
from saf.errors import DataError, SafError
from saf.records.files import read_json, write_json

BLOCK_BYTES = 2**22
"""Read and hashed at once: enough that a call costs nothing beside its work."""
AT_REST = 2.0
"""Seconds since its last change after which a file is remembered: some file systems keep times in steps of two seconds,
and a change within the step of another would not show."""
AGAIN = "prepare it again"

Marks = dict[str, list[int]]
"""Size, modification and change time (ns), inode and device of each file, by name."""


def marks(folder: Path, names: Iterable[str]) -> Marks:
    """Return what identifies the state of each file without reading it; raise DataError for a missing one."""
    found = {}
    for name in names:
        path = folder / name
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} is missing or cannot be read ({error.strerror}); {AGAIN}") from None
        if not path.is_file():
            raise DataError(f"{path} is not a file; {AGAIN}")
        found[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    return found


def is_remembered(folder: Path, found: Marks) -> bool:
    """Say whether a folder was found whole before, in this very state."""
    try:
        return read_json(_memory(folder)).get("files") == found
    except (SafError, OSError, RuntimeError):
        return False


def remember(folder: Path, found: Marks) -> None:
    """Remember that a folder was found whole in this state, unless a file of it has only just changed.

    Where nothing can be written the folder is checked again when it is opened again, which only takes longer.
    """
    last = max(max(mark[1], mark[2]) for mark in found.values())
    if time.time_ns() - last < AT_REST * 1e9:
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: a path that leads back to itself
        write_json(_memory(folder), {"folder": str(folder.resolve()), "files": found})


def _memory(folder: Path) -> Path:
    """Return the file of the user's cache that tells of a folder; raise OSError where there is no home to keep it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise OSError(f"{cache} is no absolute path")
    return Path(cache) / "saf" / "data" / f"{sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def check_content(path: Path, info: FileInfo, *, dtype: np.dtype | None = None, vocab_size: int = 0) -> None:
    """Compare a file with what was recorded of it; of a shard, of type `dtype`, also every token with the vocabulary.

    Raises:
        DataError: The file differs, or a token is no id of the vocabulary; the message names file and position.
    """
    digest, position, outside = sha256(), 0, ""
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            if dtype is not None and not outside:
                outside = _outside(np.frombuffer(block, dtype, len(block) // dtype.itemsize), position, vocab_size)
                position += len(block) // dtype.itemsize
    if (found := digest.hexdigest()) != info.sha256:
        raise DataError(
            f"{path} is damaged: expected SHA-256 {info.sha256}, got {found}{outside and f' ({outside})'}; {AGAIN}"
        )
    if outside:
        raise DataError(f"{path}: {outside}; {AGAIN}")


def _outside(tokens: np.ndarray, position: int, vocab_size: int) -> str:
    """Return what the first token outside the vocabulary is and where, `position` being that of `tokens[0]`."""
    if not len(tokens) or tokens.max() < vocab_size:
        return ""
    first = int(np.argmax(tokens >= vocab_size))
    return f"token {tokens[first]:,} at position {position + first:,} is outside the vocabulary of {vocab_size:,} ids"
