"""`save` and `load`: the frozen heads of a model as two small files beside its weights."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.errors import CheckpointError, InputError, SafWarning
from saf.frozen_state import SCHEMA as HEADS_SCHEMA
from saf.frozen_state import apply_, load_weights_, restore_
from saf.models import GPT, GPTConfig
from saf.models.adapter import Adapter, adapter_for
from saf.models.description import (
    OPENS,
    STATE,
    TENSORS,
    check_plain_weights,
    described,
    described_beside,
    write_description,
)
from saf.records.files import check_file, read_json, read_tensors, write_json, write_tensors
from saf.records.folders import new_files, no_room
from saf.records.paths import Kind, expect

WEIGHTS, CONFIG = "model.safetensors", "config.json"
SCHEMA = "saf.model/1"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `saf.json` and `saf.safetensors` (patterns, removed rows) and, for the project's GPT, the weights.

    Weights of other models are theirs to keep. A model loaded from the folder by `load` gives the same outputs bit for
    bit. `saf.json` holds the SHA-256 sums of the tensor files, and of other models' attention weights. Raises
    InputError for a file, and for the GPT when the folder is a run, a checkpoint or something else's; CheckpointError
    when the disk is full. All files are written or none: what was saved there before stays until then.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; save writes a folder")
    adapter = adapter_for(model)
    if adapter.saves_weights:
        _check_free(folder)
        for site in adapter.sites():
            check_plain_weights(site)
        state, tensors = described(adapter.sites())
    else:
        state, tensors = described_beside(adapter)
    try:
        with new_files(folder) as new:
            weights = []
            if adapter.saves_weights:
                weights.append(write_tensors(new / WEIGHTS, adapter.model.state_dict()))
                write_json(new / CONFIG, {"schema": SCHEMA, "model": adapter.model.config.to_dict()})
            write_description(new, state, tensors, *weights)
    except OSError as error:
        if (reason := no_room(error)) is None:
            raise
        raise CheckpointError(f"{reason}: {folder} is as it was; free some space, then save again") from error


def load(
    model_or_folder: nn.Module | str | Path, folder: str | Path | None = None, *, backend: str | None = None
) -> nn.Module:
    """Load what `save` wrote: `load(folder)` builds the model, `load(model, folder)` fills a fresh one.

    Both also take what the commands write: a checkpoint, or a run, of which they take the newest checkpoint.
    Frozen heads are executed by the backend that they were saved with, so that outputs are the same bit for bit; where
    it cannot run, a warning says so and `"auto"` takes its place. `backend` names another one, or `"auto"`.

    A model of transformers has its weights already: its heads are frozen as the saved ones were. If it was trained on
    after freezing, load that state dict afterwards; a warning names the attention weights that differ from those saved,
    another one settings of attention (rotary positions, windows).
    Weights of a narrower dtype than the saved ones are compared by the rows kept for undoing alone.

    Raises CheckpointError when files are missing, differ from their sums or belong to another shape of model,
    InputError when a model is given without a folder, or a run that has no checkpoint yet. No random numbers are drawn.
    """
    from saf.checkpoint import find_checkpoint, open_checkpoint

    if isinstance(model_or_folder, nn.Module):
        if folder is None:
            raise InputError("load(model, folder) needs the folder that save wrote")
        model, source = model_or_folder, Path(folder)
    else:
        model, source = None, Path(model_or_folder)
    expect(source, Kind.MODEL, Kind.HEADS, Kind.CHECKPOINT, Kind.RUN, Kind.TRANSFORMERS, error=CheckpointError)
    if found := find_checkpoint(source):
        checkpoint = open_checkpoint(found, optimizer=False)
        if model is None:
            return checkpoint.model(torch.get_default_device(), backend=backend)
        source = found
    state = read_json(source / STATE, error=CheckpointError)
    check_sums(source, state)
    if model is None:
        if "sha256" in state and WEIGHTS not in state["sha256"]:
            raise CheckpointError(
                f"{source} holds the frozen heads of a model that keeps its own weights, as those of transformers do; "
                f"open that model, then saf.load(model, folder), or where save_pretrained wrote its weights here too: "
                f"{OPENS}, then from_pretrained(folder)"
            )
        config = GPTConfig.from_dict(_read_shape(source / CONFIG))
        model = GPT.undrawn(config, torch.get_default_device())
    tensors = read_tensors(source / TENSORS, error=CheckpointError)
    if not adapter_for(model).saves_weights:
        apply_(model, state, tensors, backend=backend)
        if differing := _differing_settings(adapter_for(model), state.get("attention", {})):
            warnings.warn(
                f"the model's live heads attend otherwise than those saved ({'; '.join(differing)}): open it with the "
                "configuration it had",
                SafWarning,
                stacklevel=3,
            )
        return model
    weights = read_tensors(source / WEIGHTS, error=CheckpointError)
    restore_(model, state, tensors, backend=backend)
    load_weights_(model, weights, source)
    return model


def _read_shape(path: Path) -> dict[str, Any]:
    """Return what config.json tells of the shape of a model."""
    record = read_json(path, error=CheckpointError)
    if record.get("schema") != SCHEMA or not isinstance(record.get("model"), dict):
        raise CheckpointError(f"{path} has schema {record.get('schema')!r}; expected {SCHEMA!r}, and a model in it")
    return record["model"]


def _differing_settings(adapter: Adapter, saved: Mapping[str, Any]) -> list[str]:
    """Return "name: here, saved there" for every setting that is another one; earlier files have saved none."""
    own = adapter.attention_settings()
    return [
        f"{name}: {own[name]}, saved {value}" for name, value in saved.items() if name in own and own[name] != value
    ]


def check_sums(folder: Path, state: Mapping[str, Any]) -> dict[str, str]:
    """Check the tensor files against the sums in saf.json's `state`, and return these.

    A checkpoint's saf.json has none: its manifest has them. Raises CheckpointError naming the file that differs or is
    missing.
    """
    if state.get("schema") != HEADS_SCHEMA:
        raise CheckpointError(
            f"{folder / STATE}: expected frozen heads of schema {HEADS_SCHEMA!r}; got {state.get('schema')!r}"
        )
    sums = state.get("sha256", {})
    if not isinstance(sums, dict):
        raise CheckpointError(f"{folder / STATE} is damaged: sha256 must name files and their sums")
    for name, expected in sums.items():
        check_file(folder / name, sha256=expected, error=CheckpointError)
    return sums


def _check_free(folder: Path) -> None:
    """Raise InputError when writing a whole model would overwrite what `save` did not write."""
    for name in (CONFIG, "manifest.json"):
        path = folder / name
        if path.is_file() and not (name == CONFIG and _is_own(path)):
            raise InputError(f"{path} was not written by saf.save and the folder is left as it is; take another folder")


def _is_own(path: Path) -> bool:
    """Return whether a file is a sidecar's."""
    try:
        return read_json(path).get("schema") == SCHEMA
    except InputError:
        return False
