"""Readers of text: every file format, folders, datasets and Python's own text, as documents or records.

An error names the file, and the line where there are lines. JSON Lines and tables are streamed, one record at a time.
"""

import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saf.errors import DataError, SafError
from saf.records.paths import kind_of

Advance = Callable[[int], Any]
"""Called with the number of bytes read from disk since the last call."""
Records = Iterator[tuple[int, dict[str, Any]]]
"""Records of a file with their line numbers."""
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
TABLES = (*JSON_LINES, ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files with many documents; any other file is one document if it is text."""
_PROMISES_TEXT = {".txt", *TABLES} - {".json"}
_COMPRESSION = {".gz": "gzip", ".zst": "zstandard", ".xz": "xz"}
_EXPECTED = "a file of text, JSON Lines, .csv or .tsv (each also as .gz, .zst or .xz) or .parquet, or a folder of them"
_BOM = "\ufeff".encode()
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
_PARQUET_ROWS = 16  # at once; a row may be a book
# Tests are repetitive, `encodings` is tables of code pages, and the help topics are read as text instead.
_NOT_PROSE = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


class MissingField(DataError):
    """A record has no text under the name that was asked for."""


class NotText(DataError):
    """A file is not text: it is not UTF-8, or has NUL bytes."""


def bare_suffix(path: Path) -> str:
    """Return a file's suffix in lower case, without that of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSION else path).suffix.lower()


class _CountedFile(io.FileIO):
    """A file that reports how many bytes were read from disk."""

    def __init__(self, path: Path, advance: Advance):
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer) or 0
        self._advance(count)
        return count


