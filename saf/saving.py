"""`save` writes a model's frozen heads into a folder, for the project's GPT with its weights, and `load` opens it."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.checkpoint import find_checkpoint, open_checkpoint
from saf.errors import CheckpointError, InputError, SafWarning
from saf.frozen_state import (
    IMPORT_LINE,
    STATE_FILE,
    check_savable,
    description_of,
    load_weights_,
    read_description,
    restore_,
    write_description,
)
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.records.files import new_files, read_json, read_tensors, write_json, write_tensors
from saf.records.run import MANIFEST, Kind, expect

WEIGHTS, CONFIG = "model.safetensors", "config.json"
SCHEMA = "saf.model/1"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `saf.json` and `saf.safetensors` (patterns, removed rows) and, for the project's GPT, the weights.

    Other models' weights are saved by their own library. A model that `load` opens from the folder has the same outputs
    bit for bit. `saf.json` holds the SHA-256 sums of the tensor files, and of other models' attention weights. Either
    all files are written or none. Raises InputError for the GPT when the folder is a run, a checkpoint or of another
    origin.
    """
    folder = Path(folder)
    adapter = adapter_for(model)
    # The GPT's config.json would replace a run's or another library's; frozen heads alone may join any files.
    for path in (folder / CONFIG, folder / MANIFEST) if adapter.is_gpt else ():
        if path.is_file() and (path.name != CONFIG or read_json(path).get("schema") != SCHEMA):
            raise InputError(f"{path} was not written by saf.save; choose another folder")
    check_savable(adapter)
    # Weights that another library saves are not in this folder: `load` compares sums to find whether they are the same.
    state, tensors = description_of(adapter, checksums=not adapter.is_gpt)
    with new_files(folder) as new:
        weights = []
        if adapter.is_gpt:
            weights.append(write_tensors(new / WEIGHTS, adapter.model.state_dict()))
            write_json(new / CONFIG, {"schema": SCHEMA, "model": adapter.model.config.to_dict()})
        write_description(new, state, tensors, *weights)


def load(
    model_or_folder: nn.Module | str | Path, folder: str | Path | None = None, *, backend: str | None = None
) -> nn.Module:
    """Open a folder of `save`: `load(folder)` builds the model, `load(model, folder)` fills a fresh one.

    A checkpoint, or a run with its newest checkpoint, opens the same way. Frozen heads have the backend that they were
    saved with, so that outputs are the same bit for bit; where it cannot run, `"auto"` replaces it with a warning.
    `backend` chooses another one. No random numbers are drawn.

    A model of transformers has its weights already, and only its heads are frozen. If it was trained after freezing,
    load that state dict afterwards: a warning lists the attention weights that differ from the saved ones, another one
    settings of attention (rotary positions, windows). Where the model is in a narrower dtype than the file, only
    removed rows are compared.

    Raises CheckpointError when files are missing, differ from their sums or belong to another shape of model,
    InputError for a model without a folder, or a run without a checkpoint.
    """
    model = model_or_folder if isinstance(model_or_folder, nn.Module) else None
    source = model_or_folder if folder is None else folder
    if isinstance(source, nn.Module) or (model is None) != (folder is None):
        raise InputError("load takes a folder, or an open model and a folder: open the model first")
    source = Path(source)
    kinds = (Kind.MODEL, Kind.HEADS, Kind.CHECKPOINT, Kind.RUN, Kind.TRANSFORMERS)
    if expect(source, *kinds, error=CheckpointError) is Kind.TRANSFORMERS and not (source / STATE_FILE).is_file():
        raise CheckpointError(f"{source} must hold frozen heads, got an ordinary model: give the frozen one's folder")
    if (path := find_checkpoint(source)) is not None:
        checkpoint, source = open_checkpoint(path, optimizer=False), path
        if model is None:
            return checkpoint.model(torch.get_default_device(), backend=backend)
    state, tensors = read_description(source)
    model = _empty_model(source, state) if model is None else model
    adapter = adapter_for(model)
    if adapter.is_gpt:
        weights = read_tensors(source / WEIGHTS, error=CheckpointError)
        restore_(model, state, tensors, backend=backend)  # resizes the weights that are loaded next
        load_weights_(model, weights, source)
        return model
    restore_(model, state, tensors, backend=backend, compare=True)
    own = adapter.attention_settings()
    # Only settings that this version of transformers has, too: a new one of another version is no difference.
    saved = {name: value for name, value in state.get("attention", {}).items() if name in own}
    if differing := [f"{name}: {own[name]}, saved {value}" for name, value in saved.items() if own[name] != value]:
        warnings.warn(
            f"the model's attention differs from the saved one ({'; '.join(differing)}): open it with its own "
            "configuration",
            SafWarning,
            stacklevel=2,
        )
    return model


def _empty_model(folder: Path, state: Mapping[str, Any]) -> GPT:
    """Return a GPT without weights of the shape that `save` recorded in a folder."""
    if WEIGHTS not in state.get("sha256", {}):
        raise CheckpointError(
            f"{folder} holds frozen heads without weights; open their model, then saf.load(model, folder). For a "
            f"folder of save_pretrained: {IMPORT_LINE}, then from_pretrained(folder)"
        )
    record = read_json(folder / CONFIG, schema=SCHEMA, error=CheckpointError)
    # Its weights are loaded next: drawing them would take time, and move the caller's random state.
    return GPT.skip_init(GPTConfig.from_dict(record["model"]), torch.get_default_device())
