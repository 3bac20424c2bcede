"""One reader for each file format: a path in, documents out as UTF-8, errors that name the file and the line.

Plain, gzip and zstandard files are read as one byte stream. A document of a text file is held once, as its bytes; one
of a table about three times while it is decoded.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from saf.data.utf8 import BLOCK_BYTES, cut_to, first_bad_byte
from saf.errors import DataError

Advance = Callable[[int], None]
"""Called with the number of bytes read from disk since the last call."""
SUFFIXES = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
# A line of JSON that holds a text of n bytes: six bytes a character in escapes, and room for other fields.
_LINE_FACTOR, _LINE_ROOM = 8, 2**20
# Of a Parquet file at once: rows cost two microseconds each in batches of 16, one in batches of 256.
_PARQUET_BYTES, _PARQUET_ROWS = 2**20, 16
# Prose grows three- to five-fold when it is decompressed, a page of one letter some ten-thousand-fold.
_MOST_GROWTH = 256


class NotText(DataError):
    """Say that a file is not text: not UTF-8, or with NUL bytes."""


class MissingField(DataError):
    """Say that a record has no text under the name that was asked for."""


@dataclass(frozen=True)
class Options:
    """Say how files are read: the field of a table's records, the most bytes of one document; collect what was left."""

    text_field: str = "text"
    most_bytes: int | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def fitted(self, data: bytes, path: Path | str) -> bytes:
        """Return a document within `most_bytes`, and note when it is cut."""
        if self.most_bytes is None or len(data) <= self.most_bytes:
            return data
        self.left_out[str(path)] = f"read to its first {self.most_bytes:,} bytes (max_bytes)"
        return cut_to(data, self.most_bytes)


Reader = Callable[[Path, Advance, Options], Iterator[bytes]]


def reader_for(path: Path) -> Reader:
    """Return the reader of a file by its name: a table's, or that of text."""
    return TABLES.get(bare_suffix(path), read_text)


