"""Opening plain, gzip and zstandard files as one byte stream."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from saf.errors import DataError

Advance = Callable[[int], None]
"""Called with the number of bytes read from disk since the last call."""

SUFFIXES = (".gz", ".zst")


class CountingFile(io.FileIO):
    """A file that reports how many bytes were read from it."""

    def __init__(self, path: Path, advance: Advance):
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer and report the count."""
        count = super().readinto(buffer) or 0
        self._advance(count)
        return count


class ZstdReader(io.RawIOBase):
    """Decompressed bytes of a zstandard file; unlike the package's own reader it notices a cut-off end."""

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
