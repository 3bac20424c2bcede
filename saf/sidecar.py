"""`save` and `load`: the frozen heads of a model as two small files beside its weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError
from saf.models import GPT, GPTConfig
from saf.surgery import restore_, state_of

STATE, TENSORS, WEIGHTS, CONFIG = "saf.json", "saf.safetensors", "model.safetensors", "config.json"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `saf.json` and `saf.safetensors` (patterns, removed rows) and, for the project's GPT, the weights.

    A model loaded from the folder by `load` gives the same outputs bit for bit.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state, tensors = state_of(model)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / STATE).write_text(json.dumps(state, indent=1))
    if isinstance(model, GPT):
        save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps({"model": model.config.to_dict()}, indent=1))


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
