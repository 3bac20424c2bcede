"""Checkpoints: safetensors and JSON in one folder a step, whole or absent, verified before use.

Weights are in `model.safetensors` and moments in `optimizer.safetensors`; where several processes hold them in shares,
each wrote a file of its own of both (`saf.train.shares`). Whoever opens a checkpoint need not know which.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

from saf.errors import CheckpointError, InputError
from saf.frozen_state import load_weights_, restore_, state_of
from saf.machine.processes import done_once, entered_once
from saf.models import GPT, GPTConfig
from saf.records.files import read_json, read_metadata, read_tensors
from saf.records.folders import MANIFEST, new_folder, no_room, read_manifest, remove_folder_, verify, write_manifest
from saf.records.paths import Kind, expect, kind_of
from saf.train.optimizer import optimizer_state, restore_optimizer
from saf.train.parallel import Engine
from saf.train.shares import fill_shares_, in_shares, read_shares, write_shares

WEIGHTS, OPTIMIZER = "model", "optimizer"
"""Files of weights and of moments, without what follows the name."""
_NAME = re.compile(r"step-(\d+)(-frozen)?")


@dataclass(frozen=True)
class Checkpoint:
    """Hold a verified checkpoint; `state` is its state.json."""

    path: Path
    hash: str
    parent: str | None
    state: dict[str, Any]

    @property
    def update(self) -> int:
        """Return how many updates were done."""
        return int(self.state["update"])

    def model(self, device: torch.device | str = "cpu", *, backend: str | None = None, filled: bool = True) -> GPT:
        """Build the model with its frozen heads and weights, on `device`; unless `filled`, weights hold anything.

        Without `backend` the heads are executed by the one that they were saved with, if it runs here; a warning says
        so if not.
        """
        model = GPT.undrawn(GPTConfig.from_dict(self.state["model"]), device)
        heads = read_json(self.path / "saf.json", error=CheckpointError)
        patterns = read_tensors(self.path / "saf.safetensors", error=CheckpointError)
        restore_(model, heads, patterns, backend=backend)
        if filled:
            load_weights_(model, self.tensors(WEIGHTS, device), self.path)
        return model

    def optimizer(self, model: GPT, *, filled: bool = True) -> AdamW:
        """Build the optimiser of `model` with its moments; unless `filled`, without."""
        return restore_optimizer(model, self.state["optimizer_groups"], self.tensors(OPTIMIZER) if filled else {})

    def fill_(self, engine: Engine, *, moments: bool = True) -> None:
        """Fill the weights, and the moments, that processes hold in shares: each reads its own, however it was saved.

        Every process of the group calls this. Raises CheckpointError for what does not fit.
        """
        fill_shares_(engine.module, engine.optimizer if moments else None, self.path)

    def tensors(self, name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return weights or moments, whole, whichever way they were written."""
        path = self.path / f"{name}.safetensors"
        if path.is_file():
            return read_tensors(path, device=device, error=CheckpointError)
        return read_shares(self.path, name)


def step_name(update: int, *, after_freezing: bool = False) -> str:
    """Return a checkpoint's folder name; the second form tells a state after an event from that before it."""
    return f"step-{update}-frozen" if after_freezing else f"step-{update}"


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: AdamW,
    *,
    state: dict[str, Any],
    parent: str | None = None,
    record: Callable[[Path], Any] | None = None,
) -> str:
    """Write one checkpoint and return its hash; `state` must hold `update` and `model` (its shape).

    In a group every process calls this: the first one writes, but for weights and moments that are held in shares
    (DTensors), of which each process writes its own. `record` writes further files into the folder that it is called
    with: they are there once the checkpoint is.

    Raises:
        CheckpointError: The disk is full, a quota or a limit on file sizes is reached, or the folder exists; earlier
            checkpoints are untouched.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists already; remove it, or write to another folder")
    groups, moments = optimizer_state(optimizer, model)
    tensors = {WEIGHTS: model.state_dict(), OPTIMIZER: moments}
    shared = in_shares(tensors[WEIGHTS])

    def write(folder: Path, shares: list[str]) -> str:
        """Write what one process writes beside the files of all, and the manifest last."""
        if missing := sorted({*shares} - {file.name for file in folder.iterdir()}):
            raise CheckpointError(
                f"{path} could not be written: the first process does not find {missing[0]} of another one; a run's "
                "folder must lie on a disk that the machines of all processes share"
            )
        for name, held in {} if shared else tensors.items():
            save_file(_plain(held), folder / f"{name}.safetensors")
        heads, patterns = state_of(model)
        save_file(_plain(patterns), folder / "saf.safetensors")
        _write_json(folder / "saf.json", heads)
        _write_json(folder / "state.json", {**state, "optimizer_groups": groups})
        if record is not None:
            record(folder)
        for file in folder.glob("*.safetensors"):
            read_metadata(file, error=CheckpointError)  # what its name says it is
        return write_manifest(folder, update=int(state["update"]), parent=parent)

    try:
        with entered_once(new_folder(path)) as folder:
            shares = [each for name, held in tensors.items() if shared for each in write_shares(folder, name, held)]
            return done_once(lambda: write(folder, shares))
    except (OSError, SafetensorError) as error:
        if (reason := no_room(error)) is None:
            raise
        raise CheckpointError(
            f"{reason}: checkpoint {path} could not be written; nothing of it was kept. {_previous(path)}"
            "Free some space, then resume the run or repeat the command"
        ) from error


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU copies that share no storage."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _write_json(path: Path, record: dict[str, Any]) -> None:
    # A schedule's state may hold infinities and NaN, which come back exactly only as Python writes them.
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def open_checkpoint(path: Path | str, *, optimizer: bool = True) -> Checkpoint:
    """Verify a checkpoint's sums and read its state; with `optimizer=False` the optimiser's file may be missing.

    Raises:
        CheckpointError: No checkpoint is there, or a file is missing or damaged; the message names the file and
            the newest earlier checkpoint that is whole.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        expect(path, Kind.CHECKPOINT, error=CheckpointError)
    try:
        manifest = verify(path, without=None if optimizer else OPTIMIZER)
    except CheckpointError as error:
        advice = f"To go on from it, move {path.name} away" if newest(path.parent) == path else ""
        raise CheckpointError(f"{error}. {_previous(path, advice)}".rstrip()) from None
    state = read_json(path / "state.json", error=CheckpointError)
    return Checkpoint(path, manifest["hash"], manifest["parent"], state)


