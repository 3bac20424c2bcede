"""Checkpoints of a run: each is a folder of safetensors and JSON, written whole or not at all, verified when opened.

`save_checkpoint` writes one, `open_checkpoint` reads it back: the model, the optimiser, and state.json with the rest of
the run. A folder has the same files whatever the number of ranks that trained.
"""

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

from saf.distributed import is_rank0, on_rank0, whole_tensor
from saf.errors import CheckpointError, InputError
from saf.frozen_state import description_of, load_weights_, restore_
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.optimizer_state import mark_head_order
from saf.records.files import (
    check_file,
    entries_hash,
    file_hash,
    new_folder,
    read_json,
    read_tensors,
    remove_folder_,
    to_json,
    write_json,
)
from saf.records.run import MANIFEST, Kind, expect, kind_of

SCHEMA = "saf.checkpoint/1"
"""The schema that manifest.json names."""
_NAME = re.compile(r"step-(\d+)(-frozen)?")


# --- writing


def step_name(update: int, *, after_freezing: bool = False) -> str:
    """Return a checkpoint's folder name; "-frozen" marks one that was written after the update's freezing events."""
    return f"step-{update}-frozen" if after_freezing else f"step-{update}"


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: AdamW,
    *,
    state: dict[str, Any],
    parent: str | None = None,
    add_files: Callable[[Path], Any] | None = None,
) -> str:
    """Write one checkpoint and return its hash; `state` must hold `update` and `model`, the config of the model.

    Every rank calls this, and rank 0 writes. `add_files` is called with the folder, to write further files into it.

    Raises OSError where the folder exists, or the disk or a quota is full; earlier checkpoints are untouched.
    """
    groups, moments = groups_and_moments(optimizer, model)
    # Before the work of rank 0: gathering sharded tensors takes every rank.
    tensors = {"model": _on_cpu(model.state_dict()), "optimizer": _on_cpu(moments)}

    def write() -> str:
        with new_folder(path) as folder:
            heads, patterns = description_of(adapter_for(model))
            tensors["saf"] = _on_cpu(patterns)
            for name, values in tensors.items():
                save_file(values, folder / f"{name}.safetensors")
            # Not by write_json: a schedule's state may hold infinities and NaN, which Python alone writes and reads.
            records = {"saf": heads, "state": {**state, "optimizer_groups": groups}}
            for name, values in records.items():
                (folder / f"{name}.json").write_text(json.dumps(values) + "\n", encoding="utf-8")
            if add_files is not None:
                add_files(folder)
            return write_manifest(folder, update=int(state["update"]), parent=parent)

    return on_rank0(write)


def groups_and_moments(optimizer: AdamW, model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the groups, as names and settings, and every moment and step count by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, tensors = [], {}
    for group in optimizer.param_groups:
        settings = {"weight_decay": group["weight_decay"], "betas": list(group["betas"]), "lr": group["lr"]}
        groups.append({"names": [names[parameter] for parameter in group["params"]], **settings})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})  # none before the first step
            tensors |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return groups, tensors


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU copies on rank 0, nothing on other ranks; all must call this, since it gathers sharded tensors."""
    copies = {}
    # One at a time: a device has room for one whole tensor next to its shards.
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor.detach())
        if is_rank0():
            copies[name] = whole.to("cpu", copy=True).contiguous()  # safetensors refuses tensors that share storage
    return copies


# --- reading


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    hash: str
    parent: str | None
    """Hash of the checkpoint that its run started from."""
    state: dict[str, Any]
    """The contents of its state.json."""

    @property
    def update(self) -> int:
        return int(self.state["update"])

    @property
    def shape(self) -> GPTConfig:
        return GPTConfig.from_dict(self.state["model"])

    def model(
        self, device: torch.device | str = "cpu", *, backend: str | None = None, shape: GPTConfig | None = None
    ) -> GPT:
        """Build the model with its frozen heads; they run by `backend`, by default the one that they were saved with.

        Where the saved one cannot run here, a warning says so. A `shape` may have another length than the saved one.
        """
        model = GPT.skip_init(shape or self.shape, device)
        heads = read_json(self.path / "saf.json", error=CheckpointError)
        patterns = read_tensors(self.path / "saf.safetensors", error=CheckpointError)
        restore_(model, heads, patterns, backend=backend)
        load_weights_(model, self.tensors("model", device), self.path)
        return model

    def optimizer(self, model: nn.Module, *, device: torch.device | str | None = None) -> AdamW:
        """Build the optimiser of this checkpoint's `model`, with moments on a `device`, by default the model's."""
        groups, tensors = self.state["optimizer_groups"], self.tensors("optimizer")
        parameters = dict(model.named_parameters())
        filled = [{**group, "params": [parameters[name] for name in group["names"]]} for group in groups]
        optimizer = AdamW([group for group in filled if group["params"]], fused=True)
        for name, value in tensors.items():
            owner, _, key = name.rpartition(".")
            parameter = parameters[owner]
            # Fused kernels do not check shapes: they would train wrong numbers silently.
            assert key == "step" or value.shape == parameter.shape, f"{name} has the shape {list(value.shape)}"
            optimizer.state[parameter][key] = value.to(device or parameter.device)
        mark_head_order(optimizer)  # the state was saved for the heads in the order that the model has now
        return optimizer

    def tensors(self, name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        return read_tensors(self.path / f"{name}.safetensors", device=device, error=CheckpointError)


def open_checkpoint(path: Path | str, *, optimizer: bool = True) -> Checkpoint:
    """Verify a checkpoint's checksums and read its state; with `optimizer=False` the optimiser's file may be missing.

    Raises:
        CheckpointError: No checkpoint, or a file is missing or damaged; the message names the file and the newest
            earlier checkpoint that is whole.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        expect(path, Kind.CHECKPOINT, error=CheckpointError)
    try:
        manifest = verify(path, optimizer=optimizer)
    except CheckpointError as error:
        if (whole := _newest_whole_before(path)) is None:
            raise
        advice = f"The previous checkpoint {whole} is whole: to go on from it, move {path.name} away"
        raise CheckpointError(f"{error}. {advice}") from None
    state = read_json(path / "state.json", error=CheckpointError)
    return Checkpoint(path, manifest["hash"], manifest["parent"], state)


