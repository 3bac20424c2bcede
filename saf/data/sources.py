"""What a source name means, and the documents behind it: files, a dataset of the Hub, or Python's own text."""

import importlib
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saf.data.listing import DECLARED, is_saved_dataset, list_files, no_regular_file
from saf.data.readers import TABLES, Advance, MissingField, NotText, Options, bare_suffix, reader_for, text_field
from saf.data.utf8 import is_blank
from saf.errors import DataError
from saf.records.files import read_json, write_json

LEFT_OUT_FILE = "left_out.json"
EXPECTED = "a file of text, .jsonl, .csv or .tsv (each also as .gz or .zst) or .parquet, a folder"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
# Tests are repetitive, `encodings` is tables of code pages, and the topics are read as text instead.
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Source:
    """Say where documents come from: `read(advance)` yields them as UTF-8, `size` is their bytes on disk if known.

    `most_documents` is how many there can be at most, where the files tell without being read. `has_fields` tells that
    its records have names, one of which is the text's; `left_out` which files were not read, or not whole, and why,
    complete once all documents were read.
    """

    name: str
    read: Callable[[Advance], Iterator[bytes]]
    size: int | None = None
    most_documents: int | None = None
    facts: dict = field(default_factory=dict)
    has_fields: bool = False
    left_out: dict[str, str] = field(default_factory=dict)

    def documents(self, advance: Advance = lambda count: None) -> Iterator[bytes]:
        """Yield the documents; raise DataError when not one has text in it."""
        found = False
        for data in self.read(advance):
            found = found or not is_blank(data)
            yield data
        if not found:
            raise DataError(f"{self.name}: no text in it; every document is empty or there is none")


def resolve(name: str, options: Options | None = None) -> Source:
    """Turn a name into a source: `python`, a file, a folder, a saved dataset, or `owner/name[:config[:split]]`.

    Raises DataError when there is nothing of that name, or it is not text.
    """
    options = options or Options()
    if name == "python":
        version = ".".join(map(str, sys.version_info[:3]))
        return Source(name, lambda advance: python_documents(), facts={"python": version})
    if not name:
        raise DataError(f"the name of a source is empty; expected `python`, {EXPECTED} or OWNER/NAME")
    path = Path(name)
    if path.is_dir():
        return _saved_dataset(path, options) if is_saved_dataset(path) else _folder(path, options)
    if path.exists() or path.is_symlink():
        if kind := no_regular_file(path):
            raise DataError(f"{path}: {kind}, not a file of text; expected {EXPECTED}")
        return _files(name, [path], {}, options, strict=True)
    if _HUB_NAME.fullmatch(name) and bare_suffix(path) not in DECLARED:
        dataset, _, rest = name.partition(":")
        config, _, split = rest.partition(":")
        hub = partial(stream_hub, dataset, config or None, split or "train", options)
        return Source(name, lambda advance: hub(), has_fields=True, left_out=options.left_out)
    raise DataError(f"{name}: no such file or folder; expected `python`, {EXPECTED} or OWNER/NAME")


def write_left_out(sources: Sequence[Source], folder: Path) -> Path | None:
    """Write what was not read of the sources as a file of a data folder and return it; None when all was."""
    rows = [
        {"source": source.name, "file": file, "reason": reason}
        for source in sources
        for file, reason in sorted(source.left_out.items())
    ]
    return write_json(folder / LEFT_OUT_FILE, {"left_out": rows}) if rows else None


def read_left_out(folder: Path) -> list[dict[str, str]]:
    """Return what was not read of a data folder's sources: `source`, `file` and `reason` of each."""
    path = folder / LEFT_OUT_FILE
    if not path.exists():
        return []
    rows = read_json(path, error=DataError).get("left_out")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"file", "reason"} <= row.keys() for row in rows
    ):
        raise DataError(f"{path}: not a list of what was left out")
    return rows


