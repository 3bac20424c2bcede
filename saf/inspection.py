"""`inspect` returns the contents of a folder written by `saf`, after checking every recorded sum."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from saf.checkpoint import checkpoints, verify
from saf.data import TokenData
from saf.errors import CheckpointError, SafError
from saf.freeze_report import cost_words, current_events, loss_of
from saf.frozen_state import STATE_FILE, TENSORS_FILE, read_description, read_pattern, storage_of
from saf.heads import EDITED, HeadSet
from saf.opening import folder_hash, weight_files
from saf.records.files import read_json, read_metadata
from saf.records.run import STATE_AFTER, Kind, RecordedRun, expect, read_events

# Values of an event among the events of a run, and among the costs of a folder.
_EVENT = ("number", "kind", "update", "reason", "heads", "loss_before", "loss_after", "seconds", "undone_by")
_COST = ("loss_before", "loss_after", "loss_text", "loss_tokens", "worst_layer", "healing")


def inspect(path: Path) -> dict[str, Any]:
    """Return the contents of a folder as plain values with its `kind`; a run's damaged checkpoints have a `problem`.

    Raises:
        InputError: The path is nothing that `saf` writes.
        CheckpointError: A checkpoint or saved model is damaged.
        DataError: A data folder is damaged.
    """
    readers = {
        Kind.CHECKPOINT: _checkpoint,
        Kind.RUN: _run,
        Kind.DATA: lambda path: {"kind": "data", "verified": True, **TokenData.open(path, verify=True).index},
        Kind.MODEL: _saved,
        Kind.HEADS: _saved,
        Kind.TRANSFORMERS: _of_transformers,
    }
    return {"path": str(path), **readers[expect(path, *readers)](path)}


def _checkpoint(path: Path) -> dict[str, Any]:
    manifest, state = verify(path), read_json(path / "state.json")
    return {
        "kind": "checkpoint",
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
    freeze = run.freeze_report or {}
    # Damaged checkpoints are listed, not raised: a run has others, from which training may go on.
    steps = [_step(folder) for folder in checkpoints(path / "checkpoints")]
    final, last = run.result, run.metrics[-1] if run.metrics else {}  # before its end, what was logged last
    return {
        "kind": "run",
        "verified": all(entry["problem"] is None for entry in steps),
        "arm": run.arm,
        "finished": bool(run.result),
        "missing": final.get("missing", []),
        "updates": final.get("updates", last.get("update")),
        "tokens": final.get("tokens", last.get("tokens")),
        "report_perplexity": final.get("report_perplexity"),
        "num_heads": run.num_heads,
        "frozen": run.frozen_heads,
        "pruned": run.pruned_heads,
        "events": [{name: event.values.get(name) for name in _EVENT} for event in run.events],
        **{name: freeze.get(name, []) for name in ("rejected", "fit_kl", "certificates", "exponential")},
        "config": run.config,
        "checkpoints": steps,
        "provenance": final.get("provenance"),
    }


def _step(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's name and hash, or its problem."""
    try:
        return {"name": folder.name, "hash": verify(folder)["hash"], "problem": None}
    except CheckpointError as error:
        return {"name": folder.name, "hash": None, "problem": str(error)}


def _saved(path: Path) -> dict[str, Any]:
    """Check the files of saf.save, sums and patterns; `undoable` counts the heads with removed rows."""
    config = _config_of(path)
    # A folder of transformers whose config.json has no entry `saf` holds ordinary weights: the heads beside them were
    # saved there apart from a model, or left behind by an earlier one.
    architectures = config.get("architectures") if "model_type" in config and "saf" not in config else None
    state, tensors = read_description(path)
    sums = state.get("sha256", {})
    return {
        "kind": "saved",
        "base_model": architectures[0] if architectures and weight_files(path) else None,
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
        if file.suffix == ".safetensors":  # its header says how much follows: a download that broke off is found
            read_metadata(file, error=CheckpointError, advice="fetch or save it again")
    if config.get("saf") or (path / STATE_FILE).is_file():
        heads = _saved(path)
    else:
        # By the configuration alone, without transformers: the command also works where that is not installed.
        layer = {"num_heads": int(config.get("num_attention_heads", 0))}
        ordinary = {"layers": [layer] * int(config.get("num_hidden_layers", 0))}
        heads = {"verified": False, "sha256": {}, "undoable": 0, **_frozen_heads(path, ordinary, {})}
    return {
        **heads,
        "kind": "transformers",
        "architecture": (config.get("architectures") or [config["model_type"]])[0],
        "hash": folder_hash(path),
        "weights": {file.name: file.stat().st_size for file in weights},
    }


def _frozen_heads(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `frozen` and `pruned` pairs of a folder's description, its patterns by layer, and their bytes.

    Raises CheckpointError when a head's pattern is missing or not finite.
    """
    layers = state["layers"]
    pairs = {kind: [[n, head] for n, layer in enumerate(layers) for head in layer.get(kind, ())] for kind in EDITED}
    patterns = [
        _layer_patterns(path, tensors, number, heads)
        for number, layer in enumerate(layers)
        if (heads := layer.get("frozen"))
    ]
    most, storage = max((layer["num_heads"] for layer in layers), default=0), {}
    if patterns:
        bytes_of_files = sum(layer["bytes"] for layer in patterns)
        report = storage_of(HeadSet(pairs["frozen"]), length=patterns[-1]["length"], num_heads=most)
        # Without `allocated`: the tables of a backend exist in an open model alone.
        storage = {name: size for name, size in vars(report).items() if size is not None} | {
            "parameters": bytes_of_files
        }
    return {
        **pairs,
        "num_heads": sum(layer["num_heads"] for layer in layers),
        "heads_per_layer": most,
        "patterns": patterns,
        "storage": storage,
        "costs": _costs(path, HeadSet(pairs["frozen"] + pairs["pruned"])),
    }


def _layer_patterns(path: Path, tensors: Mapping[str, Tensor], layer: int, heads: Sequence[int]) -> dict[str, Any]:
    # Read for its checks as well: a pattern that is not finite would only show in the model's outputs.
    try:
        patterns = [read_pattern(tensors, (layer, head), trainable=False) for head in heads]
    except SafError as error:
        raise CheckpointError(f"{path / TENSORS_FILE}: {error}") from error
    return {
        "layer": layer,
        "kinds": dict(Counter(pattern.kind for pattern in patterns)),
        "length": patterns[-1].length,
        "bytes": sum(tensor.nbytes for pattern in patterns for tensor in pattern.state().values()),
    }


def _costs(path: Path, edited: HeadSet) -> list[dict[str, Any]]:
    """Return what each event cost that still has edited heads, where the folder has a record of it.

    `saf freeze` writes events.jsonl. The configuration of a model of transformers has a shorter record, which it still
    has when the model is saved again.
    """
    recorded = (_config_of(path).get("saf") or {}).get("events", [])
    return [
        {"kind": STATE_AFTER.get(event["kind"], event["kind"]), "num_heads": len(event["heads"])}
        | {name: event[name] for name in _COST if event.get(name) is not None}
        | {"perplexity_rise": loss.rise, "interval": loss.interval, "summary": cost_words(event)}
        for event in current_events([each.values for each in read_events(path)] or recorded, edited)
        if (loss := loss_of(event)) is not None
    ]


def _config_of(path: Path) -> dict[str, Any]:
    return read_json(path / "config.json") if (path / "config.json").is_file() else {}
