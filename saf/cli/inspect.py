"""`saf inspect`: what a folder written by `saf` holds, and whether it is whole."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.calibration.plan import readable
from saf.cli.command import Command
from saf.cli.inspect_patterns import frozen_heads, pattern_storage, patterns_by_layer
from saf.cli.inspect_words import fit_words, head_words, kind_words, layer_table, shape_words
from saf.cli.output import show
from saf.data import TokenData
from saf.errors import CheckpointError, InputError
from saf.records.files import read_json, read_tensors
from saf.records.folders import verify
from saf.records.run import RecordedRun
from saf.records.table import Table
from saf.sidecar import check_sums
from saf.train.checkpoint import checkpoints, is_checkpoint


@dataclass(kw_only=True)
class Inspect(Command):
    """Show what a checkpoint, run, data folder or saved model holds, checking every recorded sum."""

    path: Annotated[Path, tyro.conf.Positional]
    """A folder written by saf."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Look into the folder, show and return what it holds; raise CheckpointError when a part is damaged."""
        result, tables = _look(self.path)
        show(result, *tables, as_json=self.json)
        if damaged := [entry["problem"] for entry in result.get("checkpoints", []) if entry["problem"]]:
            raise CheckpointError("; ".join(damaged))
        return result


def _look(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Find out what kind of folder it is; raise InputError when it is none of ours."""
    if is_checkpoint(path):
        return checkpoint_facts(path)
    if (path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir():
        return run_facts(path)
    if (path / "index.json").is_file():
        return data_facts(path)
    if (path / "saf.json").is_file():
        return saved_facts(path)
    reason = "is none of these" if path.is_dir() else "is not a folder"
    raise InputError(f"{path} {reason}: a checkpoint, a run, a data folder, or a folder written by saf.save")


def checkpoint_facts(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Verify a checkpoint and describe it."""
    manifest, state = verify(path), read_json(path / "state.json")
    heads = frozen_heads(path)
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
        "patterns": patterns_by_layer(path, heads["frozen"]),
        **heads,
    }
    result["storage"] = pattern_storage(result)
    rows = {
        "update": result["update"],
        "tokens": result["tokens"],
        "model": shape_words(state["model"]),
        "heads": head_words(heads),
        "hash": result["hash"],
        "parent": result["parent"] or "none",
        "data": result["data_fingerprint"],
    }
    files = [[name, readable(entry["bytes"]), entry["sha256"][:16]] for name, entry in manifest["files"].items()]
    tables: list[Any] = [Table.facts(f"checkpoint {path}", rows), *layer_table(result)]
    return result, [*tables, Table.of("files, all sums verified", ["file", "size", "SHA-256"], files)]


def run_facts(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Describe a run and verify each of its checkpoints."""
    run = RecordedRun.open(path)
    kept = [_verified(folder) for folder in checkpoints(path / "checkpoints")]
    final, last = run.result or {}, run.metrics[-1] if run.metrics else {}
    result = {
        "kind": "run",
        "path": str(path),
        "verified": all(entry["problem"] is None for entry in kept),
        "arm": run.arm,
        "finished": run.result is not None,
        "updates": final.get("updates", last.get("update")),
        "tokens": final.get("tokens", last.get("tokens")),
        "report_perplexity": final.get("report_perplexity"),
        "num_heads": run.num_heads,
        "frozen": run.frozen_heads,
        "rejected": (run.freeze or {}).get("rejected", []),
        "fit_kl": (run.freeze or {}).get("fit_kl", []),
        "certificates": (run.freeze or {}).get("certificates", []),
        "config": run.config,
        "checkpoints": kept,
        "provenance": final.get("provenance"),
    }
    rows = {
        "arm": f"{run.arm}, {'finished' if result['finished'] else 'not finished'}",
        "updates": result["updates"],
        "tokens": result["tokens"],
        "perplexity, held out": final.get("report_perplexity") and f"{final['report_perplexity']:.4f}",
        "model": shape_words(run.config.get("model") or {}),
        "heads": head_words({"frozen": run.frozen_heads, "num_heads": run.num_heads}),
        "fits": fit_words(result),
        "parent": (run.config.get("parent") or {}).get("path"),
        "data": (run.config.get("data") or {}).get("fingerprint"),
    }
    table = [[e["name"], (e["hash"] or "")[:16], "whole" if e["problem"] is None else "damaged"] for e in kept]
    tables: list[Any] = [Table.facts(f"run {path}", rows), *layer_table(result)]
    return result, [*tables, Table.of("checkpoints", ["name", "hash", "state"], table)]


def data_facts(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Verify a data folder and describe it."""
    data = TokenData.open(path, verify=True)
    index = data.index.to_dict()
    partitions = index["partitions"]
    rows = {"tokenizer": f"{index['tokenizer']['kind']}, {data.vocab_size:,} ids", "fingerprint": data.fingerprint}
    table = [[name, info["tokens"], info["documents"], len(info["shards"])] for name, info in partitions.items()]
    result = {"kind": "data", "path": str(path), "verified": True, **index}
    head = ["partition", "tokens", "documents", "shards"]
    return result, [Table.facts(f"data {path}, all sums verified", rows), Table.of("partitions", head, table)]


def saved_facts(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Check what `saf.save` wrote, sums and patterns, and describe it."""
    heads = frozen_heads(path)
    sums = check_sums(path, read_json(path / "saf.json"))
    patterns = patterns_by_layer(path, heads["frozen"])
    undo = sum(1 for name in read_tensors(path / "saf.safetensors") if ".removed.query.weight" in name)
    kinds: Counter[str] = Counter()
    for layer in patterns:
        kinds.update(layer["kinds"])
    result = {
        "kind": "saved",
        "path": str(path),
        "verified": "saf.safetensors" in sums,
        "patterns": patterns,
        "sha256": sums,
        **heads,
    }
    result["storage"] = pattern_storage(result)
    rows = {
        "heads": head_words(heads),
        "patterns": kind_words(kinds),
        "can be undone": f"{undo} of {len(heads['frozen'])} heads",
        **{f"SHA-256 of {name}": value for name, value in sums.items()},
    }
    return result, [Table.facts(f"saved model {path}", rows), *layer_table(result)]


def _verified(folder: Path) -> dict[str, Any]:
    try:
        return {"name": folder.name, "hash": verify(folder)["hash"], "problem": None}
    except CheckpointError as error:
        return {"name": folder.name, "hash": None, "problem": str(error)}


COMMAND = Inspect
