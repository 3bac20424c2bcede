"""Where a measured record comes from, in words: device, versions, source, command."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {"cuda": "CUDA", "cudnn": "cuDNN", "python": "Python"}
_SHOWN = ("saf", "python", "torch", "triton", "cuda", "cudnn")


def device_and_versions(provenance: Mapping[str, Any] | None) -> str:
    """Return "NVIDIA H200, torch 2.11.0, ..."; "not recorded" for a file that does not tell."""
    if not provenance or not (provenance.get("device") or provenance.get("versions")):
        return "device and versions not recorded"
    told = provenance.get("versions") or {}
    parts = [f"{NAMES.get(name, name)} {version(name, told[name])}" for name in _SHOWN if told.get(name)]
    if provenance.get("driver"):
        parts.append(f"driver {provenance['driver']}")
    return ", ".join([str(provenance.get("device") or "device not recorded"), *parts])


def source(provenance: Mapping[str, Any]) -> str:
    """Return commit and hash of the code that measured, and the day."""
    commit, code, date = (provenance.get(key) for key in ("commit", "source_hash", "date"))
    parts = [f"commit {commit[:12]}" if commit else "no commit recorded"]
    if code:
        parts.append(f"source {code[:12]}")
    if date:
        parts.append(f"measured {date[:10]}")
    return ", ".join(parts)


def version(name: str, number: str) -> str:
    """Return a version in its usual form: cuDNN tells 91900 for 9.19.0."""
    if name == "cudnn" and number.isdigit() and int(number) >= 90000:
        return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"
    return number


def told_by(file: Path, beside: Path, provenance: Mapping[str, Any] | None) -> list[str]:
    """Return Markdown: the file, its device and versions, its code, and its command as a block.

    `beside` is the folder of the document that links to `file`.
    """
    words = [device_and_versions(provenance)]
    if provenance:
        words.append(source(provenance))
    lines = [f"{link(file, beside)}: {'; '.join(words)}."]
    command = (provenance or {}).get("command")
    return [*lines, f"```sh\n{command}\n```" if command else "Command not recorded."]


def link(file: Path, beside: Path) -> str:
    """Return a Markdown link from a document in the folder `beside`."""
    target = Path(os.path.relpath(file, beside)).as_posix()
    return f"[{target.removeprefix('../')}]({target})"
