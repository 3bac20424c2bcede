"""The files of a folder that are read as text, and what of it is not, each with its reason."""

import os
import stat
from pathlib import Path

from saf.data.readers import TABLES, MissingField, NotText, Options, bare_suffix, reader_for, sniff
from saf.errors import DataError, SafError
from saf.records.paths import kind_of

DECLARED = {".txt", *TABLES} - {".json"}
"""Suffixes that promise text: a file of one that cannot be read is an error, not something to pass over."""
_KINDS = {
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISDIR: "a folder",
}


def no_regular_file(path: Path) -> str | None:
    """Return what a path is that is not a file to be read to its end; None for a file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), None)


def is_saved_dataset(folder: Path) -> bool:
    """Say whether a folder is what `save_to_disk` of `datasets` writes, with or without splits."""
    single = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return single or (folder / "dataset_dict.json").is_file()


def list_files(folder: Path, options: Options) -> list[Path]:
    """Return a folder's files that hold text, sorted; note every other one in `options.left_out`.

    A table (JSONL, CSV, Parquet) is read if its first record has the text field, any other file if its beginning is
    UTF-8 without NUL bytes. Hidden ones are not read, nor folders that this project wrote, nor links to folders.

    Raises:
        DataError: when a file whose suffix promises text is damaged.
    """
    files = []

    def unreadable(error: OSError):
        options.left_out[str(error.filename)] = f"a folder that cannot be opened: {error.strerror}"

    for place, folders, names in os.walk(folder, onerror=unreadable):
        for name in list(folders):
            if reason := _folder_left_out(Path(place, name)):
                options.left_out[str(Path(place, name))] = reason
                folders.remove(name)
        for name in names:
            path = Path(place, name)
            if reason := _file_left_out(path, options):
                options.left_out[str(path)] = reason
            else:
                files.append(path)
    return sorted(files)


def _folder_left_out(folder: Path) -> str | None:
    """Return why a folder inside a source is not read, or None."""
    if folder.name.startswith("."):
        return "a hidden folder"
    if folder.is_symlink():
        return "a link to a folder"
    if is_saved_dataset(folder):
        return "a saved dataset; give it as a source of its own"
    try:
        kind = kind_of(folder)
    except (SafError, OSError):
        kind = None
    return f"written by saf ({kind})" if kind else None


def _file_left_out(path: Path, options: Options) -> str | None:
    """Return why a file of a folder is not read as text, or None; its beginning is looked at."""
    if path.name.startswith("."):
        return "hidden"
    if reason := no_regular_file(path):
        return reason
    suffix = bare_suffix(path)
    if suffix in TABLES:
        try:
            next(reader_for(path)(path, lambda count: None, options), None)
        except (MissingField, NotText) as error:
            if isinstance(error, NotText) and suffix in DECLARED:
                raise
            return str(error).removeprefix(f"{path}").lstrip(":, ")
    elif suffix not in DECLARED:
        try:
            return sniff(path)
        except DataError as error:
            return str(error).removeprefix(f"{path}: ")
    return None
