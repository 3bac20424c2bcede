"""`saf inspect`: the contents of a folder written by `saf`, and whether it is whole."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.errors import CheckpointError
from saf.freeze_report import exponential_words
from saf.inspection import inspect
from saf.records.table import Part, Table, byte_size

Contents = Mapping[str, Any]


@dataclass(kw_only=True)
class Command:
    """Show the contents of a checkpoint, run, data folder or saved model, checking every recorded checksum."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Inspect this folder written by saf, or of a Hugging Face model."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        contents = inspect(self.path)
        tables = {"checkpoint": _checkpoint, "run": _run, "data": _data, "saved": _saved, "transformers": _saved}
        show(contents, *tables[contents["kind"]](contents), as_json=self.json)
        if damaged := [entry["problem"] for entry in contents.get("checkpoints", []) if entry["problem"]]:
            raise CheckpointError("; ".join(damaged))
        return contents


def _checkpoint(contents: Contents) -> list[Part]:
    rows = {
        **{name: contents[name] for name in ("update", "tokens")},
        "model": _shape(contents["model"]),
        "heads": _heads(contents),
        "hash": contents["hash"],
        "parent": contents["parent"] or "none",
        "data": contents["data_fingerprint"],
    }
    files = [[name, byte_size(entry["bytes"]), entry["sha256"][:16]] for name, entry in contents["files"].items()]
    sums = Table.of("files, all sums verified", ["file", "size", "SHA-256"], files)
    return [Table.facts(f"checkpoint {contents['path']}", rows), *_layers(contents), sums]


def _run(contents: Contents) -> list[Part]:
    perplexity, config = contents["report_perplexity"], contents["config"]
    rows = {
        "arm": f"{contents['arm']}, {'finished' if contents['finished'] else 'not finished'}",
        **{name: contents[name] for name in ("updates", "tokens")},
        "perplexity, held out": perplexity and f"{perplexity:.4f}",
        "model": _shape(config.get("model") or {}),
        "heads": _heads(contents),
        "fits": _fits(contents),
        "sums": exponential_words(contents["exponential"]) if contents["exponential"] else None,
        "parent": (config.get("parent") or {}).get("path"),
        "data": (config.get("data") or {}).get("fingerprint"),
    }
    events = [
        [
            *(event[name] for name in ("number", "kind", "update")),
            len(event["heads"]),
            "yes" if event["undone_by"] is None else f"undone by {event['undone_by']}",
            event["reason"],
        ]
        for event in contents["events"]
    ]
    checkpoints = [
        [entry["name"], (entry["hash"] or "")[:16], "damaged" if entry["problem"] else "whole"]
        for entry in contents["checkpoints"]
    ]
    return [
        Table.facts(f"run {contents['path']}", rows),
        *_layers(contents),
        *([Table.of("events", ["number", "kind", "update", "heads", "kept", "reason"], events)] if events else []),
        Table.of("checkpoints", ["name", "hash", "state"], checkpoints),
    ]


def _data(contents: Contents) -> list[Part]:
    tokenizer = contents["tokenizer"]
    facts = {"tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids"}
    facts["fingerprint"] = contents["fingerprint"]
    partitions = [[name, each["tokens"], each["documents"]] for name, each in contents["partitions"].items()]
    return [
        Table.facts(f"data {contents['path']}, all sums verified", facts),
        Table.of("partitions", ["partition", "tokens", "documents"], partitions),
    ]


def _saved(contents: Contents) -> list[Part]:
    rows: dict[str, Any] = {}
    if contents["kind"] == "transformers":
        sizes = ", ".join(f"{name} {byte_size(size)}" for name, size in contents["weights"].items())
        rows = {"model": contents["architecture"], "weights": sizes, "hash": contents["hash"]}
    elif (base := contents.get("base_model")) is not None:
        rows["base model here"] = f"an ordinary {base}; saf.load(model, folder) freezes these heads in their own model"
    kinds: Counter[str] = Counter()
    for layer in contents["patterns"]:
        kinds.update(layer["kinds"])
    rows |= {
        "heads": _heads(contents),
        "patterns": _counts(kinds),
        "can be undone": f"{contents['undoable']} of {len(contents['frozen']) + len(contents['pruned'])} heads",
        **{f"SHA-256 of {name}": value for name, value in contents["sha256"].items()},
    }
    title = "saved model" if contents["kind"] == "saved" else "model of transformers"
    return [Table.facts(f"{title} {contents['path']}", rows), *_layers(contents)]


def _shape(model: Contents) -> str:
    names = ("num_layers", "num_heads", "hidden_size", "max_length", "vocab_size", "position")
    return ", ".join(f"{name} {model[name]}" for name in names if name in model)


def _heads(contents: Contents) -> str:
    pruned = [f"({layer}, {head})" for layer, head in contents.get("pruned", ())]
    words = f"; {len(pruned)} pruned: {', '.join(pruned)}" if pruned else ""
    return f"{len(contents['frozen'])} of {contents['num_heads']} frozen{words}"


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _fits(contents: Contents) -> str | None:
    if not contents["fit_kl"]:
        return None
    words = f"KL at most {max(kl for *_, kl in contents['fit_kl']):.4f} nats"
    frozen = [each for each in contents["certificates"] if each["head"] in contents["frozen"]]
    if not frozen:
        return words
    converged = sum(each["converged"] for each in frozen)
    worst = max(max(each["max_relative_abs"], each["max_relative_rel"]) for each in frozen)
    return f"{words}; {converged} of {len(frozen)} converged, marginals within {worst:.1e}"


def _layers(contents: Contents) -> list[Part]:
    """Tabulate the frozen heads by layer, with their patterns where the folder has them."""
    layers = sorted({layer for layer, _ in contents["frozen"]})
    if not layers:
        return []
    rows = [[str(layer), " ".join(str(head) for at, head in contents["frozen"] if at == layer)] for layer in layers]
    if "patterns" not in contents:
        return [Table.of("frozen heads", ["layer", "heads"], rows)]
    for row, patterns in zip(rows, contents["patterns"], strict=True):
        row += [_counts(patterns["kinds"]), str(patterns["length"]), byte_size(patterns["bytes"])]
    sizes = ", ".join(f"{name.replace('_', ' ')} {byte_size(size)}" for name, size in contents["storage"].items())
    columns = ["layer", "heads", "patterns", "length", "size"]
    return [Table.of("frozen heads", columns, rows, [f"patterns in float32: {sizes}"])]
