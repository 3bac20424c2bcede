"""`save` and `load`: the frozen heads of a model as two small files beside its weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError
from saf.files import write_json, write_tensors
from saf.models import GPT, GPTConfig
from saf.surgery import restore_, state_of

STATE, TENSORS, WEIGHTS, CONFIG = "saf.json", "saf.safetensors", "model.safetensors", "config.json"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `saf.json` and `saf.safetensors` (patterns, removed rows) and, for the project's GPT, the weights.

    A model loaded from the folder by `load` gives the same outputs bit for bit.
    """
    folder = Path(folder)
    state, tensors = state_of(model)
    if isinstance(model, GPT):
        write_tensors(folder / WEIGHTS, model.state_dict())
        write_json(folder / CONFIG, {"model": model.config.to_dict()})
    write_tensors(folder / TENSORS, tensors)
    write_json(folder / STATE, state)


def load(
    model_or_folder: nn.Module | str | Path, folder: str | Path | None = None, *, backend: str = "auto"
) -> nn.Module:
    """Load what `save` wrote: `load(folder)` builds the model, `load(model, folder)` fills a fresh one.

    Raises CheckpointError when files are missing or belong to another shape of model, InputError when a model
    is given without a folder.
    """
    if isinstance(model_or_folder, nn.Module):
        if folder is None:
            raise InputError("load(model, folder) needs the folder that save wrote")
        model, source = model_or_folder, Path(folder)
    else:
        source = Path(model_or_folder)
        model = GPT(GPTConfig.from_dict(read_json(source / CONFIG)["model"]))
    restore_(model, read_json(source / STATE), read_tensors(source / TENSORS), backend=backend)
    if isinstance(model, GPT):
        load_weights_(model, read_tensors(source / WEIGHTS))
    return model


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a model whose layout has been restored; raise CheckpointError naming what does not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not fit the model: {error}") from error


def read_json(path: Path) -> dict:
    """Read a JSON file; raise CheckpointError when it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise CheckpointError when it is missing or damaged."""
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
