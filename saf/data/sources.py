"""What a source name means, and the documents behind it."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from saf.data.compression import Advance
from saf.data.hub import stream_hub
from saf.data.python_text import python_documents
from saf.data.readers import reader_for
from saf.errors import DataError

SUPPORTED = ".txt, .jsonl (each also as .gz or .zst) and .parquet"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Source:
    """Where documents come from: `read(advance)` yields them, `size` is their bytes on disk if known."""

    name: str
    read: Callable[[Advance], Iterator[str]]
    size: int | None = None
    facts: dict = field(default_factory=dict)

    def documents(self, advance: Advance = lambda count: None) -> Iterator[str]:
        """Yield the documents; raise DataError when not one has text in it."""
        found = False
        for text in self.read(advance):
            found = found or bool(text.strip())
            yield text
        if not found:
            raise DataError(f"{self.name}: no text in it; every document is empty or there is none")


def resolve(name: str) -> Source:
    """Turn a name into a source: `python`, a file, a folder, or `owner/name[:config[:split]]` on the Hub.

    Raises DataError when there is nothing of that name or its suffix is not supported.
    """
    if name == "python":
        version = ".".join(map(str, sys.version_info[:3]))
        return Source(name, lambda advance: python_documents(), facts={"python": version})
    if not name:
        raise DataError(f"the name of a source is empty; expected `python`, {SUPPORTED} files, a folder or OWNER/NAME")
    path = Path(name)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        if reader_for(path) is None:
            raise DataError(f"{path}: unsupported suffix {path.suffix!r}; supported: {SUPPORTED}")
        return _files(name, [path], {})
    if _HUB_NAME.fullmatch(name) and reader_for(path) is None:
        dataset, _, rest = name.partition(":")
        config, _, split = rest.partition(":")
        return Source(name, lambda advance: stream_hub(dataset, config or None, split or "train"))
    raise DataError(f"{name}: no such file or folder")


def _folder(folder: Path) -> Source:
    everything = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in everything if reader_for(path) and not path.name.startswith(".")]
    if not files:
        raise DataError(f"{folder}: none of its {len(everything)} files can be read; supported: {SUPPORTED}")
    return _files(str(folder), files, {"files": len(files), "files_ignored": len(everything) - len(files)})


def _files(name: str, files: list[Path], facts: dict) -> Source:
    def read(advance: Advance) -> Iterator[str]:
        for path in files:
            reader = reader_for(path)
            if reader is not None:
                yield from reader(path, advance)

    return Source(name, read, size=sum(path.stat().st_size for path in files), facts=facts)
