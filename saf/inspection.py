"""What a folder written by `saf` holds, and whether it is whole: the facts that `saf inspect` shows."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from saf.checkpoint import step_folders
from saf.data import TokenData
from saf.errors import CheckpointError, SafError
from saf.frozen_state import read_pattern
from saf.heads import EDITED
from saf.hf.card import folder_hash, weight_files
from saf.ops import FrozenHeads
from saf.ops.toeplitz.tables import holds
from saf.patterns import CompactPattern
from saf.records.files import read_json, read_metadata, read_tensors
from saf.records.folders import verify
from saf.records.paths import Kind, expect
from saf.records.run import RecordedRun
from saf.sidecar import check_sums
from saf.storage import pattern_bytes, storage_report

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of values, where most models run; which one a checkpoint will meet is not known."""


def inspect(path: Path) -> dict[str, Any]:
    """Return what a folder holds, as plain values with its `kind`, after checking every recorded sum.

    A run's damaged checkpoints are listed with their problem.

    Raises:
        InputError: The path is nothing that `saf` writes.
        CheckpointError: A checkpoint or saved model is damaged.
        DataError: A data folder is damaged.
    """
    kind = expect(path, Kind.CHECKPOINT, Kind.RUN, Kind.DATA, Kind.MODEL, Kind.HEADS, Kind.TRANSFORMERS)
    return _INSPECTED[kind](path)


def _checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, its files checked."""
    manifest, state = verify(path), read_json(path / "state.json")
    heads = _frozen_heads(path)
    result = {
        "kind": "checkpoint",
        "path": str(path),
        "verified": True,
        "update": manifest["update"],
        "tokens": state.get("tokens"),
        "hash": manifest["hash"],
        "parent": manifest["parent"],
        "model": state["model"],
        "data_fingerprint": state.get("data_fingerprint"),
        "files": manifest["files"],
        "patterns": _patterns_by_layer(path, heads["frozen"]),
        **heads,
    }
    return result | {"storage": _storage(path, result)}


_EVENT = ("number", "kind", "update", "reason", "heads", "loss_before", "loss_after", "seconds", "undone_by")
"""Values of an event that are shown."""


def _run(path: Path) -> dict[str, Any]:
    """Return what a run's folder holds, its checkpoints checked."""
    run = RecordedRun.open(path)
    checkpoints = [_verified(folder) for folder in step_folders(path / "checkpoints")]
    final, last = run.result or {}, run.metrics[-1] if run.metrics else {}
    return {
        "kind": "run",
        "path": str(path),
        "verified": all(entry["problem"] is None for entry in checkpoints),
        "arm": run.arm,
        "finished": run.result is not None,
        "missing": run.missing,
        "updates": final.get("updates", last.get("update")),
        "tokens": final.get("tokens", last.get("tokens")),
        "report_perplexity": final.get("report_perplexity"),
        "num_heads": run.num_heads,
        "frozen": run.frozen_heads,
        "pruned": run.pruned_heads,
        "events": [{name: event.values.get(name) for name in _EVENT} for event in run.events],
        "rejected": (run.freeze or {}).get("rejected", []),
        "fit_kl": (run.freeze or {}).get("fit_kl", []),
        "certificates": (run.freeze or {}).get("certificates", []),
        "exponential": (run.freeze or {}).get("exponential", []),
        "config": run.config,
        "checkpoints": checkpoints,
        "provenance": final.get("provenance"),
    }