def _folder(folder: Path, options: Options) -> Source:
    """Return a source of the readable files below a folder; raise DataError when there are none."""
    files = list_files(folder, options)
    if not files:
        left_out = options.left_out
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        told = f"{len(left_out)} files or folders left out{shown and f' ({shown})'}"
        raise DataError(f"{folder}: no text in it, {told}; expected {EXPECTED}")
    return _files(str(folder), files, {"files": len(files)}, options, strict=False)


def _files(name: str, files: list[Path], facts: dict, options: Options, *, strict: bool) -> Source:
    """Return a source that reads files one after the other."""

    def read(advance: Advance) -> Iterator[bytes]:
        """Yield the documents of all files in order, and list what turns out not to be text."""
        for path in files:
            try:
                yield from reader_for(path)(path, advance, options)
            except NotText as error:
                # A folder's file may begin as text and turn out not to be.
                if strict or bare_suffix(path) in DECLARED:
                    raise
                options.left_out[str(path)] = str(error).removeprefix(f"{path}: ")

    tables = any(bare_suffix(path) in TABLES for path in files)
    return Source(
        name,
        read,
        size=sum(path.stat().st_size for path in files),
        most_documents=None if tables else len(files),
        facts=facts,
        has_fields=tables,
        left_out=options.left_out,
    )


def _saved_dataset(folder: Path, options: Options) -> Source:
    """Return what `save_to_disk` of `datasets` wrote; of one with several splits a split is to be named."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent for path in folder.glob("*/state.json"))
        if len(splits) != 1:
            named = ", ".join(map(str, splits)) or "none"
            raise DataError(f"{folder}: a saved dataset of several splits; give one of them: {named}")
        folder = splits[0]

    def read(advance: Advance) -> Iterator[bytes]:
        """Yield the text of every row of the saved dataset."""
        with _datasets(str(folder)) as package:
            rows = package.load_from_disk(str(folder))
            if options.text_field not in rows.column_names:
                columns = ", ".join(rows.column_names)
                missing = f"{folder}: no column {options.text_field!r}; columns found: {columns}"
                raise MissingField(f"{missing}; name one with text_field")
            for number, row in enumerate(rows.select_columns([options.text_field]), 1):
                yield options.fitted(text_field(row, f"{folder}, row {number}", options.text_field), folder)

    return Source(str(folder), read, has_fields=True, left_out=options.left_out)


@contextmanager
def _datasets(name: str) -> Iterator[Any]:
    """Import `datasets` and name what fails in it; raise DataError when it is missing."""
    try:
        package = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name}: reading a dataset needs a package: pip install datasets") from error
    try:
        yield package
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: cannot be read as a dataset ({type(error).__name__}: {error})") from error


def stream_hub(name: str, config: str | None, split: str, options: Options) -> Iterator[bytes]:
    """Yield the text of each row of a dataset, downloading as it goes.

    Raises DataError when `datasets` is missing, the dataset cannot be reached, or a row has no text.
    """
    row = 0
    with _datasets(name) as package:
        try:
            for row, record in enumerate(package.load_dataset(name, config, split=split, streaming=True), 1):
                text = text_field(dict(record), f"{name} ({split}), row {row}", options.text_field)
                yield options.fitted(text, name)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{name}: no such file or folder here, and as a Hugging Face dataset it failed after {row} rows "
                f"({type(error).__name__}: {error}); check the name (owner/name:config:split) and the network"
            ) from error


def python_files() -> list[Path]:
    """Return the standard library's source files, in an order that mixes the packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in paths if not _LEFT_OUT & set(path.parts)]
    return [root / path for path in sorted(kept, key=lambda path: blake2b(path.as_posix().encode()).digest())]


def python_documents() -> Iterator[bytes]:
    """Yield the help topics, then the modules, a document each.

    Raises DataError when the installation carries no readable source.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name].encode() for name in sorted(topics))
    files = python_files()
    if not files:
        raise DataError("this Python installation carries no source files; give text files instead")
    for path in files:
        with tokenize.open(path) as file:
            text = file.read()
        yield text.encode()
