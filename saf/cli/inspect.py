"""`saf inspect` shows the contents of a folder that `saf` wrote, and whether it is whole."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse
from saf.errors import CheckpointError
from saf.freeze_report import exponential_words, healing_words
from saf.inspection import inspect
from saf.records.table import Table, byte_size

Contents = Mapping[str, Any]
SIZES = ("num_layers", "num_heads", "hidden_size", "max_length", "vocab_size", "position")


@dataclass(kw_only=True)
class Command:
    """Show the contents of a checkpoint, run, data folder or saved model, checking every recorded checksum."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Inspect this folder written by saf, or of a Hugging Face model."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        contents = inspect(self.path)
        title = f"{contents['kind']} {contents['path']}" + (", all sums verified" if contents["verified"] else "")
        show(contents, Table.facts(title, _facts(contents)), *_tables(contents), as_json=self.json)
        if damaged := [entry["problem"] for entry in contents.get("checkpoints", []) if entry["problem"]]:
            raise CheckpointError("; ".join(damaged))
        return contents


def _facts(contents: Contents) -> dict[str, Any]:
    config, fits = contents.get("config") or {}, contents.get("fit_kl")
    tokenizer, perplexity = contents.get("tokenizer"), contents.get("report_perplexity")
    model = config.get("model") or contents.get("model") or {}
    sizes = ", ".join(f"{name} {model[name]}" for name in SIZES if name in model)
    base, sums = contents.get("base_model"), contents.get("exponential")
    weights = ", ".join(f"{name} {byte_size(size)}" for name, size in (contents.get("weights") or {}).items())
    ended = "finished" if contents.get("finished") else "not finished"
    return {
        "arm": f"{contents['arm']}, {ended}" if "arm" in contents else None,
        **{name: contents.get(name) for name in ("update", "updates", "tokens")},
        "perplexity, held out": perplexity and f"{perplexity:.4f}",
        "tokenizer": tokenizer and f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids",
        "model": contents.get("architecture") or sizes or None,
        "base model here": base and f"{base}, ordinary: these are not its heads",
        "weights": weights or None,
        **(_head_facts(contents) if "frozen" in contents else {}),
        "fits": f"KL at most {max(kl for *_, kl in fits):.4f} nats" if fits else None,
        "sums": exponential_words(sums) if sums else None,
        **{name: contents.get(name) for name in ("hash", "fingerprint")},
        "parent": contents.get("parent") or (config.get("parent") or {}).get("path"),
        "data": contents.get("data_fingerprint") or (config.get("data") or {}).get("fingerprint"),
    }


def _head_facts(contents: Contents) -> dict[str, Any]:
    frozen, pruned = contents["frozen"], contents.get("pruned", ())
    words = f"; {len(pruned)} pruned: {', '.join(f'({layer}, {head})' for layer, head in pruned)}" if pruned else ""
    facts = {"heads": f"{len(frozen)} of {contents['num_heads']} frozen{words}"}
    if contents.get("patterns"):
        kinds = sum((Counter(layer["kinds"]) for layer in contents["patterns"]), Counter())
        sizes = [f"{name.replace('_', ' ')} {byte_size(size)}" for name, size in contents["storage"].items()]
        facts["patterns"] = _counts(kinds) + (f"; in float32 {', '.join(sizes)}" if sizes else "")
    if "undoable" in contents and (frozen or pruned):
        facts["can be undone"] = f"{contents['undoable']} of {len(frozen) + len(pruned)} heads"
    return facts | _cost_facts(contents.get("costs", ()))


def _cost_facts(costs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a line of each event's cost, and one of the training that followed."""
    facts = {}
    for number, cost in enumerate(costs, start=1):
        of = f" of event {number}, {cost['num_heads']} heads {cost['kind']}" if len(costs) > 1 else ""
        facts[f"cost{of}"] = cost["summary"]
        if healing := cost.get("healing"):
            facts[f"cost{of}, healed"] = healing_words(healing)
    return facts


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _tables(contents: Contents) -> Iterator[Table]:
    """Yield a table of the frozen heads by layer, and of each list that the folder has."""
    if layers := sorted({layer for layer, _ in contents.get("frozen", ())}):
        heads = [" ".join(str(head) for at, head in contents["frozen"] if at == layer) for layer in layers]
        rows: list[list[Any]] = [[str(layer), some] for layer, some in zip(layers, heads, strict=True)]
        for row, patterns in zip(rows, contents.get("patterns", ()), strict=False):
            row += [_counts(patterns["kinds"]), patterns["length"]]
        yield Table.of("frozen heads", ("layer", "heads (numbers)", "patterns", "length")[: len(rows[0])], rows)
    if events := contents.get("events"):
        names = ("number", "kind", "update", "undone_by", "reason")
        rows = [[*(event[name] for name in names), len(event["heads"])] for event in events]
        yield Table.of("events", ("number", "kind", "update", "undone by", "reason", "heads"), rows).used()
    if checkpoints := contents.get("checkpoints"):
        rows = [
            [each["name"], (each["hash"] or "")[:16], "damaged" if each["problem"] else "whole"] for each in checkpoints
        ]
        yield Table.of("checkpoints", ("name", "hash", "state"), rows)
    if partitions := contents.get("partitions"):
        rows = [[name, each["tokens"], each["documents"]] for name, each in partitions.items()]
        yield Table.of("partitions", ("partition", "tokens", "documents"), rows)


parse_words = partial(parse, Command, prog="saf inspect")
