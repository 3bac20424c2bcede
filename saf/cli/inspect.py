"""`saf inspect`: what a folder written by `saf` holds, and whether it is whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.calibration.plan import readable
from saf.cli.output import show
from saf.errors import CheckpointError
from saf.freezing.report import exponential_words
from saf.inspection import inspect
from saf.records.table import Part, Table


@dataclass(kw_only=True)
class Command:
    """Show what a checkpoint, run, data folder or saved model holds, checking every recorded sum."""

    path: Annotated[Path, tyro.conf.Positional]
    """A folder written by saf, or of a model of transformers."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Look into the folder, show and return what it holds; raise CheckpointError when a part is damaged."""
        found = inspect(self.path)
        show(found, *_TABLES[found["kind"]](found), as_json=self.json)
        if damaged := [entry["problem"] for entry in found.get("checkpoints", []) if entry["problem"]]:
            raise CheckpointError("; ".join(damaged))
        return found


def _checkpoint_tables(found: Mapping[str, Any]) -> list[Part]:
    """Return the tables of one checkpoint: what it is, its heads by layer, and its files."""
    rows = {
        "update": found["update"],
        "tokens": found["tokens"],
        "model": _shape_words(found["model"]),
        "heads": _head_words(found),
        "hash": found["hash"],
        "parent": found["parent"] or "none",
        "data": found["data_fingerprint"],
    }
    files = [[name, readable(entry["bytes"]), entry["sha256"][:16]] for name, entry in found["files"].items()]
    sums = Table.of("files, all sums verified", ["file", "size", "SHA-256"], files)
    return [Table.facts(f"checkpoint {found['path']}", rows), *_layer_table(found), sums]


def _run_tables(found: Mapping[str, Any]) -> list[Part]:
    """Return the tables of one run: what it is, its heads by layer, its events and its checkpoints."""
    perplexity, config = found["report_perplexity"], found["config"]
    rows = {
        "arm": f"{found['arm']}, {'finished' if found['finished'] else 'not finished'}",
        "updates": found["updates"],
        "tokens": found["tokens"],
        "perplexity, held out": perplexity and f"{perplexity:.4f}",
        "model": _shape_words(config.get("model") or {}),
        "heads": _head_words(found),
        "fits": _fit_words(found),
        "sums": exponential_words(found["exponential"]) if found["exponential"] else None,
        "parent": (config.get("parent") or {}).get("path"),
        "data": (config.get("data") or {}).get("fingerprint"),
    }
    events = [
        [event["number"], event["kind"], event["update"], len(event["heads"]), _kept_words(event), event["reason"]]
        for event in found["events"]
    ]
    told = Table.of("events", ["number", "kind", "update", "heads", "kept", "reason"], events)
    kept = [
        [entry["name"], (entry["hash"] or "")[:16], "whole" if entry["problem"] is None else "damaged"]
        for entry in found["checkpoints"]
    ]
    table = Table.of("checkpoints", ["name", "hash", "state"], kept)
    return [Table.facts(f"run {found['path']}", rows), *_layer_table(found), *([told] if events else []), table]


def _data_tables(found: Mapping[str, Any]) -> list[Part]:
    """Return the tables of prepared data: its tokenizer, and the size of each partition."""
    tokenizer = found["tokenizer"]
    rows = {"tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids", "fingerprint": found["fingerprint"]}
    partitions = found["partitions"].items()
    table = [[name, each["tokens"], each["documents"]] for name, each in partitions]
    head = ["partition", "tokens", "documents"]
    return [Table.facts(f"data {found['path']}, all sums verified", rows), Table.of("partitions", head, table)]


def _saved_tables(found: Mapping[str, Any]) -> list[Part]:
    """Return the tables of a saved frozen model: its heads and patterns, by layer too."""
    kinds: Counter[str] = Counter()
    for layer in found["patterns"]:
        kinds.update(layer["kinds"])
    of = (
        {}
        if found["kind"] == "saved"
        else {
            "model": found["architecture"],
            "weights": ", ".join(f"{name} {readable(size)}" for name, size in found["weights"].items()),
            "hash": found["hash"],
        }
    )
    if (beside := found.get("beside")) is not None and not of:
        of = {
            "model beside it": f"an ordinary {beside}: these heads are not of its weights, and saf.load(model, folder) "
            "freezes them in the model that they were made from; were they undone, move both files away"
        }
    rows = {
        **of,
        "heads": _head_words(found),
        "patterns": _kind_words(kinds),
        "can be undone": f"{found['undoable']} of {len(found['frozen']) + len(found['pruned'])} heads",
        **{f"SHA-256 of {name}": value for name, value in found["sha256"].items()},
    }
    return [
        Table.facts(f"{'saved model' if found['kind'] == 'saved' else 'model of transformers'} {found['path']}", rows),
        *_layer_table(found),
    ]


