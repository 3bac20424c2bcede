"""The embedded default text: what every Python installation carries, its own source and its help topics."""

import importlib
import sysconfig
import tokenize
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from saf.errors import DataError

# Tests are repetitive, `encodings` is tables of code pages, and the topics are read as text instead.
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}


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
