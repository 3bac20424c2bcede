"""The patterns that `saf inspect` finds in a checkpoint or sidecar: kinds, sums, sizes, and how they are executed."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from saf.errors import CheckpointError
from saf.ops.toeplitz.tables import holds
from saf.patterns import CompactPattern, storage_report
from saf.records.files import read_json, read_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of values, where most models run; which one a checkpoint will meet is not known."""


def frozen_heads(path: Path) -> dict[str, Any]:
    """Return what a folder's saf.json tells of frozen heads: `frozen` pairs, the heads of the model and of a layer."""
    layers = read_json(path / "saf.json")["layers"]
    frozen = [[number, head] for number, layer in enumerate(layers) for head in layer["frozen"]]
    most = max(layer["num_heads"] for layer in layers)
    return {"frozen": frozen, "num_heads": sum(layer["num_heads"] for layer in layers), "heads_per_layer": most}


def patterns_by_layer(path: Path, frozen: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return each layer's frozen patterns: how many of each kind, their length in tokens, one SHA-256 of their values.

    `stored` counts the heads that backend toeplitz executes as T x T matrices: under "dense" those whose pattern is
    one, under a dtype of values the compact ones that it cannot hold as tables. Trainable patterns are never stored.
    Raises CheckpointError when a head's pattern is missing or not finite.
    """
    tensors, state = read_tensors(path / "saf.safetensors"), read_json(path / "saf.json")["layers"]
    layers = []
    for layer in sorted({layer for layer, _ in frozen}):
        kinds: Counter[str] = Counter()
        digest, length = hashlib.sha256(), 0
        compact: list[CompactPattern] = []
        for head in (head for at, head in frozen if at == layer):
            own = {
                name: tensor
                for name in ("alpha", "rho", "weights")
                if (tensor := tensors.get(f"{layer}.{head}.{name}")) is not None
            }
            if set(own) not in ({"alpha", "rho"}, {"weights"}) or not all(t.isfinite().all() for t in own.values()):
                raise CheckpointError(
                    f"{path}/saf.safetensors: the pattern of head ({layer}, {head}) is missing or damaged"
                )
            kinds["dense" if "weights" in own else "compact"] += 1
            if "weights" not in own and head not in state[layer].get("trainable", ()):
                compact.append(CompactPattern.from_parameters(own["alpha"], own["rho"]))
            for name, tensor in own.items():
                length = tensor.shape[-1]
                digest.update(f"{head}.{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        stored = {"dense": kinds["dense"], **_not_held(compact)}
        layers.append(
            {"layer": layer, "kinds": dict(kinds), "stored": stored, "length": length, "sha256": digest.hexdigest()}
        )
    return layers


def _not_held(patterns: Sequence[CompactPattern]) -> dict[str, int]:
    """Return how many compact patterns each dtype cannot hold as tables."""
    together = CompactPattern.stack(patterns) if patterns else None
    return {
        str(dtype).removeprefix("torch."): 0 if together is None else int((~holds(together, dtype)).sum())
        for dtype in DTYPES
    }


def pattern_storage(result: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that the frozen heads' patterns take in float32 in each form; nothing when none is frozen."""
    if not result["frozen"]:
        return {}
    heads = [(layer, head) for layer, head in result["frozen"]]
    length, per_layer = result["patterns"][0]["length"], result["heads_per_layer"]
    return asdict(storage_report(heads, length=length, num_heads=per_layer))
