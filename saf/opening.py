"""`open_model` opens the model at a path, whatever wrote it, with its data and its tokenizer.

A path is a checkpoint, a run, a folder of `saf.save`, or a folder or hub name of a transformers model. `find_source`
returns the `ModelFiles` of any, `find_model` those of this project's models alone; saf/hf/folders.py has the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from saf.data import TextData, TokenData
from saf.errors import DataError, InputError
from saf.frozen_state import STATE_FILE, TENSORS_FILE
from saf.libraries import transformers_part
from saf.machine import Device, pick_device
from saf.models.adapter import longest_input
from saf.records.files import entries_hash, file_hash
from saf.records.run import Kind, expect, is_transformers_model, kind_of
from saf.saving import load
from saf.tasks.base import PARENT


@dataclass(frozen=True)
class Encoder:
    """How a model's tokenizer turns text into tokens."""

    # Two functions: lm-eval encodes contexts with special tokens, and choices by themselves without.
    encode: Callable[[str], list[int]]
    """Encodes a text with the special tokens that this model expects before it, and none behind it."""
    encode_plain: Callable[[str], list[int]]
    """Encodes a text without special tokens."""
    first_token: int | None
    """The token before a continuation without a context; None where the tokenizer has no such token."""
    bos: int | None = None
    """The tokenizer's beginning-of-text token (BOS); None where it has none."""

    def require_bos(self, name: Path | str) -> int:
        """Return the BOS token for `--bos`; raise InputError where the tokenizer of `name` has none."""
        if self.bos is None:
            raise InputError(f"the tokenizer of {name} must have a beginning-of-text token, got none: drop --bos")
        return self.bos


