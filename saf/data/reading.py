"""`Source` reads documents of files, folders, datasets and Python's own library; `read_records`, the records of a file.

Files are streamed, and an error names file and line. `datasets` reads Parquet, saved folders and the Hugging Face hub,
but no text, JSON Lines or tables: version 5.2 takes texts such as "2020-01-01" for times, and fails where another field
changes its type after the first block. For 123 MB of JSON Lines it takes 1.5 s and 438 MB, this file 0.5 s and 231 MB.
"""

import csv
import glob
import gzip
import io
import json
import lzma
import re
import sysconfig
import tokenize
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from saf.errors import DataError

Records = Iterator[tuple[str, dict[str, Any]]]
"""Records of a file, each with its place: "line 3", or "row 3" of Parquet and datasets."""
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
# A folder's files of these suffixes must be readable. Others that prove not to be text are skipped.
_TEXT_SUFFIXES = {".txt", *JSON_LINES, ".csv", ".tsv", ".parquet"}
_COMPRESSED = (".gz", ".zst", ".xz")
_EXPECTED = "a file of text, JSON Lines, .csv or .tsv (each also as .gz, .zst or .xz) or .parquet, or a folder of them"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
# Tests are repetitive, `encodings` is tables of code pages, and the help topics are read as text instead.
_NOT_PROSE = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


class MissingFieldError(DataError):
    """A record has no field of the name that should hold its text."""


# --- sources of documents


class Source:
    """The documents of one named source.

    A name is `python`, a file, a folder of files, a folder saved by `datasets`, or OWNER/NAME[:CONFIG[:SPLIT]] of a
    dataset on the hub. Raises DataError when there is nothing of that name.
    """

    def __init__(self, name: str, *, text_field: str = "text"):
        self.name, self.text_field, path = name, text_field, Path(name)
        self.left_out: dict[str, str] = {}
        """Files of a folder that are no text, with the reason; complete once all documents were read."""
        saved = any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))
        on_hub = not path.exists() and _HUB_NAME.fullmatch(name) and bare_suffix(path) not in _TEXT_SUFFIXES
        if name == "python":
            self._read = _python_documents
        elif saved or on_hub:
            self._read = lambda: _texts(_read_dataset(name), name, text_field)
        elif name and path.exists():
            self._read = self._file_documents
        else:
            raise DataError(f"{name or 'a source'}: no such file or folder; expected `python`, {_EXPECTED}, OWNER/NAME")

    def documents(self) -> Iterator[str]:
        """Yield the documents; raise DataError when not one of them has text."""
        any_text = False
        for text in self._read():
            any_text = any_text or bool(text.strip())
            yield text
        if not any_text:
            reasons = "".join(f"; {file}: {reason}" for file, reason in list(self.left_out.items())[:3])
            raise DataError(f"{self.name}: no text in it; expected {_EXPECTED}{reasons}")

    def _file_documents(self) -> Iterator[str]:
        """Yield the documents of the file, or of every visible file below the folder, in the order of their paths."""
        root = Path(self.name)
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            hidden = any(part[0] == "." for part in file.relative_to(root).parts)
            if file != root and (hidden or not file.is_file()):  # a file named by the user may be hidden, or a pipe
                continue
            begun = False
            try:
                records = read_records(file, self.text_field)
                for text in [read_text(file)] if records is None else _texts(records, str(file), self.text_field):
                    begun = True
                    yield text
            except DataError as error:
                must_be_text = bare_suffix(file) in _TEXT_SUFFIXES and not isinstance(error, MissingFieldError)
                if begun or must_be_text or file == root:  # begun: its first documents are in the corpus already
                    raise
                self.left_out[str(file)] = str(error).removeprefix(str(file)).lstrip(":, ")


