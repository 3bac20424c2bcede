"""The header that every result begins with: its settings, and the commit, command and data that it came from.

schema       "saf.result/2"
kind         the kind of the other entries: "update", "one-head", "run", "evaluation", "comparison" and so on
settings     the settings by their names
provenance   commit, source_hash, command, versions, device, date, checkpoints {role: hash}, data {use: fingerprint},
             and files {role: SHA-256} where files were the only input
"""

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import saf
from saf.records.files import file_hash, read_json, to_json

SCHEMA = "saf.result/2"


def result_header(
    kind: str,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    checkpoints: Mapping[str, str | None] | None = None,
    data: Mapping[str, str | None] | None = None,
    files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the header of a result that this process computes; the result's own entries follow it.

    It calls git and hashes all sources: call it once a result, not once a measurement. `checkpoints` are hashes by role
    ("model", "parent", "final"), `data` fingerprints by use ("train", "report", "calibration"); None is left out.
    """
    provenance = {
        "commit": commit(),
        "source_hash": source_hash(),
        "command": command(),
        "versions": versions(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoints": {role: value for role, value in (checkpoints or {}).items() if value is not None},
        "data": {use: value for use, value in (data or {}).items() if value is not None},
    }
    if files:
        provenance["files"] = {role: file_hash(path) for role, path in files.items()}
    return {"schema": SCHEMA, "kind": kind, "settings": to_json(settings), "provenance": provenance}


def read_result(path: Path) -> dict[str, Any]:
    """Read a result; raise InputError for a file that is missing or is none."""
    advice = "give a file that `saf bench`, `saf evaluate`, `saf compare` or a run wrote"
    return read_json(path, schema=SCHEMA, advice=advice)


# --- where a result comes from


@cache
def source_hash() -> str:
    """Return the SHA-256 of the package's Python sources, names included, as a process first found them.

    It names the code where there is no commit: an installed package, or a checkout with edits.
    """
    root = Path(saf.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def commit() -> str | None:
    """Return the commit of the checkout that the package runs from, with "+" when `saf` or `experiments` was edited.

    None outside a checkout.
    """
    # Cached: what is edited after a process loaded its modules did not run.
    root = Path(saf.__file__).parents[1]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        edited = git("status", "--porcelain", "--", "saf", "experiments")
        return git("rev-parse", "HEAD") + ("+" if edited else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the packages, CUDA and cuDNN; None for what is absent."""
    names = ("torch", "triton", "numpy", "safetensors", "transformers")
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "python": sys.version.split()[0],
        "saf": saf.__version__,
        **{name: package_version(name) for name in names},
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command() -> str:
    """Return the command line, with only the last names of absolute paths, which are one machine's own."""
    path, module = Path(sys.argv[0] or "python"), sys.modules["__main__"].__spec__
    if module is not None:
        words = ["python", "-m", module.name.removesuffix(".__main__")]
    elif path.name == "__main__.py":  # in a child process, which has its parent's sys.argv and no spec
        packages = [path.parent, *path.parent.parents]
        inside = next(n for n, each in enumerate(packages) if not (each / "__init__.py").exists())
        words = ["python", "-m", ".".join(each.name for each in reversed(packages[:inside]))]
    elif path.suffix == ".py":
        words = ["python", path.name if path.is_absolute() else path.as_posix()]
    else:  # an installed command
        words = [path.name]
    for word in sys.argv[1:]:
        # Results are committed: they must not name folders of the machine that measured them.
        flag, equals, value = word.rpartition("=")
        words.append(f"{flag}{equals}{Path(value).name if Path(value).is_absolute() else value}")
    return shlex.join(words)
