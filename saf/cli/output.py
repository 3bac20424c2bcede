"""How commands show results: tables for people, or JSON alone for machines."""

import json
from collections.abc import Mapping
from typing import Any

from saf.records.files import to_json
from saf.records.table import Part


def show(result: Mapping[str, Any], *parts: Part, as_json: bool) -> None:
    """Print `result` as JSON and nothing else, or the tables and lines for people."""
    if as_json:
        print(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    for part in parts:
        if isinstance(part, str):
            print(part)
        else:
            part.print()


def machine(provenance: Mapping[str, Any]) -> str:
    """Return the line of a benchmark's record that says where it was made."""
    versions = provenance["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if versions.get(name)]
    driver = [f"driver {provenance['driver']}"] if provenance["driver"] else []
    return ", ".join([provenance["device"], *named, *driver])