_TABLES = {"checkpoint": _checkpoint_tables, "run": _run_tables, "data": _data_tables, "saved": _saved_tables}
_TABLES["transformers"] = _saved_tables


def _shape_words(model: Mapping[str, Any]) -> str:
    """Return the fields of a decoder's configuration that say how large it is, in one line."""
    names = ("num_layers", "num_heads", "hidden_size", "max_length", "vocab_size", "position")
    return ", ".join(f"{name} {model[name]}" for name in names if name in model)


def _head_words(heads: Mapping[str, Any]) -> str:
    """Return how many of a model's heads are frozen, and which are pruned."""
    pruned = [f"({layer}, {head})" for layer, head in heads.get("pruned", ())]
    words = f"; {len(pruned)} pruned: {', '.join(pruned)}" if pruned else ""
    return f"{len(heads['frozen'])} of {heads['num_heads']} frozen{words}"


def _kind_words(kinds: Mapping[str, int]) -> str:
    """Return how many patterns there are of each kind."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _fit_words(result: Mapping[str, Any]) -> str | None:
    """Tell how good the fits of a freezing event are; older records have no certificates."""
    if not result["fit_kl"]:
        return None
    words = f"KL at most {max(kl for *_, kl in result['fit_kl']):.4f} nats"
    frozen = [each for each in result["certificates"] if each["head"] in result["frozen"]]
    if not frozen:
        return words
    met = sum(each["converged"] for each in frozen)
    worst = max(max(each["max_relative_abs"], each["max_relative_rel"]) for each in frozen)
    return f"{words}; {met} of {len(frozen)} converged, marginals within {worst:.1e}"


def _kept_words(event: Mapping[str, Any]) -> str:
    """Return whether an event was kept, and which undid it otherwise."""
    return "yes" if event["undone_by"] is None else f"undone by {event['undone_by']}"


def _layer_table(result: Mapping[str, Any]) -> list[Part]:
    """Return a table of frozen heads by layer and lines on their patterns, if known; nothing when none is frozen."""
    layers = sorted({layer for layer, _ in result["frozen"]})
    rows = [[str(layer), " ".join(str(head) for at, head in result["frozen"] if at == layer)] for layer in layers]
    if "patterns" not in result:
        return [Table.of("frozen heads", ["layer", "heads"], rows)] if rows else []
    for row, found in zip(rows, result["patterns"], strict=True):
        row += [_kind_words(found["kinds"]), _stored_cell(found["stored"]), str(found["length"]), found["sha256"][:16]]
    if not rows:
        return []
    head = ["layer", "heads", "patterns", "stored as T x T", "length", "SHA-256"]
    notes = [_storage_words(result["storage"]), _stored_words(result["patterns"])]
    return [Table.of("frozen heads", head, rows), *notes]


def _stored_cell(stored: Mapping[str, int]) -> str:
    """Return in a few words how many heads of a layer are stored as T x T matrices."""
    counts = [f"{count} {'dense' if why == 'dense' else f'in {why}'}" for why, count in stored.items() if count]
    return ", ".join(counts) or "none"


def _stored_words(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence how many heads of all layers are stored as T x T matrices, and why."""
    totals = {why: sum(layer["stored"][why] for layer in layers) for why in layers[0]["stored"]}
    counts = [
        f"{count} whose pattern is dense" if why == "dense" else f"{count} that {why} cannot hold as tables"
        for why, count in totals.items()
        if count
    ]
    return f"heads that backend toeplitz stores as T x T: {', '.join(counts) or 'none'}"


def _storage_words(storage: Mapping[str, int]) -> str:
    logical = {name: size for name, size in storage.items() if name != "allocated"}
    sizes = ", ".join(f"{name.replace('_', ' ')} {readable(size)}" for name, size in logical.items())
    allocated = f"allocated to execute them (CPU, float32 and bfloat16): {readable(storage['allocated'])}"
    return f"patterns in float32: {sizes}; {allocated}"
