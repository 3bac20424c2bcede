"""How `saf inspect` tells people what it found: models, heads, fits and patterns in words and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from saf.calibration.plan import readable
from saf.records.table import Table


def shape_words(model: Mapping[str, Any]) -> str:
    """Return the fields of a decoder's configuration that say how large it is, in one line."""
    names = ("num_layers", "num_heads", "hidden_size", "max_length", "vocab_size", "position")
    return ", ".join(f"{name} {model[name]}" for name in names if name in model)


def head_words(heads: Mapping[str, Any]) -> str:
    """Return how many of a model's heads are frozen."""
    return f"{len(heads['frozen'])} of {heads['num_heads']} frozen"


def kind_words(kinds: Mapping[str, int]) -> str:
    """Return how many patterns there are of each kind."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def fit_words(result: Mapping[str, Any]) -> str | None:
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


def layer_table(result: Mapping[str, Any]) -> list[Any]:
    """Return a table of frozen heads by layer and lines on their patterns, if known; nothing when none is frozen."""
    layers = sorted({layer for layer, _ in result["frozen"]})
    rows = [[str(layer), " ".join(str(head) for at, head in result["frozen"] if at == layer)] for layer in layers]
    if "patterns" not in result:
        return [Table.of("frozen heads", ["layer", "heads"], rows)] if rows else []
    for row, found in zip(rows, result["patterns"], strict=True):
        row += [kind_words(found["kinds"]), _stored_cell(found["stored"]), str(found["length"]), found["sha256"][:16]]
    if not rows:
        return []
    head = ["layer", "heads", "patterns", "stored as T x T", "length", "SHA-256"]
    told = [_storage_words(result["storage"]), _stored_words(result["patterns"])]
    return [Table.of("frozen heads", head, rows), *told]


def _stored_cell(stored: Mapping[str, int]) -> str:
    """Return in a few words how many heads of a layer are stored as T x T matrices."""
    told = [f"{count} {'dense' if why == 'dense' else f'in {why}'}" for why, count in stored.items() if count]
    return ", ".join(told) or "none"


def _stored_words(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence how many heads of all layers are stored as T x T matrices, and why."""
    totals = {why: sum(layer["stored"][why] for layer in layers) for why in layers[0]["stored"]}
    told = [
        f"{count} whose pattern is dense" if why == "dense" else f"{count} that {why} cannot hold as tables"
        for why, count in totals.items()
        if count
    ]
    return f"heads that backend toeplitz stores as T x T: {', '.join(told) or 'none'}"


def _storage_words(storage: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{name.replace('_', ' ')} {readable(size)}" for name, size in storage.items())
    return f"patterns in float32: {sizes}"
