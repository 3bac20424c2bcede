"""One process a run folder."""

from pathlib import Path
from typing import IO

from saf.errors import InputError


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
