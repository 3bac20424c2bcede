"""Read text from files, folders, datasets and Python's own library, as documents; files of records, one a line.

An error names the file, and the line where there are lines. Records are streamed. Parquet, folders saved by `datasets`
and the Hugging Face hub are read by that package.
"""

import csv
import glob
import gzip
import importlib
import io
import json
import lzma
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saf.errors import DataError

Records = Iterator[tuple[int, dict[str, Any]]]
"""Records of a file with their line or row numbers."""
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
# Files of these suffixes must be readable. Any other file of a folder may turn out to be no text, and is then skipped.
_TEXT_SUFFIXES = {".txt", *JSON_LINES, ".csv", ".tsv", ".parquet"}
_COMPRESSED = (".gz", ".zst", ".xz")
_EXPECTED = "a file of text, JSON Lines, .csv or .tsv (each also as .gz, .zst or .xz) or .parquet, or a folder of them"
_BOM = "\ufeff".encode()
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
# Tests are repetitive, `encodings` is tables of code pages, and the help topics are read as text instead.
_NOT_PROSE = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


class MissingFieldError(DataError):
    """A record has no field of the name that holds the text."""


def bare_suffix(path: Path) -> str:
    """Return a file's suffix in lower case, without that of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


# --- files


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed; turn faults of the file into DataError."""
    suffix = path.suffix.lower()
    try:
        with open(path, "rb", buffering=2**17) as file:
            if suffix == ".gz":
                yield gzip.GzipFile(fileobj=file)
            elif suffix == ".xz":
                yield lzma.LZMAFile(file)  # noqa: SIM115 (the file that it reads is closed)
            elif suffix == ".zst":
                arrow = _package("pyarrow", path)
                # Unlike the readers of the zstandard package, Arrow's notices a truncated file.
                yield io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file), "zstd"), 2**17)
            else:
                yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        damage = f"truncated or damaged {suffix} file" if suffix in _COMPRESSED else "cannot be read"
        raise DataError(f"{path}: {damage} ({error})") from error


def _package(name: str, reader: Path | str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{reader}: reading it needs the package {name}: pip install 'saf[data]'") from error


def read_text(path: Path) -> str:
    """Read a UTF-8 text file as one string, without a byte order mark."""
    with _open(path) as file:
        data = file.read().removeprefix(_BOM)
    if (at := data.find(b"\0")) >= 0:
        raise DataError(f"{path}: not text: a NUL byte at {at:,}; convert UTF-16 to UTF-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: not UTF-8 at byte {error.start:,} (line {line}); convert it to UTF-8") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers, line ends included, without a byte order mark."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, (line.removeprefix(_BOM) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert it to UTF-8") from error


def read_records(path: Path, field: str) -> Records | None:
    """Read the records of a file by its suffix; None for one of other text.

    A .json file may be JSON Lines, a list of objects, or an object with `field`; anything else in it is other text.
    """
    match bare_suffix(path):
        case ".parquet":
            return enumerate(_rows("parquet", str(path), data_files=glob.escape(str(path))), 1)
        case ".json":
            return _read_json(path, field)
        case ".csv":
            return _read_table(path, strict=True)
        case ".tsv":
            return _read_table(path, delimiter="\t", quoting=csv.QUOTE_NONE)
        case suffix:
            return read_json_lines(path) if suffix in JSON_LINES else None


def read_json_lines(path: Path) -> Records:
    """Yield the objects of a JSON Lines file; blank lines are skipped."""
    for number, line in read_lines(path):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not JSON ({error}), got {line.strip()[:80]}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
            yield number, record


def _read_json(path: Path, field: str) -> Records | None:
    try:
        whole = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return read_json_lines(path)
    records = whole if isinstance(whole, list) else [whole]
    is_text = not records or not all(isinstance(record, dict) and field in record for record in records)
    return None if is_text else enumerate(records, 1)


def _read_table(path: Path, **dialect: Any) -> Records:
    """Yield the rows of a table, whose first line names the columns; raise DataError for an uneven row."""
    csv.field_size_limit(2**31 - 1)  # a field may be a book
    reader = csv.reader((line for _, line in read_lines(path)), **dialect)
    rows = filter(None, reader)  # without blank lines
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: columns must have different names, got {', '.join(names)}")
        for row in rows:
            if len(row) != len(names):
                fields = f"a row must have {len(names)} fields, got {len(row)}"
                raise DataError(f"{path}, line {reader.line_num}: {fields}")
            yield reader.line_num, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a table ({error})") from error


