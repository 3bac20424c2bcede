"""Opening what a path means: the model of a checkpoint, of a run or of saf.save, and the data that belong to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from saf.data import TokenData
from saf.errors import DataError, InputError
from saf.records.files import file_hash
from saf.records.paths import Kind, expect, kind_of
from saf.sidecar import load


@dataclass(frozen=True)
class ModelFolder:
    """Hold where a model is: a verified checkpoint (of a run, perhaps), or what saf.save wrote."""

    folder: Path
    checkpoint: Checkpoint | None

    def model(self, device: torch.device) -> nn.Module:
        """Load the model with its frozen heads."""
        return load(self.folder).to(device) if self.checkpoint is None else self.checkpoint.model(device)

    @property
    def hash(self) -> str:
        """Return a checkpoint's hash, of its manifest; of a saved model the SHA-256 of its saf.json, which has sums."""
        return self.checkpoint.hash if self.checkpoint else file_hash(self.folder / "saf.json")

    @property
    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state.json; empty for a saved model."""
        return self.checkpoint.state if self.checkpoint else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run that trained the model; empty where nothing tells."""
        return self.state.get("settings") or {}

    @property
    def data_folder(self) -> str | None:
        """Return the data folder that the model was trained on, as recorded."""
        return self.settings.get("data")


def find_model(path: Path | str, *, optimizer: bool = False, or_transformers: bool = False) -> ModelFolder:
    """Return where the model is that `path` means; with `optimizer`, a checkpoint's optimiser is checked too.

    `or_transformers` says that the caller takes models of transformers, and has looked for one, for the message.

    Raises:
        InputError: There is none; the message says what was expected and what is there.
        CheckpointError: A checkpoint is damaged.
    """
    path = Path(path)
    if kind_of(path) is Kind.HEADS:
        raise InputError(
            f"{path} holds the frozen heads of a model of another library (saf.json), of which no config.json there "
            "tells: saf.load(model, folder) freezes that model by them; where the folder's own model has none, move "
            "saf.json and saf.safetensors out of it"
        )
    if kind_of(path) is Kind.TRANSFORMERS:
        raise InputError(f"{path} holds a model of transformers; open it by AutoModelForCausalLM.from_pretrained")
    kinds = (Kind.CHECKPOINT, Kind.RUN, Kind.MODEL, *([Kind.TRANSFORMERS] if or_transformers else []))
    if expect(path, *kinds) is Kind.MODEL:
        return ModelFolder(path, None)
    checkpoint = find_checkpoint(path)
    assert checkpoint is not None, "a checkpoint or run is one or raises"
    return ModelFolder(checkpoint, open_checkpoint(checkpoint, optimizer=optimizer))


def open_data(folder: Path | None, found: ModelFolder) -> TokenData:
    """Open the data for a model: `folder`, or what the model was trained on when None.

    Raises:
        InputError: No folder given, and none recorded, or the examples of a task.
        DataError: The folder's tokenizer is not the one the model was trained with, or nothing tells which that was.
    """
    if folder is None and found.data_folder is None:
        raise InputError(f"{found.folder} does not tell its data; give --data, a folder made by `saf data prepare`")
    if folder is None and (task := found.settings.get("task") or "text") != "text":
        raise InputError(
            f"{found.folder} was trained on {task}, which is no held-out text; give --data, a folder made by `saf data "
            "prepare` with its tokenizer"
        )
    data = TokenData.open(folder or Path(str(found.data_folder)))
    if data.fingerprint != found.state.get("data_fingerprint", data.fingerprint):
        _check_tokenizer(data, found)
    return data


def trained_data(found: ModelFolder) -> TokenData | None:
    """Open the data that a model was trained on; None unless the recorded folder is visible and unchanged."""
    if found.data_folder is None or kind_of(found.data_folder) is not Kind.DATA:
        return None
    data = TokenData.open(found.data_folder)
    return data if data.fingerprint == found.state.get("data_fingerprint") else None


def _check_tokenizer(data: TokenData, found: ModelFolder) -> None:
    """Compare tokenizers; other text by the same one is fine."""
    expected, got = found.state.get("tokenizer"), data.tokenizer_hash
    if expected is None:
        trained = trained_data(found)
        if trained is None:
            raise DataError(
                f"{found.folder} does not record its tokenizer, and the data it was trained on, {found.data_folder}, "
                f"are not there to compare; {data.folder} holds other data. Give --data, the folder it was trained on"
            )
        expected = trained.tokenizer_hash
    if expected != got:
        raise DataError(
            f"{data.folder} was made with another tokenizer ({got[:12]}) than the model's training data "
            f"({expected[:12]}); prepare the text with that data's tokenizer (--tokenizer FOLDER), or give --data "
            "another folder"
        )