def _texts(records: Records, source: str, field: str) -> Iterator[str]:
    for place, record in records:
        if field not in record:
            fields = ", ".join(sorted(map(str, record))) or "none"
            missing = f"no field {field!r}; fields found: {fields}; name one with --text-field"
            raise MissingFieldError(f"{source}, {place}: {missing}")
        if not isinstance(text := record[field], str):
            raise DataError(f"{source}, {place}: {field} must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON's escapes can spell half of a surrogate pair
            half = f"got half a surrogate pair at {error.start}"
            raise DataError(f"{source}, {place}: {field} must be Unicode, {half}") from error
        yield text


def _python_documents() -> Iterator[str]:
    """Yield Python's help topics, then the modules of its library, in an order that mixes the packages."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    prose = (path for path in paths if not _NOT_PROSE & set(path.parts))
    # `max_bytes` and the tokenizer's sample take what comes first, which should not be one package.
    for path in sorted(prose, key=lambda path: blake2b(path.as_posix().encode()).digest()):
        with tokenize.open(root / path) as file:
            yield file.read()


# --- records of files


def bare_suffix(path: Path) -> str:
    """Return a file's suffix in lower case, without that of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def read_records(path: Path, field: str = "") -> Records | None:
    """Read the records of a file by its suffix; None for one of other text.

    A .json file may be JSON Lines, a list of objects, or an object with `field`; anything else in it is other text.
    """
    match bare_suffix(path):
        case ".parquet":
            return _read_dataset(str(path))
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
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not JSON ({error}), got {line.strip()[:80]}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
            yield f"line {number}", record


def _read_json(path: Path, field: str) -> Records | None:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return read_json_lines(path)
    records = value if isinstance(value, list) else [value]
    are_records = records and all(isinstance(record, dict) and field in record for record in records)
    return ((f"line {number}", record) for number, record in enumerate(records, 1)) if are_records else None


def _read_table(path: Path, **dialect: Any) -> Records:
    """Yield the rows of a table, whose first line names the columns; raise DataError for an uneven row."""
    csv.field_size_limit(2**31 - 1)  # a field may be a book
    reader = csv.reader(text_lines(path), **dialect)
    rows = filter(None, reader)  # without blank lines
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: columns must have different names, got {', '.join(names)}")
        for row in rows:
            if len(row) != len(names):
                fields = f"a row must have {len(names)} fields, got {len(row)}"
                raise DataError(f"{path}, line {reader.line_num}: {fields}")
            yield f"line {reader.line_num}", dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a table ({error})") from error


def _read_dataset(source: str) -> Records:
    """Yield the rows of a Parquet file, a folder saved by `datasets`, or OWNER/NAME[:CONFIG[:SPLIT]] of the hub.

    Rows of the latter are downloaded as they are read. Raises DataError in place of what `datasets` raises.
    """
    import datasets

    name, config, split = (*source.split(":"), "", "")[:3]
    row = 0
    try:
        if Path(source).is_file():
            files = glob.escape(source)
            dataset = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        elif not Path(source).exists():
            dataset = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        elif isinstance(dataset := datasets.load_from_disk(source), datasets.DatasetDict):
            splits = ", ".join(f"{source}/{split}" for split in dataset)
            raise DataError(f"{source}: a saved dataset of several splits; name one of them: {splits}")
        for row, record in enumerate(dataset, 1):
            yield f"row {row}", dict(record)
    except DataError:
        raise
    except Exception as error:
        problem = f"{source}: cannot be read as a dataset after {row} rows ({type(error).__name__}: {error})"
        raise DataError(f"{problem}; check its name (OWNER/NAME:CONFIG:SPLIT) and the network") from error


# --- text of files


def read_text(path: Path) -> str:
    """Read a text file as one string."""
    text = "".join(text_lines(path))
    if (at := text.find("\0")) >= 0:
        raise DataError(f"{path}: not text: a NUL byte at {at:,}; convert UTF-16 to UTF-8")
    return text


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, line ends included, without a byte order mark."""
    suffix, number = path.suffix.lower(), 1
    try:
        with open(path, "rb", buffering=2**17) as file:
            for number, line in enumerate(_decompress(file, suffix), 1):
                yield (line.removeprefix(BOM_UTF8) if number == 1 else line).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert it to UTF-8") from error
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        damage = f"truncated or damaged {suffix} file" if suffix in _COMPRESSED else "cannot be read"
        raise DataError(f"{path}: {damage} ({error})") from error


def _decompress(file: Any, suffix: str) -> Any:
    match suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            import pyarrow

            # Unlike the readers of the zstandard package, Arrow's notices a truncated file.
            return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"), 2**17)
        case _:
            return file
