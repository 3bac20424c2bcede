"""The marks of frozen heads in a model's folder: an entry in `config.json` and a section of the model card.

The configuration's entry `saf` names the import that opens the folder and lists the freezing events.
"""

import re
from pathlib import Path
from statistics import median
from typing import Any

from saf.errors import InputError
from saf.freeze_report import healing_words, worst_layer_words
from saf.frozen_state import OPENS, SCHEMA, STATE_FILE, TENSORS_FILE
from saf.heads import EDITED, HeadLayout, HeadSet
from saf.heldout import perplexity_rise
from saf.models.adapter import Adapter
from saf.records.files import entries_hash, file_hash, write_atomically
from saf.records.run import heads_in_words
from saf.records.table import signed

CARD, CONFIG = "README.md", "config.json"
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How names of models that predict the next token end."""
_BEGIN, _END = "<!-- frozen heads: written by saf -->", "<!-- end of frozen heads -->"
_SECTION = re.compile(f"{re.escape(_BEGIN)}\n(.*?){re.escape(_END)}\n?", re.DOTALL)
_COST = "- what freezing cost: "
_NEW_CARD = "---\nlibrary_name: transformers\ntags:\n- saf\n---\n\n# A model with frozen attention heads\n"
_MARKS = {"live": ".", "frozen": "F", "pruned": "P"}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, by name."""
    return sorted((*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")))


def folder_hash(folder: Path) -> str:
    """Return one SHA-256 of a model's configuration, weights and heads."""
    files = [folder / CONFIG, *weight_files(folder), folder / STATE_FILE, folder / TENSORS_FILE]
    return entries_hash({path.name: file_hash(path) for path in files if path.is_file()})


def mark_of(config: Any) -> dict[str, Any] | None:
    """Return the entry of a configuration about frozen or pruned heads; None where it has none."""
    return getattr(config, "saf", None)


def mark_(config: Any, max_length: int | None) -> None:
    """Enter in a configuration that heads are frozen or pruned, and how many positions their patterns cover."""
    if mark_of(config) is None:
        config.saf = {"schema": SCHEMA, "open_with": OPENS, "events": []}
    config.saf["max_length"] = max_length


def unmark_(config: Any) -> None:
    """Take that entry out."""
    vars(config).pop("saf", None)


def current_events(events: list[dict[str, Any]], edited: HeadSet) -> list[dict[str, Any]]:
    """Return the events some of whose heads are edited still, with their number as `remaining`."""
    current = []
    for event in reversed(events):
        heads = edited & HeadSet(event["heads"])
        edited = edited - heads
        if len(heads):
            current.append(event | {"remaining": len(heads)})
    return current[::-1]


def section(adapter: Adapter) -> str:
    """Return the model card's section about the heads, in Markdown."""
    layouts = [site.layout for site in adapter.sites()]
    total = sum(layout.num_heads for layout in layouts)
    counts = {kind: len(adapter.heads(kind)) for kind in _MARKS}
    longest = min((site.frozen.max_length for site in adapter.sites() if site.frozen is not None), default=None)
    limit = "" if longest is None else f" It takes inputs of up to {longest} tokens, the length it was calibrated on."
    rows = "\n".join(f"layer {number:3d}  {_map(layout)}" for number, layout in enumerate(layouts))
    name = type(adapter.model).__name__
    opens = "AutoModelForCausalLM" if name.endswith(CAUSAL) else name
    mark = mark_of(adapter.sites()[0].attention.config) or {"events": []}
    mark["events"] = current_events(mark["events"], adapter.heads(*EDITED))
    events = "".join(f"- {_event_line(event)}\n" for event in mark["events"])
    return (
        f"## Frozen attention heads\n\nOf its {total} attention heads this model has {heads_in_words(counts)}, a share "
        f"of {(total - counts['live']) / total:.1%}.{limit} This opens the folder:\n\n"
        f"```python\n{OPENS}  # without it, transformers refuses the shapes of the weights\n"
        f"from transformers import {opens}\n\nmodel = {opens}.from_pretrained(folder)\n```\n\n"
        f"A character a head, `.` ordinary, `F` frozen, `P` pruned:\n\n```text\n{rows}\n```\n\n{events}"
    )


def _map(layout: HeadLayout) -> str:
    """Return one character for each head of a layer."""
    marks = {head: mark for kind, mark in _MARKS.items() for head in getattr(layout, kind)}
    return "".join(marks[head] for head in range(layout.num_heads))


def _event_line(event: dict[str, Any]) -> str:
    """Return a line about an event that froze or pruned heads."""
    count = len(event["heads"])
    chosen = "as named" if event.get("named") else f"by {event['score_name']}"
    patterns = f", patterns by {event['pattern']}" if event["kind"] == "frozen" else ""
    undone = "" if event["remaining"] == count else f" ({event['remaining']} of them still)"
    parts = [f"{count} head{'s' * (count != 1)} {event['kind']}{undone} {chosen}{patterns}"]
    if event.get("update") is not None:
        parts.append(f"after update {event['update']}")
    data = f" of {event['data']}" if event.get("data") else ""
    bos = ", each begun by the BOS token" if event.get("bos") is not None else ""
    parts.append(f"calibrated on {event['num_sequences']} sequences of {event['length']} tokens{data}{bos}")
    if divergences := [kl for *_, kl in event["fit_kl"]]:
        parts.append(f"KL of the fits {median(divergences):.4f} nats (median), {max(divergences):.4f} at most")
    if event.get("loss_before") is not None:
        rise = signed(100 * perplexity_rise(event["loss_before"], event["loss_after"]), 1)
        losses = f"{event['loss_before']:.4f} nats before, {event['loss_after']:.4f} after"
        parts.append(f"held-out loss {losses} (perplexity {rise})")
    if event.get("worst_layer"):
        parts.append(worst_layer_words(event["worst_layer"]))
    if event.get("healing"):
        parts.append(healing_words(event["healing"]))
    return "; ".join(parts) + f" (SHA-256 of the sequences {event['sequences_hash'][:16]})"


def write_section(folder: Path, text: str) -> None:
    """Replace the section about frozen heads in a folder's model card, or add it at its end."""
    path, whole = folder / CARD, f"{_BEGIN}\n{text}{_END}\n"
    card = path.read_text(encoding="utf-8") if path.is_file() else _NEW_CARD
    match = _SECTION.search(card)
    card = f"{card.rstrip()}\n\n{whole}" if match is None else card.replace(match[0], whole)
    write_atomically(path, card.encode())


def record_cost_(folder: Path, line: str) -> None:
    """Write the cost of freezing into the section of a folder's model card; raise InputError where it has none.

    Saving the model again leaves the line out: its weights may be others.
    """
    path = folder / CARD
    match = _SECTION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    if match is None:
        raise InputError(f"{path} has no section about frozen heads; give the folder that `saf freeze` wrote")
    rest = re.sub(f"^{re.escape(_COST)}.*\n\n?", "", match[1], flags=re.MULTILINE)
    write_section(folder, f"{rest}{_COST}{line}\n\n")