def _newest_whole_before(path: Path) -> Path | None:
    for older in reversed([other for other in checkpoints(path.parent) if _order(other) < _order(path)]):
        with suppress(CheckpointError):
            verify(older)
            return older
    return None


# --- the manifest


def write_manifest(folder: Path, *, update: int, parent: str | None) -> str:
    """Write manifest.json, which lists every file with its SHA-256; return its hash, which covers all other entries."""
    # A child's config.json names this hash: it stands for every byte that the child began with.
    files = {path.name: {"sha256": file_hash(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    entries = {"schema": SCHEMA, "update": update, "parent": parent, "files": files}
    entries["hash"] = entries_hash(entries)
    write_json(folder / MANIFEST, entries)
    return str(entries["hash"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError when it is missing or was changed."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    entries = read_json(path, schema=SCHEMA, error=CheckpointError)
    if (recorded := entries.get("hash")) != (computed := entries_hash(entries)):
        raise CheckpointError(f"{path} is damaged: expected hash {recorded}, got {computed}")
    return entries


def verify(folder: Path, *, optimizer: bool = True) -> dict[str, Any]:
    """Check the checksum of every file, or of all but the optimiser's, and return the manifest.

    Raises CheckpointError naming a file that is missing or differs.
    """
    entries = read_manifest(folder)
    for name, recorded in entries["files"].items():
        # Who only reads the model may have deleted optimizer.safetensors, two thirds of a checkpoint.
        if optimizer or name != "optimizer.safetensors":
            check_file(folder / name, size=recorded["bytes"], sha256=recorded["sha256"], error=CheckpointError)
    return entries


def checkpoint_hash(path: Path) -> str:
    """Return a checkpoint's recorded hash, from its manifest alone."""
    return str(read_manifest(path)["hash"])


# --- the checkpoints of a folder


def checkpoints(folder: Path | str) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first, damaged ones too; `open_checkpoint` refuses those."""
    return sorted((path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)), key=_order)


def _order(path: Path) -> tuple[int, ...]:
    """Return the sort key of a checkpoint: its update, then whether it is after freezing; empty for another name."""
    match = _NAME.fullmatch(path.name)  # as text, step-500 would come after step-1000
    return (int(match[1]), bool(match[2])) if match else ()


def latest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint in `folder`, or None."""
    return next(reversed(checkpoints(folder)), None)


def find_checkpoint(path: Path | str) -> Path | None:
    """Return the checkpoint that a path means: itself, or a run's newest; None when it is neither."""
    path, kind = Path(path), kind_of(path)
    if kind is not Kind.RUN:
        return path if kind is Kind.CHECKPOINT else None
    if (newest := latest(path / "checkpoints")) is None:
        raise InputError(f"{path} is a run without a complete checkpoint")
    return newest


def refers_to_checkpoint(path: Path | str, checkpoint: Path | str) -> bool:
    """Return whether `path` is the folder of `checkpoint`, or of the run that wrote it; both may be relative."""
    own = Path(checkpoint).resolve()
    runs = [own.parents[1]] if own.parent.name == "checkpoints" else []
    return Path(path).resolve() in (own, *runs)


def remove_old_checkpoints_(folder: Path, *, keep: int, protect: set[str]) -> None:
    """Remove all checkpoints but the newest `keep` and those named in `protect`; `keep=0` removes none."""
    # Protected ones do not count among the newest.
    if keep:
        removable = [path for path in checkpoints(folder) if path.name not in protect]
        for path in removable[:-keep]:
            remove_folder_(path)


# --- random state


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators (CPU, and CUDA when in use).

    A score or a task of one's own may draw from them.
    """
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return {
        "python": to_json(random.getstate()),
        "numpy": to_json(np.random.get_state(legacy=False)),
        "torch": [state.cpu().numpy().tobytes().hex() for state in states],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the global generators back in captured states; of CUDA, as many as both this machine and the state have."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    cpu, *cuda = (torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["torch"])
    torch.set_rng_state(cpu)
    for device, own in zip(range(torch.cuda.device_count()), cuda, strict=False):
        torch.cuda.set_rng_state(own, device)
