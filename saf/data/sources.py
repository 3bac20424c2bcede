"""What a source name means, and the documents behind it: files, a dataset of the Hub, or Python's own text."""

import importlib
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from saf.data.readers import Advance, reader_for, text_field
from saf.errors import DataError

SUPPORTED = ".txt, .jsonl (each also as .gz or .zst) and .parquet"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
# Tests are repetitive, `encodings` is tables of code pages, and the topics are read as text instead.
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Source:
    """Say where documents come from: `read(advance)` yields them, `size` is their bytes on disk if known."""

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


def stream_hub(name: str, config: str | None, split: str) -> Iterator[str]:
    """Yield the `text` of each row of a dataset, downloading as it goes.

    Raises DataError when `datasets` is missing, the dataset cannot be reached, or a row has no text.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{name}: streaming a dataset needs a package: pip install datasets") from error
    row = 0
    try:
        for row, record in enumerate(load_dataset(name, config, split=split, streaming=True), 1):
            yield text_field(dict(record), f"{name} ({split}), row {row}")
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


def python_documents() -> Iterator[str]:
    """Yield the help topics, then the modules, a document each.

    Raises DataError when the installation carries no readable source.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))
    files = python_files()
    if not files:
        raise DataError("this Python installation carries no source files; give text files instead")
    for path in files:
        with tokenize.open(path) as file:
            yield file.read()
