"""`inspect` returns the contents of a folder written by `saf`, after checking every recorded sum."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from saf.checkpoint import checkpoints, verify
from saf.data import TokenData
from saf.errors import CheckpointError, SafError
from saf.frozen_state import STATE_FILE, TENSORS_FILE, read_description, read_pattern, storage_of
from saf.heads import EDITED
from saf.opening import folder_hash, weight_files
from saf.records.files import read_json, read_metadata
from saf.records.run import Kind, RecordedRun, expect

_EVENT = ("number", "kind", "update", "reason", "heads", "loss_before", "loss_after", "seconds", "undone_by")
"""Values of an event in the result."""


def inspect(path: Path) -> dict[str, Any]:
    """Return the contents of a folder as plain values with its `kind`; a run's damaged checkpoints have a `problem`.

    Raises:
        InputError: The path is nothing that `saf` writes.
        CheckpointError: A checkpoint or saved model is damaged.
        DataError: A data folder is damaged.
    """
    kind = expect(path, Kind.CHECKPOINT, Kind.RUN, Kind.DATA, Kind.MODEL, Kind.HEADS, Kind.TRANSFORMERS)
    return _INSPECTED[kind](path)


def _checkpoint(path: Path) -> dict[str, Any]:
    manifest, state = verify(path), read_json(path / "state.json")
    return {
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
        **_frozen_heads(path, *read_description(path)),
    }


def _run(path: Path) -> dict[str, Any]:
    run = RecordedRun.open(path)
    steps = [_verified(folder) for folder in checkpoints(path / "checkpoints")]
    final, last = run.result or {}, run.metrics[-1] if run.metrics else {}
    return {
        "kind": "run",
        "path": str(path),
        "verified": all(entry["problem"] is None for entry in steps),
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
        **{name: (run.freeze or {}).get(name, []) for name in ("rejected", "fit_kl", "certificates", "exponential")},
        "config": run.config,
        "checkpoints": steps,
        "provenance": final.get("provenance"),
    }


def _verified(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's name and hash, or its problem."""
    try:
        return {"name": folder.name, "hash": verify(folder)["hash"], "problem": None}
    except CheckpointError as error:
        return {"name": folder.name, "hash": None, "problem": str(error)}


def _data(path: Path) -> dict[str, Any]:
    data = TokenData.open(path, verify=True)
    return {"kind": "data", "path": str(path), "verified": True, **data.index}


def _saved(path: Path) -> dict[str, Any]:
    """Check the files of saf.save, sums and patterns; `undoable` counts the heads with removed rows."""
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    # With ordinary weights of transformers too: heads in their base model's folder, or some that a model left behind.
    theirs = config.get("architectures") if "model_type" in config and "saf" not in config else None
    state, tensors = read_description(path)
    sums = state.get("sha256", {})
    return {
        "kind": "saved",
        "path": str(path),
        "base_model": theirs[0] if theirs and weight_files(path) else None,
        "verified": TENSORS_FILE in sums,
        "sha256": sums,
        "undoable": sum(".removed.query.weight" in name for name in tensors),
        **_frozen_heads(path, state, tensors),
    }


def _of_transformers(path: Path) -> dict[str, Any]:
    config, weights = read_json(path / "config.json", error=CheckpointError), weight_files(path)
    if not weights:
        raise CheckpointError(f"{path} has a config.json without weights; expected model.safetensors or shards")
    for file in weights:
        if file.suffix == ".safetensors":  # whose header says how much is to follow
            read_metadata(file, error=CheckpointError, advice="fetch or save it again")
    if config.get("saf") or (path / STATE_FILE).is_file():
        heads = _saved(path)
    else:
        layer = {"num_heads": int(config.get("num_attention_heads", 0))}
        ordinary = {"layers": [layer] * int(config.get("num_hidden_layers", 0))}
        heads = {"verified": False, "sha256": {}, "undoable": 0, **_frozen_heads(path, ordinary, {})}
    return {
        **heads,
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


def _frozen_heads(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `frozen` and `pruned` pairs of a folder's description, its patterns by layer, and their bytes.

    Raises CheckpointError when a head's pattern is missing or not finite.
    """
    layers, patterns, saved, length = state["layers"], list[dict[str, Any]](), 0, 0
    pairs = {kind: [(n, head) for n, layer in enumerate(layers) for head in layer.get(kind, ())] for kind in EDITED}
    for number in sorted({layer for layer, _ in pairs["frozen"]}):
        kinds: Counter[str] = Counter()
        size = 0
        for head in layers[number]["frozen"]:
            try:
                pattern = read_pattern(tensors, (number, head), trainable=False)
            except SafError as error:
                where = f"the pattern of head ({number}, {head})"
                raise CheckpointError(f"{path / TENSORS_FILE}: {where}: {error}") from error
            kinds[pattern.kind] += 1
            size += sum(tensors[f"{number}.{head}.{name}"].nbytes for name in pattern.parts)
            length = pattern.length
        patterns.append({"layer": number, "kinds": dict(kinds), "length": length, "bytes": size})
        saved += size
    most = max((layer["num_heads"] for layer in layers), default=0)
    sizes = asdict(replace(storage_of(pairs["frozen"], length=length, num_heads=most), parameters=saved))
    return {
        **{kind: [list(head) for head in heads] for kind, heads in pairs.items()},
        "num_heads": sum(layer["num_heads"] for layer in layers),
        "heads_per_layer": most,
        "patterns": patterns,
        "storage": {name: size for name, size in sizes.items() if size is not None} if patterns else {},
    }