class ModelFiles(ABC):
    """A model on disk, whatever wrote it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's path, or its name on the hub."""

    @property
    @abstractmethod
    def hash(self) -> str:
        """One SHA-256 over the model's files."""

    @property
    @abstractmethod
    def parent(self) -> str | None:
        """The hash of the model that this one was frozen from, where its files do not record that themselves."""

    @abstractmethod
    def model(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """Open the model with its frozen heads, by default in the dtype of its files."""

    @abstractmethod
    def encoder(self, data: TokenData | None = None) -> Encoder:
        """Open the model's tokenizer. A model of this project has none of its own, and takes that of `data`."""

    @abstractmethod
    def data(self, path: Path | None) -> TokenData:
        """Open the data at `path`, prepared or a file of text, by default those that the model was trained on.

        Raises InputError without a path where there are no such data, DataError for data of another tokenizer.
        """


@dataclass(frozen=True)
class OpenedModel:
    """A model with its data and its files."""

    model: nn.Module
    data: TokenData | None
    source: ModelFiles

    @property
    def folder(self) -> Path:
        """The model's path, or its name on the hub."""
        return Path(self.source.name)

    @property
    def checkpoints(self) -> dict[str, str | None]:
        """Hashes of the model and of the model it was frozen from, by role, for a result's header."""
        return {"model": self.source.hash, PARENT: self.source.parent}

    @property
    def longest(self) -> int:
        """The most tokens of an input; raises InputError where the configuration has no limit."""
        if (longest := longest_input(self.model)) is None:
            raise InputError(f"the configuration of {type(self.model).__name__} must have max_position_embeddings")
        return longest

    def encoder(self) -> Encoder:
        """Open the model's tokenizer."""
        return self.source.encoder(self.data)


def open_model(
    path: Path | str, data: Path | None, device: Device, *, precision: str = "auto", needs_data: bool = True
) -> OpenedModel:
    """Open the model at `path`, and its data: `data`, or by default the data that it was trained on.

    A transformers model, which has its own tokenizer, opens without data unless they are named or needed. With
    precision "fp32" weights are float32, whatever their dtype in the files. Raises InputError where there is no model
    or no data, DataError for data of another tokenizer, and CheckpointError for damaged files.
    """
    source = find_source(path)
    # Before the weights, which take longest: wrong data are refused at once.
    needs_data = needs_data or data is not None or isinstance(source, ModelFolder)
    tokens = source.data(data) if needs_data else None
    model = source.model(pick_device(device), torch.float32 if precision == "fp32" else None)
    return OpenedModel(model, tokens, source)


def find_source(path: Path | str) -> ModelFiles:
    """Return the files of the model at `path`; raise as `find_model` does."""
    return transformers_part("folder").find(Path(path)) if is_transformers_model(path) else find_model(path)


def find_model(path: Path | str, *, optimizer: bool = False) -> "ModelFolder":
    """Return the folder of this project's model at `path`; with `optimizer`, verify a checkpoint's optimiser too.

    Raises InputError where the path is something else, CheckpointError for a damaged checkpoint.
    """
    path = Path(path)
    if kind_of(path) is Kind.HEADS:  # also an ordinary model saved into the folder of a frozen one
        remedy = "add them to one by saf.load, or move saf.json and saf.safetensors out"
        raise InputError(f"{path} is {Kind.HEADS.value}; {remedy}")
    kind = expect(path, Kind.CHECKPOINT, Kind.RUN, Kind.MODEL, Kind.TRANSFORMERS)
    if kind is Kind.TRANSFORMERS:
        raise InputError(f"{path} holds a model of transformers; open it by AutoModelForCausalLM.from_pretrained")
    if kind is Kind.MODEL:
        return ModelFolder(path, None)
    checkpoint = find_checkpoint(path)
    assert checkpoint is not None, "a checkpoint or run is one or raises"
    return ModelFolder(checkpoint, open_checkpoint(checkpoint, optimizer=optimizer))


@dataclass(frozen=True)
class ModelFolder(ModelFiles):
    """The files of a model of this project: a verified checkpoint, perhaps of a run, or a folder of `saf.save`."""

    folder: Path
    checkpoint: Checkpoint | None

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def parent(self) -> None:
        return None

    @property
    def hash(self) -> str:
        """The hash of a checkpoint's manifest, or of a saved model's saf.json, which has its files' checksums."""
        return self.checkpoint.hash if self.checkpoint else file_hash(self.folder / STATE_FILE)

    @property
    def state(self) -> dict[str, Any]:
        """A checkpoint's state.json; empty for a saved model."""
        return self.checkpoint.state if self.checkpoint else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run that trained the model; empty for a saved model."""
        return self.state.get("settings") or {}

    def model(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        model = load(self.folder) if self.checkpoint is None else self.checkpoint.model(device)
        return model.to(device, dtype)

    def encoder(self, data: TokenData | None = None) -> Encoder:
        tokenizer = (self.data(None) if data is None else data).tokenizer()
        return Encoder(tokenizer.encode, tokenizer.encode, tokenizer.eot_id)

    def data(self, path: Path | None) -> TokenData:
        # A file of text is encoded by the tokenizer of the training data.
        recorded, task = self.settings.get("data"), self.settings.get("task") or "text"
        if path is None and (recorded is None or task != "text"):
            got = "records no data" if recorded is None else f"was trained on {task}, which is no held-out text"
            raise InputError(f"{self.folder} {got}; give --data, a folder by `saf data prepare` with its tokenizer")
        if path is not None and path.is_file():
            if (trained := self.training_data()) is None:
                raise DataError(f"{path} needs the tokenizer of the training data, {recorded}, which is not there")
            return TextData(path, trained.tokenizer())
        data = TokenData.open(path or Path(str(recorded)))
        # A saved model records neither and takes any data. Other text by the same tokenizer is fine.
        same_data = data.fingerprint == self.state.get("data_fingerprint", data.fingerprint)
        expected = self.state.get("tokenizer")
        if not same_data and expected != data.tokenizer_hash:
            raise DataError(
                f"{data.folder} must have the tokenizer of the model's training data, {str(expected)[:12]}, got "
                f"{data.tokenizer_hash[:12]}; prepare the text with that data's tokenizer (--tokenizer FOLDER)"
            )
        return data

    def training_data(self) -> TokenData | None:
        """Open the data that the model was trained on; return None where the folder is missing or has changed."""
        recorded = self.settings.get("data")
        if recorded is None or kind_of(recorded) is not Kind.DATA:
            return None
        data = TokenData.open(recorded)
        return data if data.fingerprint == self.state.get("data_fingerprint") else None


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder of `save_pretrained`, sorted by name."""
    return sorted((*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")))


def folder_hash(folder: Path) -> str:
    """Return one SHA-256 over the configuration, weights and heads in a folder of `save_pretrained`."""
    # Without README.md: `saf compare --card` writes into it, and the model is still the one that was evaluated.
    files = [folder / "config.json", *weight_files(folder), folder / STATE_FILE, folder / TENSORS_FILE]
    return entries_hash({path.name: file_hash(path) for path in files if path.is_file()})
