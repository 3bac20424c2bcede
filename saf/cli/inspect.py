"""`saf inspect`: the contents of a folder written by `saf`, and whether it is whole."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse
from saf.errors import CheckpointError
from saf.freeze_report import exponential_words
from saf.inspection import inspect
from saf.records.table import Table, byte_size

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
        facts = {name: _value(contents, value) for name, value in ROWS.items()}
        title = f"{contents['kind']} {contents['path']}" + ", all sums verified" * contents["verified"]
        show(contents, Table.facts(title, facts), *_tables(contents), as_json=self.json)
        if damaged := [entry["problem"] for entry in contents.get("checkpoints", []) if entry["problem"]]:
            raise CheckpointError("; ".join(damaged))
        return contents


def _value(contents: Contents, value: Callable[[Contents], Any]) -> Any:
    """Return the value of a row; None for contents of a kind that has none."""
    try:
        return value(contents)
    except KeyError:
        return None


def _tables(contents: Contents) -> Iterator[Table]:
    """Yield a table of the frozen heads by layer, and of each list that the folder has."""
    if layers := sorted({layer for layer, _ in contents.get("frozen", ())}):
        heads = [" ".join(str(head) for at, head in contents["frozen"] if at == layer) for layer in layers]
        rows: list[list[Any]] = [[str(layer), some] for layer, some in zip(layers, heads, strict=True)]
        for row, patterns in zip(rows, contents.get("patterns", ()), strict=False):
            row += [_counts(patterns["kinds"]), patterns["length"]]
        yield Table.of("frozen heads", ("layer", "heads", "patterns", "length")[: len(rows[0])], rows)
    if events := contents.get("events"):
        names = ("number", "kind", "update", "undone_by", "reason")
        rows = [[*(event[name] for name in names), len(event["heads"])] for event in events]
        yield Table.of("events", ("number", "kind", "update", "undone by", "reason", "heads"), rows).used()
    if checkpoints := contents.get("checkpoints"):
        rows = [
            [each["name"], (each["hash"] or "")[:16], "damaged" if each["problem"] else "whole"] for each in checkpoints
        ]
        yield Table.of("checkpoints", ("name", "hash", "state"), rows)
    if files := contents.get("files"):
        rows = [[name, byte_size(entry["bytes"]), entry["sha256"][:16]] for name, entry in files.items()]
        yield Table.of("files", ("file", "size", "SHA-256"), rows)
    if partitions := contents.get("partitions"):
        rows = [[name, each["tokens"], each["documents"]] for name, each in partitions.items()]
        yield Table.of("partitions", ("partition", "tokens", "documents"), rows)


def _shape(contents: Contents) -> str:
    if "architecture" in contents:
        return contents["architecture"]
    model = contents["config"]["model"] if "config" in contents else contents["model"]
    names = ("num_layers", "num_heads", "hidden_size", "max_length", "vocab_size", "position")
    return ", ".join(f"{name} {model[name]}" for name in names if name in model)


def _heads(contents: Contents) -> str:
    pruned = [f"({layer}, {head})" for layer, head in contents.get("pruned", ())]
    words = f"; {len(pruned)} pruned: {', '.join(pruned)}" if pruned else ""
    return f"{len(contents['frozen'])} of {contents['num_heads']} frozen{words}"


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _patterns(contents: Contents) -> str:
    kinds: Counter[str] = Counter()
    for layer in contents["patterns"]:
        kinds.update(layer["kinds"])
    sizes = [f"{name.replace('_', ' ')} {byte_size(size)}" for name, size in contents["storage"].items()]
    return _counts(kinds) + (f"; in float32 {', '.join(sizes)}" if sizes else "")


ROWS: dict[str, Callable[[Contents], Any]] = {
    "arm": lambda each: f"{each['arm']}, {'finished' if each['finished'] else 'not finished'}",
    "update": lambda each: each["update"],
    "updates": lambda each: each["updates"],
    "tokens": lambda each: each["tokens"],
    "perplexity, held out": lambda each: each["report_perplexity"] and f"{each['report_perplexity']:.4f}",
    "tokenizer": lambda each: f"{each['tokenizer']['kind']}, {each['tokenizer']['vocab_size']:,} ids",
    "model": _shape,
    "base model here": lambda each: each["base_model"] and f"{each['base_model']}, ordinary: these are not its heads",
    "weights": lambda each: ", ".join(f"{name} {byte_size(size)}" for name, size in each["weights"].items()),
    "heads": _heads,
    "patterns": _patterns,
    "fits": lambda each: f"KL at most {max(kl for *_, kl in each['fit_kl']):.4f} nats" if each["fit_kl"] else None,
    "sums": lambda each: exponential_words(each["exponential"]) if each["exponential"] else None,
    "can be undone": lambda each: f"{each['undoable']} of {len(each['frozen']) + len(each['pruned'])} heads",
    "hash": lambda each: each["hash"],
    "fingerprint": lambda each: each["fingerprint"],
    "parent": lambda each: each["parent"] if "parent" in each else (each["config"]["parent"] or {}).get("path"),
    "data": lambda each: each.get("data_fingerprint") or each["config"]["data"]["fingerprint"],
    "sums of files": lambda each: ", ".join(f"{name} {value}" for name, value in each["sha256"].items()),
}
"""The rows of any folder's table: each is shown where the folder has it."""

parse_words = partial(parse, Command, prog="saf inspect")