def load_model(path: Path | str, device: torch.device | str = "cpu", *, backend: str | None = None) -> GPT:
    """Return the model of a verified checkpoint, frozen heads included."""
    return open_checkpoint(path, optimizer=False).model(device, backend=backend)


def find_checkpoint(path: Path | str) -> Path | None:
    """Return the checkpoint that a path means: itself, or a run's newest; None when it is neither.

    Raises:
        InputError: A run without a complete checkpoint.
    """
    path, kind = Path(path), kind_of(path)
    if kind is Kind.RUN and (newest := latest(path / "checkpoints")) is not None:
        return newest
    if kind is Kind.RUN:
        raise InputError(f"{path} is a run without a complete checkpoint")
    return path if kind is Kind.CHECKPOINT else None


def names(path: Path | str, checkpoint: Path | str) -> bool:
    """Return whether a path, however it is written, names a checkpoint: its folder, or that of the run it is of."""
    own = Path(checkpoint).resolve()
    runs = [own.parents[1]] if own.parent.name == "checkpoints" else []
    return Path(path).resolve() in (own, *runs)


def checkpoints(folder: Path | str) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; leftovers of killed writes are not among them."""
    return [path for path in step_folders(folder) if (path / MANIFEST).is_file()]


def step_folders(folder: Path | str) -> list[Path]:
    """Return what bears a checkpoint's name in `folder`, oldest first; one that lost its manifest too."""
    return sorted((path for path in Path(folder).glob("step-*") if _place(path)), key=_place)


def _place(path: Path) -> tuple[int, ...]:
    """Return what orders a run's checkpoints: updates done, and whether after an event; empty for another name."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), bool(match[2])) if match else ()


def newest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint in `folder`, complete or not, or None: where a run goes on, or why it cannot."""
    return next(reversed(step_folders(folder)), None)


def latest(folder: Path | str) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None."""
    return next(reversed(checkpoints(folder)), None)


def prune_checkpoints_(folder: Path, *, keep: int, protect: set[str]) -> None:
    """Remove all but the newest `keep` checkpoints and the protected names; `keep=0` removes none."""
    if keep:
        for path in [p for p in checkpoints(folder) if p.name not in protect][:-keep]:
            remove_folder_(path)


def _previous(path: Path, advice: str = "") -> str:
    """Name the newest whole checkpoint older than `path`, then advise; say nothing without older ones."""
    older = [other for other in checkpoints(path.parent) if _place(other) < _place(path)]
    for candidate in reversed(older):
        try:
            verify(candidate)
        except CheckpointError:
            continue
        return f"The previous checkpoint {candidate} is whole. {advice}"
    return f"No earlier checkpoint in {path.parent.resolve()} is whole. " if older else ""


def checkpoint_hash(path: Path) -> str:
    """Return a checkpoint's recorded hash without reading its tensors."""
    return str(read_manifest(path)["hash"])


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators (CPU, and CUDA when in use)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the global generators back in captured states; CUDA ones for as many devices as both sides have."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    for index, hexadecimal in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_from_hex(hexadecimal), index)


def _to_hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