def _verified(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's name and hash, or what is wrong with it."""
    try:
        return {"name": folder.name, "hash": verify(folder)["hash"], "problem": None}
    except CheckpointError as error:
        return {"name": folder.name, "hash": None, "problem": str(error)}


def _data(path: Path) -> dict[str, Any]:
    """Return what a prepared folder holds, its files checked."""
    data = TokenData.open(path, verify=True)
    return {"kind": "data", "path": str(path), "verified": True, **data.index}


def _saved(path: Path) -> dict[str, Any]:
    """Check what saf.save wrote, sums and patterns; `undoable` heads have the rows that were removed."""
    heads, model = _frozen_heads(path), path / "config.json"
    # With weights of transformers beside it: a sidecar in its base model's folder, or one that a model left behind.
    theirs = read_json(model).get("architectures") if model.is_file() and "model_type" in read_json(model) else None
    sums = check_sums(path, read_json(path / "saf.json"))
    result = {
        "kind": "saved",
        "path": str(path),
        "beside": theirs[0] if theirs and weight_files(path) else None,
        "verified": "saf.safetensors" in sums,
        "patterns": _patterns_by_layer(path, heads["frozen"]),
        "sha256": sums,
        "undoable": sum(".removed.query.weight" in name for name in read_tensors(path / "saf.safetensors")),
        **heads,
    }
    return result | {"storage": _storage(path, result)}


def _of_transformers(path: Path) -> dict[str, Any]:
    """Return what a folder of a model of transformers holds, with its frozen heads where it has some."""
    config, weights = read_json(path / "config.json", error=CheckpointError), weight_files(path)
    if not weights:
        raise CheckpointError(
            f"{path} has a config.json, but no weights beside it; expected model.safetensors or shards"
        )
    for file in weights:
        if file.suffix == ".safetensors":  # whose header tells how much is to follow
            read_metadata(file, error=CheckpointError, advice="fetch or save it again")
    layers, heads = int(config.get("num_hidden_layers", 0)), int(config.get("num_attention_heads", 0))
    ordinary = {"frozen": [], "pruned": [], "num_heads": layers * heads, "patterns": [], "sha256": {}, "undoable": 0}
    lost = [name for name in ("saf.json", "saf.safetensors") if not (path / name).is_file()]
    if config.get("saf") and lost:
        raise CheckpointError(
            f"{path}: config.json tells of frozen heads, and {' and '.join(lost)} {'are' if lost[1:] else 'is'} "
            "missing beside it; copy what is missing from the folder that save_pretrained wrote"
        )
    saved = _saved(path) if (path / "saf.json").is_file() else {"verified": False, **ordinary}
    return {
        **saved,
        "kind": "transformers",
        "path": str(path),
        "architecture": (config.get("architectures") or [config["model_type"]])[0],
        "hash": folder_hash(path),
        "weights": {file.name: file.stat().st_size for file in weights},
    }


_INSPECTED: dict[Kind, Callable[[Path], dict[str, Any]]] = {
    Kind.CHECKPOINT: _checkpoint,
    Kind.RUN: _run,
    Kind.DATA: _data,
    Kind.MODEL: _saved,
    Kind.HEADS: _saved,
    Kind.TRANSFORMERS: _of_transformers,
}


def _frozen_heads(path: Path) -> dict[str, Any]:
    """Return what a folder's saf.json tells: `frozen` and `pruned` pairs, how many heads model and layers have."""
    layers = read_json(path / "saf.json")["layers"]
    pairs = {
        kind: [[number, head] for number, layer in enumerate(layers) for head in layer.get(kind, ())] for kind in EDITED
    }
    most = max(layer["num_heads"] for layer in layers)
    return {**pairs, "num_heads": sum(layer["num_heads"] for layer in layers), "heads_per_layer": most}


def _patterns_by_layer(path: Path, frozen: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
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
        compact: list[Any] = []
        for head in (head for at, head in frozen if at == layer):
            try:
                pattern = read_pattern(tensors, f"{layer}.{head}.", trainable=False)
            except SafError as error:
                raise CheckpointError(
                    f"{path}/saf.safetensors: the pattern of head ({layer}, {head}) is missing or damaged: {error}"
                ) from error
            kinds[pattern.kind] += 1
            length = pattern.length
            if pattern.kind == "compact" and head not in state[layer].get("trainable", ()):
                compact.append(pattern)
            for name in pattern.parts:
                tensor = tensors[f"{layer}.{head}.{name}"]
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


def _storage(path: Path, result: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that the frozen heads' patterns take in float32 in each form; nothing when none is frozen.

    `allocated` is what executes them when the model is loaded on a CPU with float32 weights.
    """
    if not result["frozen"]:
        return {}
    heads = [(layer, head) for layer, head in result["frozen"]]
    length, per_layer = result["patterns"][0]["length"], result["heads_per_layer"]
    logical = storage_report(heads, length=length, num_heads=per_layer)
    parameters, allocated = _held(path)
    return asdict(replace(logical, parameters=parameters, allocated=allocated))


def _held(path: Path) -> tuple[int, int]:
    """Return the bytes of a sidecar's patterns as they are saved, and of what executes them."""
    tensors, parameters, allocated = read_tensors(path / "saf.safetensors"), 0, 0
    for number, layer in enumerate(read_json(path / "saf.json")["layers"]):
        if layer["frozen"]:
            trained = layer.get("trainable", ())
            patterns = [read_pattern(tensors, f"{number}.{head}.", head in trained) for head in layer["frozen"]]
            parameters += sum(map(pattern_bytes, patterns))
            allocated += FrozenHeads.from_patterns(patterns, dtype=(torch.float32, torch.bfloat16)).allocated
    return parameters, allocated
