"""JSON and safetensors records that are either whole on disk or not there at all."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from saf.errors import InputError


def to_json(value: Any) -> Any:
    """Return `value` as plain JSON types: paths as text, NaN and infinities as None, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    return to_json(value.tolist())  # torch and numpy values


def write_atomically(path: Path, content: bytes) -> Path:
    """Write to a temporary name beside `path`, flush to the disk, rename; create the folder when absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def flush(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Wait until a folder's files and its entries are on the disk."""
    for path in [*sorted(folder.iterdir()), folder]:
        flush(path)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write one record as indented JSON; NaN and infinities become null."""
    return write_atomically(path, (json.dumps(to_json(record), indent=2, allow_nan=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write named tensors as one safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_atomically(path, save(plain, metadata=dict(metadata) if metadata else None))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; raise InputError naming the file when it is missing or not JSON."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{path} must hold a JSON object; got {type(record).__name__}")
    return record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a last line cut short by a crash is left out, any other bad line raises InputError."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}, is not valid JSON: {error}") from None
    return records


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file; raise InputError naming the file when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None


class LineLog:
    """Appends one JSON object a line and hands every line to the system at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, record: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def keep_lines_(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSON-lines file with the lines that `keep` accepts; one cut short by a crash goes."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in read_lines(path) if keep(record)]
        write_atomically(path, "".join(kept).encode())
