"""A calibration kept on disk layer by layer, so that an interrupted one goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for, unwrap
from saf.calibration.capture import Sequences
from saf.calibration.plan import lowered_dtype
from saf.errors import CheckpointError
from saf.heads import HeadSet
from saf.ops.operator import product_precision
from saf.records.files import check_file, file_hash, read_json, read_tensors, to_json, write_json, write_tensors
from saf.records.folders import new_files, new_folder

SCHEMA = "saf.calibration/2"
INDEX, TENSORS, RECORD = "calibration.json", "statistics.safetensors", "layer.json"
_OTHER_FOLDER = "remove it, or name a new folder"


class LayerFolder:
    """Keep the finished layers of one calibration: `calibration.json` says of what, then a folder a layer.

    A layer's folder is whole or not there: its tensors, and their SHA-256.
    """

    def __init__(self, folder: str | Path, inputs: Mapping[str, Any]):
        """Begin in an empty folder or go on in one.

        Raises:
            CheckpointError: The folder holds something else, or the calibration of other inputs; says which.
        """
        self.folder = Path(folder)
        index = self.folder / INDEX
        if not index.is_file():
            if self.folder.exists() and (not self.folder.is_dir() or any(map(_counts, self.folder.iterdir()))):
                raise CheckpointError(f"{self.folder} holds something that is no calibration; name a new folder")
            with new_files(self.folder) as new:
                write_json(new / INDEX, {"schema": SCHEMA, **inputs})
        found = read_json(index, error=CheckpointError, advice=_OTHER_FOLDER)
        if found.get("schema") != SCHEMA:
            raise CheckpointError(f"{index} has schema {found.get('schema')!r}; expected {SCHEMA!r}: {_OTHER_FOLDER}")
        expected = to_json({"schema": SCHEMA, **inputs})
        differing = [name for name in expected if found.get(name) != expected[name]]
        if differing:
            listed = "; ".join(f"{n}: {_short(found.get(n))} there, {_short(expected[n])} now" for n in differing)
            raise CheckpointError(
                f"{index} tells of a calibration of other inputs ({listed}); name a new folder, or remove this one"
            )

    def finished(self, layers: Sequence[int]) -> list[int]:
        """Return which of `layers` are there."""
        return [layer for layer in layers if self._path(layer).is_dir()]

    def write(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a finished layer."""
        with new_folder(self._path(layer), replace=True) as new:
            path = write_tensors(new / TENSORS, tensors)
            write_json(new / RECORD, {"schema": SCHEMA, "layer": layer, "sha256": file_hash(path)})

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return a finished layer's tensors; raise CheckpointError naming a file that is missing or damaged."""
        folder = self._path(layer)
        advice = f"remove {folder.name} to have layer {layer} measured again"
        recorded = read_json(folder / RECORD, error=CheckpointError, advice=advice)
        if not isinstance(recorded.get("sha256"), str):
            raise CheckpointError(f"{folder / RECORD} does not tell the SHA-256 of {TENSORS}; {advice}")
        check_file(folder / TENSORS, sha256=recorded["sha256"], error=CheckpointError, advice=advice)
        return read_tensors(folder / TENSORS, error=CheckpointError, advice=advice)

    def _path(self, layer: int) -> Path:
        """Return the folder of a layer."""
        return self.folder / f"layer-{layer:03d}"


def inputs_of(
    model: nn.Module,
    sequences: Sequences,
    *,
    heads: HeadSet,
    collect: Sequence[str],
    positions: Sequence[int],
) -> dict[str, Any]:
    """Return what a calibration's numbers depend on, as JSON values."""
    device = adapter_for(model).device
    lowered = lowered_dtype(device)
    return {
        "sequences": sequences.hash,
        "num_sequences": len(sequences.lengths),
        "length": sequences.length,
        "batches": [len(batch) for batch in sequences.ids],
        "model": model_hash(model),
        "heads": heads.to_list(),
        "collect": sorted(collect),
        "positions": list(positions),
        "device": device.type,
        "autocast": None if lowered is None else str(lowered),
        "float32_products": product_precision(torch.float32),
    }


def model_hash(model: nn.Module) -> str:
    """Return the SHA-256 of everything a forward pass reads: structure, head layouts, parameters, all buffers.

    Frozen heads are among the buffers, or among the parameters when they train.
    """
    inner = unwrap(model)
    digest = hashlib.sha256(repr(inner).encode())
    for site in adapter_for(model).sites():
        digest.update(repr(site.layout).encode())
    for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _counts(path: Path) -> bool:
    """Return whether a file belongs to a whole write."""
    # What a killed write leaves behind begins with a dot.
    return not path.name.startswith(".")


def _short(value: Any) -> str:
    """Return a value as JSON, shortened for messages."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]}..."
