"""The model that a path of a command means, whoever made it, and its data."""

from pathlib import Path
from types import ModuleType

from torch import nn

from saf.data import TokenData
from saf.errors import InputError
from saf.machine.execution import Device, pick_device
from saf.opening import find_model, open_data
from saf.records.paths import means_transformers


def transformers_folders() -> ModuleType:
    """Import what opens models of transformers; raise InputError where that package is missing."""
    try:
        from saf.integrations.transformers import folders
    except ImportError as error:
        raise InputError(
            f"a model of transformers needs packages that are not there ({error}): pip install 'saf[hf]'"
        ) from error
    return folders


def open_model(
    path: Path, data: Path | None, device: Device
) -> tuple[nn.Module, TokenData, Path, str | None, int | None]:
    """Return a path's model, its data, its folder, the hash of what is there, and its longest input where it tells.

    Raises:
        InputError: There is no model, or no data.
        DataError: The data were made with another tokenizer than the model's.
        CheckpointError: The model's files are damaged.
    """
    if means_transformers(path):
        folders = transformers_folders()
        found = folders.TransformersFolder.find(path)
        opened = found.data(data)
        model = found.model(pick_device(device))
        return model, opened, path, found.hash, folders.longest_input(model)
    found = find_model(path)
    opened = open_data(data, found)
    hash_ = found.checkpoint.hash if found.checkpoint else None
    return found.model(pick_device(device)), opened, found.folder, hash_, None
