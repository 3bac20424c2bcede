"""One reader for each file format: a path in, documents out, errors that name the file and the line.

Plain, gzip and zstandard files are read as one byte stream.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from saf.errors import DataError

Advance = Callable[[int], None]
"""Called with the number of bytes read from disk since the last call."""

Reader = Callable[[Path, Advance], Iterator[str]]
SUFFIXES = (".gz", ".zst")


def reader_for(path: Path) -> Reader | None:
    """Return the reader of a file by its name, or None when its suffix is not supported."""
    bare = path.with_suffix("") if path.suffix in SUFFIXES else path
    if path.suffix == ".parquet":
        return read_parquet
    return {".txt": read_text, ".jsonl": read_jsonl}.get(bare.suffix)


@contextmanager
def _damage_named(path: Path, where: Callable[[], str] = str):
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        kind = {".gz": "gzip", ".zst": "zstandard"}.get(path.suffix)
        if kind is None:
            raise DataError(f"{path}: cannot be read ({error})") from error
        message = f"{path}: truncated or damaged {kind} file{where()} ({error}); copy or download it again"
        raise DataError(message) from error


def read_text(path: Path, advance: Advance) -> Iterator[str]:
    """Yield a whole UTF-8 text file as one document."""
    with _damage_named(path), open_stream(path, advance) as file:
        data = file.read()
    try:
        yield data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, at) + 1
        raise DataError(f"{path}: not UTF-8 at byte {at} (line {line}); convert it to UTF-8") from error


def read_jsonl(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the `text` field of each line of a JSON Lines file; blank lines are passed over."""
    number, offset = 0, 0

    def where() -> str:
        return f" after line {number}"

    with _damage_named(path, where), open_stream(path, advance) as file:
        lines = iter(file)
        while True:
            line = next(lines, None)
            if line is None:
                return
            number += 1
            if line.strip():
                yield _jsonl_text(line, path, number, offset)
            offset += len(line)


def _jsonl_text(line: bytes, path: Path, number: int, offset: int) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(f"{path}, line {number}: not UTF-8 at byte {at}; convert the file to UTF-8") from error
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error}); one object a line is expected") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{path}, line {number}: expected an object with a text field, got {kind}")
    return text_field(record, f"{path}, line {number}")


def text_field(record: dict, where: str) -> str:
    """Return a record's `text`; raise DataError naming the place and the fields found instead."""
    text = record.get("text")
    if not isinstance(text, str):
        fields = ", ".join(sorted(map(str, record))) or "none"
        problem = "no text field" if "text" not in record else f"text is {type(text).__name__}, not a string"
        raise DataError(f"{where}: {problem}; fields found: {fields}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair at character {error.start}; it is not text") from error
    return text


def read_parquet(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the `text` column of a Parquet file, row group by row group."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs a package: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise DataError(f"{path}: no text column; columns found: {', '.join(names) or 'none'}")
            size, rows, row = path.stat().st_size, max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                advance(size * batch.num_rows // rows)
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield text_field({"text": text}, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: truncated or damaged Parquet file ({error})") from error


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
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: reading .zst needs a package: pip install zstandard") from error
        decompressor = zstandard.ZstdDecompressor()
        return cast(BinaryIO, io.BufferedReader(ZstdReader(file, decompressor.decompressobj), 2**17))
    return file