def _rows(path: str, place: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset, saved or downloaded as it is read; DataError in place of what `datasets` raises."""
    package, row = _package("datasets", place), 0
    try:
        if "data_files" not in options and Path(path).exists():
            dataset = package.load_from_disk(path)
            if isinstance(dataset, package.DatasetDict):
                splits = ", ".join(f"{path}/{split}" for split in dataset)
                raise DataError(f"{path}: a saved dataset of several splits; give one of them: {splits}")
        else:
            dataset = package.load_dataset(path, streaming=True, **{"split": "train", **options})
        for record in dataset:
            row += 1
            yield dict(record)
    except DataError:
        raise
    except Exception as error:
        problem = f"{place}: cannot be read as a dataset after {row} rows ({type(error).__name__}: {error})"
        raise DataError(f"{problem}; check its name (OWNER/NAME:CONFIG:SPLIT) and the network") from error


def _documents(records: Records, place: str, unit: str, field: str) -> Iterator[str]:
    """Yield the text of each record."""
    for number, record in records:
        at = f"{place}, {unit} {number}"
        if field not in record:
            fields = ", ".join(sorted(map(str, record))) or "none"
            raise MissingFieldError(f"{at}: no field {field!r}; fields found: {fields}; name one with --text-field")
        if not isinstance(text := record[field], str):
            raise DataError(f"{at}: {field} must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON's escapes can spell half of a surrogate pair
            raise DataError(f"{at}: {field} must be Unicode, got half a surrogate pair at {error.start}") from error
        yield text


# --- sources


class Source:
    """The documents of one named source.

    A name is `python`, a file, a folder of files, a folder saved by `datasets`, or OWNER/NAME[:CONFIG[:SPLIT]] of a
    dataset on the hub. Raises DataError when there is nothing of that name.
    """

    def __init__(self, name: str, *, text_field: str = "text"):
        self.name, self.text_field = name, text_field
        self.left_out: dict[str, str] = {}
        """Files of a folder that are no text, with the reason; complete once all documents were read."""
        self._files: list[Path] = []
        path = Path(name)
        if name == "python":
            self._read = _python_documents
        elif name and any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            self._read = self._dataset_documents
        elif name and path.exists():
            self._read, self._files = self._files_documents, _files(path)
        elif _HUB_NAME.fullmatch(name) and bare_suffix(path) not in _TEXT_SUFFIXES:
            self._read = self._dataset_documents
        else:
            raise DataError(f"{name or 'a source'}: no such file or folder; expected `python`, {_EXPECTED}, OWNER/NAME")

    @property
    def size(self) -> int | None:
        """Bytes of the files on disk; None for other sources."""
        return sum(file.stat().st_size for file in self._files) if self._files else None

    def documents(self) -> Iterator[str]:
        """Yield the documents; raise DataError when not one of them has text."""
        any_text = False
        for text in self._read():
            any_text = any_text or bool(text.strip())
            yield text
        if not any_text:
            reasons = "".join(f"; {file}: {reason}" for file, reason in list(self.left_out.items())[:3])
            raise DataError(f"{self.name}: no text in it; expected {_EXPECTED}{reasons}")

    def _files_documents(self) -> Iterator[str]:
        """Yield the documents of each file; a folder's file that turns out to be no text is skipped."""
        for file in self._files:
            begun = False
            try:
                for text in self._file_documents(file):
                    begun = True
                    yield text
            except DataError as error:
                must_be_text = bare_suffix(file) in _TEXT_SUFFIXES and not isinstance(error, MissingFieldError)
                if begun or must_be_text or file == Path(self.name):
                    raise
                self.left_out[str(file)] = str(error).removeprefix(str(file)).lstrip(":, ")

    def _file_documents(self, path: Path) -> Iterator[str]:
        """Yield the text of each record of a file, or the whole of other text."""
        if (records := read_records(path, self.text_field)) is None:
            yield read_text(path)
        else:
            unit = "row" if bare_suffix(path) == ".parquet" else "line"
            yield from _documents(records, str(path), unit, self.text_field)

    def _dataset_documents(self) -> Iterator[str]:
        path, config, split = (*self.name.split(":"), "", "")[:3]
        options = {"name": config or None, "split": split or "train"}
        rows = _rows(self.name if Path(self.name).exists() else path, self.name, **options)
        yield from _documents(enumerate(rows, 1), self.name, "row", self.text_field)


def _files(path: Path) -> list[Path]:
    """The file, or the files below a folder, sorted, without hidden ones."""
    if not path.is_dir():
        return [path]
    below = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def _python_documents() -> Iterator[str]:
    """Yield Python's help topics, then the modules of its library, in an order that mixes the packages."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    prose = (path for path in paths if not _NOT_PROSE & set(path.parts))
    for path in sorted(prose, key=lambda path: blake2b(path.as_posix().encode()).digest()):
        with tokenize.open(root / path) as file:
            yield file.read()