def _package(name: str, reader: Path | str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{reader}: reading it needs the package {name}: pip install 'saf[data]'") from error


@contextmanager
def _open(path: Path, advance: Advance, where: Callable[[], str] = str) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed; raise DataError for one that is damaged or cut off."""
    suffix = path.suffix.lower()
    try:
        with io.BufferedReader(_CountedFile(path, advance), 2**17) as file:
            if suffix == ".gz":
                yield gzip.GzipFile(fileobj=file)
            elif suffix == ".xz":
                yield lzma.LZMAFile(file)  # noqa: SIM115 (what it reads is closed)
            elif suffix == ".zst":
                arrow = _package("pyarrow", path)
                # Unlike the readers of the zstandard package, Arrow's notices a file that is cut off.
                yield io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file), "zstd"), 2**17)
            else:
                yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if suffix not in _COMPRESSION or isinstance(error, PermissionError | FileNotFoundError):
            raise DataError(f"{path}: cannot be read ({error})") from error
        kind = _COMPRESSION[suffix]
        raise DataError(f"{path}: truncated or damaged {kind} file{where()} ({error}); copy it again") from error


def read_text(path: Path, advance: Advance = int, *, limit: int | None = None) -> str:
    """Return a UTF-8 text file as one string, without a byte order mark; of a long one some `limit` bytes.

    Raises:
        NotText: It is something else; the message names the byte.
    """
    with _open(path, advance) as file:
        data = file.read(-1 if limit is None else limit + 8).removeprefix(_BOM)
    if (at := data.find(b"\0")) >= 0:
        raise NotText(f"{path}: not text: a NUL byte at {at:,}; UTF-16 is to be converted to UTF-8")
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=limit is None or len(data) < limit)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise NotText(f"{path}: not UTF-8 at byte {error.start:,} (line {line}); convert it to UTF-8") from error


def read_lines(path: Path, advance: Advance = int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers, line ends included, without a byte order mark."""
    number = 0
    with _open(path, advance, lambda: f" after line {number}") as file:
        for line in file:
            number += 1
            try:
                yield number, (line.removeprefix(_BOM) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert it to UTF-8") from error


def read_json_lines(path: Path, advance: Advance = int) -> Records:
    """Yield the objects of a JSON Lines file; blank lines are passed over."""
    for number, line in read_lines(path, advance):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                shown = line.strip() if len(line) <= 160 else f"{line[:160]}..."
                raise DataError(
                    f"{path}, line {number}: not JSON ({error}); expected one JSON object a line, got {shown}"
                ) from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
            yield number, record


def read_json(path: Path, name: str, advance: Advance = int) -> Records | None:
    """Return the records of a .json file by its content: JSON Lines, an object or a list of objects; None for others.

    It is JSON Lines where its first two lines are objects, or its only line is one with the text field.
    """

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    lines = (line for _, line in read_lines(path) if line.strip())
    first, second = value(next(lines, "")), value(next(lines, ""))
    if isinstance(first, dict) and (isinstance(second, dict) or name in first):
        return read_json_lines(path, advance)
    whole = value(read_text(path, advance))
    records = [whole] if isinstance(whole, dict) and name in whole else whole
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        return enumerate(records, 1)
    return None


def read_table(path: Path, advance: Advance = int) -> Records:
    """Yield the rows of a .csv, or of an unquoted .tsv; the first line names the columns.

    Raises:
        DataError: A row has more or fewer fields than there are names, or a name stands there twice.
    """
    number, before = 1, csv.field_size_limit(2**31 - 1)

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in read_lines(path, advance):  # noqa: B007 (errors name it)
            yield line

    split = (line.rstrip("\r\n").split("\t") for line in lines() if line.strip())
    rows = split if bare_suffix(path) == ".tsv" else filter(None, csv.reader(lines(), strict=True))
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: columns must have different names, got {', '.join(map(repr, names))}")
        for row in rows:
            if len(row) != len(names):
                raise DataError(
                    f"{path}, line {number}: a row must have {len(names)} fields, got {len(row)}; quote fields with "
                    "separators or line ends in a .csv, or write JSON Lines"
                )
            yield number, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {number}: not a table ({error})") from error
    finally:
        csv.field_size_limit(before)


def _read_parquet(path: Path, advance: Advance, name: str) -> Records:
    """Yield the text column of a Parquet file, or all without it, a few rows at a time."""
    arrow, parquet = _package("pyarrow", path), _package("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            columns, rows = file.schema_arrow.names, 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[name] if name in columns else columns):
                advance(path.stat().st_size * batch.num_rows // file.metadata.num_rows)
                yield from enumerate(batch.to_pylist(), rows + 1)
                rows += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: truncated or damaged Parquet file ({error})") from error


def _text_of(record: dict[str, Any], place: str, name: str) -> str:
    """Return a record's text; raise DataError for none."""
    if name not in record:
        fields = ", ".join(sorted(map(str, record))) or "none"
        raise MissingField(f"{place}: no field {name!r}; fields found: {fields}; name one with text_field")
    if not isinstance(text := record[name], str):
        raise DataError(f"{place}: {name} must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON's escapes can spell half of a surrogate pair
        raise DataError(f"{place}: {name} must be Unicode, got half a surrogate pair at {error.start}") from error
    return text


def _read_file(path: Path, advance: Advance, name: str, limit: int | None = None) -> Iterator[str]:
    """Yield the documents of one file: of each record the field `name`; other text whole, or its first bytes."""
    suffix = bare_suffix(path)
    if suffix in JSON_LINES:
        records = read_json_lines(path, advance)
    elif suffix == ".json":
        records = read_json(path, name, advance)
    elif suffix in (".csv", ".tsv"):
        records = read_table(path, advance)
    else:
        records = _read_parquet(path, advance, name) if suffix == ".parquet" else None
    if records is None:
        yield read_text(path, advance, limit=limit)
    else:
        unit = "row" if suffix == ".parquet" else "line"
        yield from (_text_of(record, f"{path}, {unit} {number}", name) for number, record in records)


def is_blank(text: str) -> bool:
    """Return whether a text is nothing but white space."""
    return not text or text.isspace()


@dataclass(frozen=True)
class Source:
    """The documents that one name means."""

    name: str
    read: Callable[[Advance], Iterator[str]]
    size: int | None = None
    """Bytes on disk, where they are known."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Files that were not read, or not whole, with the reason; complete once all documents were read."""
    max_bytes: int | None = None
    """Where a longer document is cut."""

    def documents(self, advance: Advance = int) -> Iterator[str]:
        """Yield the documents; raise DataError when not one has text in it."""
        found = False
        for text in self.read(advance):
            found = found or not is_blank(text)
            if self.max_bytes is not None and len(data := text.encode()) > self.max_bytes:
                self.left_out[self.name] = f"a document was read to its first {self.max_bytes:,} bytes (max_bytes)"
                text = data[: self.max_bytes].decode(errors="ignore")
            yield text
        if not found:
            raise DataError(f"{self.name}: no text in it; every document is empty or there is none")


def resolve(name: str, *, text_field: str = "text", max_bytes: int | None = None) -> Source:
    """Return the source of a name: `python`, a file, a folder, a saved dataset, or `owner/name[:config[:split]]`.

    Args:
        name: the name.
        text_field: the field of records that is the text.
        max_bytes: where a longer document is cut; of a file of text no more is read.

    Raises:
        DataError: There is nothing of that name, or it is not text.
    """
    path = Path(name)
    if name == "python":
        return Source(name, lambda _: _python_documents(), max_bytes=max_bytes)
    if name and _is_saved_dataset(path):
        return Source(name, lambda _: _dataset_documents(name, _load_saved, text_field), max_bytes=max_bytes)
    if name and (path.exists() or path.is_symlink()):
        left_out: dict[str, str] = {}
        files = [path] if path.is_file() else list(_walk(path, text_field, left_out)) if path.is_dir() else []
        if not files:
            shown = "; ".join(f"{file}: {reason}" for file, reason in list(left_out.items())[:3])
            raise DataError(f"{path}: no text in it; expected {_EXPECTED}" + (f"; left out: {shown}" if shown else ""))

        def read(advance: Advance) -> Iterator[str]:
            """Yield the documents of one file after the other."""
            for file in files:
                try:
                    yield from _read_file(file, advance, text_field, max_bytes)
                except NotText as error:
                    # A folder's file may begin as text and turn out not to be.
                    if file == path or bare_suffix(file) in _PROMISES_TEXT:
                        raise
                    left_out[str(file)] = _reason(error, file)

        return Source(name, read, sum(file.stat().st_size for file in files), left_out, max_bytes)
    if _HUB_NAME.fullmatch(name) and bare_suffix(path) not in _PROMISES_TEXT:
        return Source(name, lambda _: _dataset_documents(name, _load_from_hub, text_field), max_bytes=max_bytes)
    raise DataError(f"{name or 'a source'}: no such file or folder; expected `python`, {_EXPECTED}, or OWNER/NAME")


def _walk(folder: Path, text_field: str, left_out: dict[str, str]) -> Iterator[Path]:
    """Yield the files below a folder that hold text, in sorted order; note every other one in `left_out`."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        left_out[str(folder)] = f"a folder that cannot be opened: {error.strerror}"
        return
    for path in paths:
        if reason := _why_left_out(path, text_field):
            left_out[str(path)] = reason
        elif path.is_dir():
            yield from _walk(path, text_field, left_out)
        else:
            yield path


def _why_left_out(path: Path, text_field: str) -> str | None:
    """Return why a file or folder inside a source is not read, or None; the beginning of files is looked at."""
    suffix = bare_suffix(path)
    try:
        if path.name.startswith("."):
            return "hidden"
        if path.is_dir():
            kind = "saved dataset" if _is_saved_dataset(path) else kind_of(path)
            return "a link to a folder" if path.is_symlink() else f"a {kind}, no text" if kind else None
        if not path.is_file():
            return "not a file that can be read to its end"
        if suffix in TABLES:
            next(_read_file(path, int, text_field), None)
        elif suffix not in _PROMISES_TEXT:
            read_text(path, limit=2**16)
    except (SafError, OSError) as error:
        if path.is_dir():
            return None
        if suffix in _PROMISES_TEXT and not isinstance(error, MissingField):
            raise
        return _reason(error, path)
    return None


def _reason(error: Exception, path: Path) -> str:
    return str(error).removeprefix(str(path)).lstrip(":, ")


def _is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder is what `save_to_disk` of `datasets` writes, with or without splits."""
    single = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return single or (folder / "dataset_dict.json").is_file()


def _load_saved(datasets: Any, name: str) -> Any:
    """Return what `save_to_disk` of `datasets` wrote; of one with several splits a split is to be named."""
    found = datasets.load_from_disk(name)
    if not isinstance(found, datasets.DatasetDict):
        return found
    if len(found) != 1:
        named = ", ".join(f"{name}/{split}" for split in found)
        raise DataError(f"{name}: a saved dataset of several splits; give one of them: {named}")
    return next(iter(found.values()))


def _load_from_hub(datasets: Any, name: str) -> Any:
    dataset, config, split = (*name.split(":"), "", "")[:3]
    return datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)


def _dataset_documents(name: str, load: Callable[[Any, str], Any], text_field: str) -> Iterator[str]:
    """Yield the text of each row of a dataset of the `datasets` package, downloaded as it is read."""
    package, row = _package("datasets", name), 0
    try:
        for row, record in enumerate(load(package, name), 1):
            yield _text_of(dict(record), f"{name}, row {row}", text_field)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name}: cannot be read as a dataset after {row} rows ({type(error).__name__}: {error}); check the path, "
            "or the name (owner/name:config:split) and the network"
        ) from error


def _python_documents() -> Iterator[str]:
    """Yield Python's help topics, then the modules of its library, in an order that mixes the packages."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in paths if not _NOT_PROSE & set(path.parts))
    for path in sorted(kept, key=lambda path: blake2b(path.as_posix().encode()).digest()):
        with tokenize.open(root / path) as file:
            yield file.read()
