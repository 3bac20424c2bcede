"""The configurations that tuning has found fastest on this device model, kept in the user's cache directory."""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import triton

from saf.errors import InputError
from saf.ops.inference.settled import unsettle_all
from saf.ops.toeplitz.config import Config, choose_config
from saf.records.files import write_json

SCHEMA = "saf.choices/2"
"""Another number whenever the settings of a `Config` change."""
AGAIN = "remove it and run `saf bench tune` again"


def cache_file(device: torch.device) -> Path:
    """Path of the file that keeps the choices for one device model and Triton version."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return root / "saf" / f"toeplitz-{name}-triton-{triton.__version__}.json"


def shape_key(*, length: int, batch: int, heads: int, dim: int, dtype: torch.dtype, transpose: bool) -> str:
    """Name one shape in the file."""
    direction = "transposed" if transpose else "forward"
    return f"T{length} B{batch} F{heads} D{dim} {str(dtype).removeprefix('torch.')} {direction}"


def read_choices(device: torch.device) -> dict[str, Config]:
    """Return the kept choices by `shape_key`; none if nothing was tuned.

    Raises:
        InputError: a damaged file, or one of another schema.
    """
    return {key: config for key, (config, _) in _entries(cache_file(device)).items()}


def keep_choice(device: torch.device, key: str, config: Config, microseconds: float) -> None:
    """Add one choice to the file, replacing it as a whole; this process uses it from now on."""
    path = cache_file(device)
    entries = {**_entries(path), key: (config, microseconds)}
    choices = {name: {"config": kept.to_dict(), "microseconds": time} for name, (kept, time) in sorted(entries.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA, "choices": choices})
    choices_of.cache_clear()
    unsettle_all()


@cache
def choices_of(device: torch.device) -> Mapping[str, Config]:
    """Return `read_choices`, read once a process; nothing where no CUDA device is."""
    return read_choices(device) if device.type == "cuda" else {}


def config_for(
    *,
    length: int,
    batch: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    transpose: bool,
    tables: str,
    descriptors: bool,
    device: torch.device,
) -> Config:
    """Return what tuning chose for a shape if it reads the table at hand, what the written rule says otherwise."""
    kept = choices_of(device)
    if kept:
        key = shape_key(length=length, batch=batch, heads=heads, dim=dim, dtype=dtype, transpose=transpose)
        config = kept.get(key)
        if config is not None and config.tables == tables:
            return config
    return choose_config(
        length=length,
        columns=batch * dim,
        heads=heads,
        dtype=dtype,
        tables=tables,
        descriptors=descriptors,
        **_shared_memory(device),
    )


@cache
def _shared_memory(device: torch.device) -> dict[str, int]:
    """Return the shared memory that a program may have on a CUDA device; nothing elsewhere."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return {}
    return {"shared_memory": torch.cuda.get_device_properties(device).shared_memory_per_block_optin}


def _entries(path: Path) -> dict[str, tuple[Config, float]]:
    """Return each shape's configuration and its microseconds; raise InputError for a file that cannot be used."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        schema = record["schema"]
        if schema == SCHEMA:
            choices = record["choices"].items()
            return {key: (Config.from_dict(entry["config"]), entry["microseconds"]) for key, entry in choices}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); {AGAIN}") from error
    raise InputError(f"{path} is of schema {schema!r}, expected {SCHEMA!r}; {AGAIN}")