def bare_suffix(path: Path) -> str:
    """Return a file's suffix without that of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).suffix.lower()


@contextmanager
def _damage_named(path: Path, where: Callable[[], str] = str):
    """Turn what readers raise for a damaged file into a DataError that names it."""
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        kind = {".gz": "gzip", ".zst": "zstandard"}.get(path.suffix.lower())
        if kind is None or isinstance(error, PermissionError):
            raise DataError(f"{path}: cannot be read ({error})") from error
        message = f"{path}: truncated or damaged {kind} file{where()} ({error}); copy or download it again"
        raise DataError(message) from error


def read_text(path: Path, advance: Advance, options: Options) -> Iterator[bytes]:
    """Yield a whole UTF-8 text file as one document; raise NotText naming the byte for anything else."""
    text, most = io.BytesIO(), options.most_bytes
    with _damage_named(path), open_stream(path, advance) as file:
        head = file.read(len(_BOM))
        skipped = len(_BOM) if head == _BOM else 0
        text.write(head[skipped:])
        while (most is None or text.tell() <= most) and (block := file.read(BLOCK_BYTES)):
            text.write(block)
    data = text.getvalue()
    cut = most is not None and len(data) > most
    data = options.fitted(data, path)
    if (at := data.find(b"\0")) >= 0:
        raise NotText(f"{path}: not text, a NUL byte at {at + skipped:,}; UTF-16 is to be converted to UTF-8")
    bad = first_bad_byte(data, whole=not cut)
    if bad is not None:
        line = data.count(b"\n", 0, bad) + 1
        raise NotText(f"{path}: not UTF-8 at byte {bad + skipped} (line {line}); convert it to UTF-8")
    yield data


def sniff(path: Path) -> str | None:
    """Return why the beginning of a file is not text; None when it is. Raises DataError when it cannot be read."""
    with _damage_named(path), open_stream(path, lambda count: None) as file:
        data = file.read(2**16)
    if (at := data.find(b"\0")) >= 0:
        return f"not text: a NUL byte at {at:,}"
    bad = first_bad_byte(data, whole=False)
    return None if bad is None else f"not text: not UTF-8 at byte {bad:,}"


def read_jsonl(path: Path, advance: Advance, options: Options) -> Iterator[bytes]:
    """Yield the text field of each line of a JSON Lines file; blank lines are passed over."""
    number, offset = 0, 0
    longest = -1 if options.most_bytes is None else _LINE_FACTOR * options.most_bytes + _LINE_ROOM

    def where() -> str:
        return f" after line {number}"

    with _damage_named(path, where), open_stream(path, advance) as file:
        while line := file.readline(longest):
            number += 1
            line = line.removeprefix(_BOM) if number == 1 else line
            if len(line) == longest:
                raise DataError(f"{path}, line {number}: longer than {longest:,} bytes, too long for max_bytes")
            if line.strip():
                record = _record(line, path, number, offset)
                yield options.fitted(text_field(record, f"{path}, line {number}", options.text_field), path)
            offset += len(line)


def read_json(path: Path, advance: Advance, options: Options) -> Iterator[bytes]:
    """Yield the documents of a .json file: of JSON Lines, of one object or list of objects, else the text as it is.

    It is JSON Lines where its first two lines are objects, or its only line is one with the text field.
    """
    longest = -1 if options.most_bytes is None else _LINE_FACTOR * options.most_bytes + _LINE_ROOM
    with _damage_named(path), open_stream(path, lambda count: None) as file:
        lines = (line.strip() for line in iter(lambda: file.readline(longest), b""))
        first, second = (_object(next(filter(None, lines), b"").removeprefix(_BOM)) for _ in range(2))
    if first is not None and (second is not None or options.text_field in first):
        yield from read_jsonl(path, advance, options)
        return
    (data,) = read_text(path, advance, replace(options, most_bytes=None if longest < 0 else longest))
    try:
        records = json.loads(data)
    except (ValueError, RecursionError):
        records = None
    if isinstance(records, dict) and options.text_field in records:
        records = [records]
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        for number, record in enumerate(records, 1):
            yield options.fitted(text_field(record, f"{path}, record {number}", options.text_field), path)
    elif len(data) == longest:
        raise DataError(f"{path}: longer than {longest:,} bytes, too long for max_bytes; make JSON Lines of it")
    else:
        yield options.fitted(data, path)


def _object(line: bytes) -> dict | None:
    """Return the JSON object that a line is; None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _record(line: bytes, path: Path, number: int, offset: int) -> dict:
    """Return the JSON object of one line; an error names the file and the line, and the byte that is not UTF-8."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(f"{path}, line {number}: not UTF-8 at byte {at}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not JSON ({error}); one object a line is expected") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{path}, line {number}: expected an object with a text field, got {kind}")
    return record


def text_field(record: dict, where: str, name: str) -> bytes:
    """Return a record's text as UTF-8; raise DataError naming the place and the fields found instead."""
    text = record.get(name)
    if name not in record:
        fields = ", ".join(sorted(map(str, record))) or "none"
        raise MissingField(f"{where}: no field {name!r}; fields found: {fields}; name one with text_field")
    if not isinstance(text, str):
        raise DataError(f"{where}: {name} is {type(text).__name__}, not a string")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair at character {error.start}; it is not text") from error


def read_csv(path: Path, advance: Advance, options: Options) -> Iterator[bytes]:
    """Yield the text column of a table with a line of names: comma-separated, or unquoted by tabs in a .tsv.

    Raises DataError naming the line where a row has more or fewer fields than there are names.
    """
    before = csv.field_size_limit(_longest_field(options))
    rows = None
    try:
        with _damage_named(path), open_stream(path, advance) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if bare_suffix(path) == ".tsv" else {}
            rows = csv.reader(text, strict=True, **tabs)
            if (names := next(rows, None)) is not None and options.text_field not in names:
                raise _missing_column(path, options.text_field, names)
            if names and names.count(options.text_field) > 1:
                raise DataError(f"{path}: several columns are named {options.text_field!r}; name each differently")
            for row in rows:
                if row and len(row) != len(names or ()):
                    raise DataError(
                        f"{path}, line {rows.line_num}: {len(row)} fields where the first line names "
                        f"{len(names or ())}; quote fields with separators or line ends (.csv), or give JSON Lines"
                    )
                if row and names:
                    yield options.fitted(row[names.index(options.text_field)].encode("utf-8"), path)
    except UnicodeDecodeError as error:
        line = rows.line_num if rows else 0
        raise DataError(f"{path}: not UTF-8 after line {line}; convert the file to UTF-8") from error
    except csv.Error as error:
        line = rows.line_num if rows else 0
        raise DataError(f"{path}: not a table after line {line} ({error})") from error
    finally:
        csv.field_size_limit(before)


