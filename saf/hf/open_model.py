"""The model that a path means, whoever made it, with its data and its tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from saf.data import TokenData
from saf.errors import InputError
from saf.evaluate.model_facts import PARENT
from saf.machine import Device, pick_device
from saf.models.adapter import longest_input
from saf.opening import find_model, open_data
from saf.records.paths import means_transformers


@dataclass(frozen=True)
class Encoder:
    """Hold how a model's tokenizer makes tokens of text."""

    encode: Callable[[str], list[int]]
    """With the special tokens that the model is given at the beginning of a text, where it has any; none at its end."""
    bare: Callable[[str], list[int]]
    """Without them."""
    first: int | None
    """The token that a text begins with which has no other one before it; None where nothing tells."""
    bos: int | None = None
    """The tokenizer's token that begins a text; None where it has none."""

    def beginning(self, name: Path | str) -> int:
        """Return the token that begins a text; raise InputError where the tokenizer, of the model `name`, has none."""
        if self.bos is None:
            raise InputError(
                f"the tokenizer of {name} has no token that begins a text (BOS): its models were trained without one; "
                "leave --bos out"
            )
        return self.bos


@dataclass(frozen=True)
class OpenedModel:
    """Hold a model and what belongs to it."""

    model: nn.Module
    data: TokenData | None
    folder: Path
    hash: str | None
    """Of what was opened."""
    encoder: Callable[[], Encoder]
    """Opens its tokenizer."""
    parents: Sequence[str] = ()
    """Hashes of what it was frozen in, the nearest first, where its files tell."""

    @property
    def checkpoints(self) -> dict[str, str | None]:
        """Return the hashes of the model and of what it was made from, by role, for the head of a result."""
        roles = {PARENT + f" of {PARENT}" * place: parent for place, parent in enumerate(self.parents)}
        return {"model": self.hash, **roles}

    @property
    def longest(self) -> int:
        """Return the most tokens of an input; raise InputError where the model does not tell."""
        if (found := longest_input(self.model)) is None:
            raise InputError(
                f"the configuration of {type(self.model).__name__} does not tell how many positions it has"
            )
        return found


def transformers_folders() -> ModuleType:
    """Import what opens models of transformers; raise InputError where that package is missing."""
    try:
        from saf.hf import folders
    except ImportError as error:
        raise InputError(
            f"a model of transformers needs packages that are not there ({error}): pip install 'saf[hf]'"
        ) from error
    return folders


def lm_eval_tasks() -> ModuleType:
    """Import what puts tasks of lm-eval to a model; raise InputError where that package is missing."""
    try:
        from saf.hf import lm_eval
    except ImportError as error:
        raise InputError(
            f"zero-shot tasks need packages that are not there ({error}): pip install 'saf[eval]'"
        ) from error
    return lm_eval


def open_model(
    path: Path, data: Path | None, device: Device, *, precision: str = "auto", needs_data: bool = True
) -> OpenedModel:
    """Open a path's model and its data; a model of transformers is opened without data where it needs none.

    With precision "fp32" a model of transformers is opened in float32, whatever its files hold.

    Raises:
        InputError: There is no model, or no data.
        DataError: The data were made with another tokenizer than the model's.
        CheckpointError: The model's files are damaged.
    """
    chosen: torch.device = pick_device(device)
    if means_transformers(path):
        found = transformers_folders().TransformersFolder.find(path)
        opened = found.data(data) if needs_data or data is not None else None
        dtype = torch.float32 if precision == "fp32" else None
        return OpenedModel(found.model(chosen, dtype), opened, path, found.hash, found.encoder, found.parents)
    source = find_model(path, or_transformers=True)
    tokens = open_data(data, source)

    def encoder() -> Encoder:
        """Open the tokenizer of the data, which adds nothing to a text."""
        tokenizer = tokens.tokenizer()
        return Encoder(tokenizer.encode, tokenizer.encode, tokenizer.eot_id)

    hash_ = source.checkpoint.hash if source.checkpoint else None
    return OpenedModel(source.model(chosen), tokens, source.folder, hash_, encoder)
