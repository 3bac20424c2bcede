"""Opening what a command was pointed at: a checkpoint, a run's newest checkpoint, or a saved model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.data import TokenData
from saf.data.token_data import INDEX_FILE
from saf.errors import DataError, InputError
from saf.train.checkpoint import Checkpoint, find_checkpoint, open_checkpoint


@dataclass(frozen=True)
class Source:
    """A folder with a model: a verified checkpoint (of a run, perhaps), or what `saf.save` wrote."""

    folder: Path
    checkpoint: Checkpoint | None

    def model(self, device: torch.device) -> nn.Module:
        """Load the model with its frozen heads."""
        if self.checkpoint is not None:
            return self.checkpoint.model(device)
        from saf.sidecar import load

        return load(self.folder).to(device)

    @property
    def state(self) -> dict[str, Any]:
        """A checkpoint's state.json; empty for a saved model."""
        return self.checkpoint.state if self.checkpoint else {}

    @property
    def data_folder(self) -> str | None:
        """The data folder that the model was trained on, as recorded."""
        return (self.state.get("settings") or {}).get("data")


def open_source(path: Path, *, optimizer: bool = False) -> Source:
    """Find the model that `path` means; with `optimizer`, a checkpoint's optimiser is checked too.

    Raises:
        InputError: There is none.
        CheckpointError: A checkpoint is damaged.
    """
    if checkpoint := find_checkpoint(path):
        return Source(checkpoint, open_checkpoint(checkpoint, optimizer=optimizer))
    if (path / "saf.json").is_file() and (path / "model.safetensors").is_file():
        return Source(path, None)
    if (path / "saf.json").is_file():
        raise InputError(
            f"{path} holds the frozen heads of a model of another library; the commands run this project's GPT, "
            "saf.load(model, folder) takes the others"
        )
    reason = "holds no model" if path.is_dir() else "is not a folder"
    raise InputError(f"{path} {reason}; expected a checkpoint (step-N), a run, or a folder written by saf.save")


def open_data(folder: Path | None, source: Source) -> TokenData:
    """Open the data for a model: `folder`, or what the model was trained on when None.

    Raises:
        InputError: No folder given or recorded.
        DataError: The folder's tokenizer is not the one the model was trained with, or nothing tells which that was.
    """
    if folder is None and source.data_folder is None:
        raise InputError(f"{source.folder} does not tell its data; give --data, a folder made by `saf data prepare`")
    data = TokenData.open(folder or Path(str(source.data_folder)))
    if data.fingerprint != source.state.get("data_fingerprint", data.fingerprint):
        _check_tokenizer(data, source)
    return data


def trained_data(source: Source) -> TokenData | None:
    """Open the data that a model was trained on; None unless the recorded folder is visible and unchanged."""
    if source.data_folder is None or not (Path(source.data_folder) / INDEX_FILE).is_file():
        return None
    data = TokenData.open(source.data_folder)
    return data if data.fingerprint == source.state.get("data_fingerprint") else None


def _check_tokenizer(data: TokenData, source: Source) -> None:
    """Compare tokenizers; other text by the same one is fine."""
    expected, got = source.state.get("tokenizer"), data.index.tokenizer.sha256
    if expected is None:
        trained = trained_data(source)
        if trained is None:
            raise DataError(
                f"{source.folder} does not record its tokenizer, and the data it was trained on, {source.data_folder}, "
                f"are not there to compare; {data.folder} holds other data. Give --data, the folder it was trained on"
            )
        expected = trained.index.tokenizer.sha256
    if expected != got:
        raise DataError(
            f"{data.folder} was made with another tokenizer ({got[:12]}) than the model's training data "
            f"({expected[:12]}); prepare the text with the tokenizer of {source.data_folder}"
        )