def _missing_column(path: Path, column: str, names: Iterable[str]) -> MissingField:
    found = ", ".join(names) or "none"
    return MissingField(f"{path}: no column {column!r}; columns found: {found}; name one with text_field")


def _longest_field(options: Options) -> int:
    """Return the most characters that a field of a CSV may have; the package's own limit is 131,072."""
    return 2**31 - 1 if options.most_bytes is None else min(_LINE_FACTOR * options.most_bytes + _LINE_ROOM, 2**31 - 1)


def read_parquet(path: Path, advance: Advance, options: Options) -> Iterator[bytes]:
    """Yield the text column of a Parquet file, a few rows at a time.

    What is held is their texts, and the page of the file that they are in, which is decompressed whole. With
    `most_bytes` a column that grows beyond `_MOST_GROWTH` is not begun, but raises DataError.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs a package: pip install pyarrow") from error
    column = options.text_field
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise _missing_column(path, column, names)
            size, rows, row = path.stat().st_size, max(file.metadata.num_rows, 1), 0
            for batch in _parquet_batches(file, column, path, options):
                advance(size * batch.num_rows // rows)
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield options.fitted(text_field({column: text}, f"{path}, row {row}", column), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: truncated or damaged Parquet file ({error})") from error


def _parquet_batches(file: Any, column: str, path: Path, options: Options) -> Iterator[Any]:
    """Yield the rows of a Parquet file in batches of about a mebibyte of their column, and of `_PARQUET_ROWS` at most.

    A column that names its repeated texts once is larger than the file tells: the rows are limited too.
    """
    for group in range(file.metadata.num_row_groups):
        facts = file.metadata.row_group(group)
        chunks = [facts.column(number) for number in range(facts.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        held = sum(chunk.total_compressed_size for chunk in chunks)
        if (
            options.most_bytes is not None
            and size > _MOST_GROWTH * held + _LINE_FACTOR * options.most_bytes + _LINE_ROOM
        ):
            raise DataError(
                f"{path}, row group {group}: column {column!r} grows from {held:,} to {size:,} bytes, more than "
                f"{_MOST_GROWTH}-fold; pages are decompressed whole: with max_bytes text that grows so is not read"
            )
        rows = min(_PARQUET_ROWS, max(1, _PARQUET_BYTES * facts.num_rows // max(size, 1)))
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=[column])


TABLES: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), read_jsonl),
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
"""Readers of files with many documents, by suffix; any other file is one document if it is text."""


class CountingFile(io.FileIO):
    """Report how many bytes were read from a file."""

    def __init__(self, path: Path, advance: Advance):
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer and report the count."""
        count = super().readinto(buffer) or 0
        self._advance(count)
        return count


class ZstdReader(io.RawIOBase):
    """Read a zstandard file; unlike the package's own reader it notices a cut-off end."""

    def __init__(self, file: BinaryIO, new_frame: Callable):
        self._file, self._new_frame = file, new_frame
        self._frame, self._ready, self._fed = new_frame(), b"", False

    def readable(self) -> bool:
        """Say that this is an input stream."""
        return True

    def close(self):
        """Close the compressed file too."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; raise EOFError when the file is cut off or is not zstandard."""
        while not self._ready and self._feed():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _feed(self) -> bool:
        """Decompress the next chunk; return whether there was one."""
        if self._frame.eof:
            rest = self._frame.unused_data
            self._frame, self._fed = self._new_frame(), False
            chunk = rest or self._file.read(2**17)
        else:
            chunk = self._file.read(2**17)
        if not chunk:
            if self._fed:
                raise EOFError("the file ends inside a compressed frame")
            return False
        try:
            self._ready, self._fed = self._frame.decompress(chunk), True
        except Exception as error:
            raise EOFError(str(error)) from error
        return True


def open_stream(path: Path, advance: Advance) -> BinaryIO:
    """Open a file for reading bytes, decompressing `.gz` and `.zst`; a damaged one raises while it is read.

    Raises DataError when the zstandard package is missing.
    """
    file = io.BufferedReader(CountingFile(path, advance), 2**17)
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    if path.suffix.lower() == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: reading .zst needs a package: pip install zstandard") from error
        decompressor = zstandard.ZstdDecompressor()
        return cast(BinaryIO, io.BufferedReader(ZstdReader(file, decompressor.decompressobj), 2**17))
    return file
