"""A folder that appears whole or not at all: written beside its place, synced, then renamed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saf.data.index import INDEX_FILE
from saf.errors import DataError
from saf.records.files import flush, flush_folder


def check_target(out: Path, *, overwrite: bool):
    """Raise DataError when a folder must not be written: finished already, or holding something else."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if (out / INDEX_FILE).is_file():
        if not overwrite:
            raise DataError(f"{out}: a finished data folder is there; choose another, or pass overwrite")
    elif out.exists():
        raise DataError(f"{out}: something that is not a data folder is there; choose another place")


@contextmanager
def new_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder to fill; on leaving without an error it becomes `out`.

    The temporary folder `.NAME.partial` lies beside `out`. A failure removes it; after a kill the next run does.
    Raises DataError as `check_target` does, and while another process is writing the same folder.
    """
    out = out.resolve()
    partial = out.with_name(f".{out.name}.partial")
    replaced = out.with_name(f".{out.name}.replaced")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        if replaced.is_dir() and not out.exists():
            # A kill between the two renames below: the old folder is still the valid one.
            replaced.rename(out)
        check_target(out, overwrite=overwrite)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            flush_folder(partial)
            shutil.rmtree(replaced, ignore_errors=True)
            if (out / INDEX_FILE).is_file():
                out.rename(replaced)
            partial.rename(out)
            flush(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    path = out.with_name(f".{out.name}.lock")
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner before may have removed the file after it was opened here.
            held = path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino
        except OSError:
            held = False
        if not held:
            raise DataError(f"{out}: another process is preparing this folder; wait for it or choose another")
        try:
            yield
        finally:
            path.unlink()
