"""Folders that are either whole on disk or not there at all."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saf.files import flush, flush_folder

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
