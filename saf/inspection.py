"""`inspect` returns the contents of a folder written by `saf`, after checking every recorded sum."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from saf.checkpoint import checkpoints, verify
from saf.data import TokenData
from saf.errors import CheckpointError, SafError
from saf.frozen_state import read_pattern
from saf.heads import EDITED
from saf.hf.card import folder_hash, weight_files
from saf.records.files import read_json, read_metadata, read_tensors
from saf.records.run import Kind, RecordedRun, expect
from saf.sidecar import check_sums
from saf.storage import storage_report

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
        **_frozen_heads(path),
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
    # With ordinary weights of transformers too: a sidecar in its base model's folder, or one that a model left behind.
    theirs = config.get("architectures") if "model_type" in config and "saf" not in config else None
    sums = check_sums(path, read_json(path / "saf.json"))
    return {
        "kind": "saved",
        "path": str(path),
        "base_model": theirs[0] if theirs and weight_files(path) else None,
        "verified": "saf.safetensors" in sums,
        "sha256": sums,
        "undoable": sum(".removed.query.weight" in name for name in read_tensors(path / "saf.safetensors")),
        **_frozen_heads(path),
    }


def _of_transformers(path: Path) -> dict[str, Any]:
    config, weights = read_json(path / "config.json", error=CheckpointError), weight_files(path)
    if not weights:
        raise CheckpointError(f"{path} has a config.json without weights; expected model.safetensors or shards")
    for file in weights:
        if file.suffix == ".safetensors":  # whose header says how much is to follow
            read_metadata(file, error=CheckpointError, advice="fetch or save it again")
    layers, heads = int(config.get("num_hidden_layers", 0)), int(config.get("num_attention_heads", 0))
    ordinary = {"frozen": [], "pruned": [], "num_heads": layers * heads, "patterns": [], "sha256": {}, "undoable": 0}
    lost = [name for name in ("saf.json", "saf.safetensors") if not (path / name).is_file()]
    if config.get("saf") and lost:
        raise CheckpointError(
            f"{path}: config.json lists frozen heads, and {' and '.join(lost)} {'are' if lost[1:] else 'is'} missing; "
            "copy what is missing from the folder that save_pretrained wrote"
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
    """Return the `frozen` and `pruned` pairs of a folder's saf.json, its patterns by layer, and their storage."""
    layers = read_json(path / "saf.json")["layers"]
    pairs = {
        kind: [[number, head] for number, layer in enumerate(layers) for head in layer.get(kind, ())] for kind in EDITED
    }
    most = max(layer["num_heads"] for layer in layers)
    patterns = _patterns_by_layer(path, layers)
    counts = {"num_heads": sum(layer["num_heads"] for layer in layers), "heads_per_layer": most}
    return {**pairs, **counts, "patterns": patterns, "storage": _storage(pairs["frozen"], patterns, most)}


def _patterns_by_layer(path: Path, layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each layer with frozen heads, the kinds of their patterns, their length and bytes.

    Raises CheckpointError when a head's pattern is missing or not finite.
    """
    tensors, by_layer = read_tensors(path / "saf.safetensors"), []
    for number, layer in enumerate(layers):
        if not layer["frozen"]:
            continue
        kinds: Counter[str] = Counter()
        length = size = 0
        for head in layer["frozen"]:
            try:
                pattern = read_pattern(tensors, f"{number}.{head}.", trainable=False)
            except SafError as error:
                raise CheckpointError(
                    f"{path}/saf.safetensors: the pattern of head ({number}, {head}) is missing or damaged: {error}"
                ) from error
            kinds[pattern.kind] += 1
            length = pattern.length
            size += sum(tensors[f"{number}.{head}.{name}"].nbytes for name in pattern.parts)
        by_layer.append({"layer": number, "kinds": dict(kinds), "length": length, "bytes": size})
    return by_layer


def _storage(
    frozen: Sequence[Sequence[int]], patterns: Sequence[Mapping[str, Any]], per_layer: int
) -> dict[str, int | None]:
    """Return the bytes of the patterns in float32 in each form, and of their saved `parameters`; empty without any."""
    if not frozen:
        return {}
    heads = [(layer, head) for layer, head in frozen]
    report = storage_report(heads, length=patterns[0]["length"], num_heads=per_layer)
    sizes = asdict(replace(report, parameters=sum(layer["bytes"] for layer in patterns)))
    return {name: size for name, size in sizes.items() if size is not None}
