"""`write_section` writes the section about a model's edited heads into its model card, the folder's README.md.

The section has a map of the heads, the line that opens the folder, and a line for each event. Text around it stays.
"""

import re
from pathlib import Path
from statistics import median
from typing import Any

from saf.errors import InputError
from saf.freeze_report import cost_words, current_events, healing_words, loss_of
from saf.frozen_state import IMPORT_LINE
from saf.heads import EDITED
from saf.hf.attention import config_entry
from saf.hf.families import CAUSAL
from saf.models.adapter import Adapter
from saf.records.files import write_atomically
from saf.records.run import heads_in_words

CARD = "README.md"
_BEGIN, _END = "<!-- frozen heads: written by saf -->", "<!-- end of frozen heads -->"
_SECTION = re.compile(f"{re.escape(_BEGIN)}\n(.*?){re.escape(_END)}\n?", re.DOTALL)
_COST = "- what freezing cost: "
_NEW_CARD = "---\nlibrary_name: transformers\ntags:\n- saf\n---\n\n# A model with frozen attention heads\n"
_MARKS = {"live": ".", "frozen": "F", "pruned": "P"}


def write_section(folder: Path, adapter: Adapter) -> None:
    """Replace the section about a model's edited heads in a folder's model card, or append it."""
    _replace_section(folder, _section(adapter))


def record_cost_(folder: Path, line: str) -> None:
    """Write the cost of freezing into the model card's section; raise InputError where the card has no section.

    Saving the model again drops the line, as its weights may have changed.
    """
    path = folder / CARD
    match = _SECTION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    if match is None:
        raise InputError(f"{path} has no section about frozen heads; give the folder that `saf freeze` wrote")
    rest = re.sub(f"^{re.escape(_COST)}.*\n\n?", "", match[1], flags=re.MULTILINE)
    _replace_section(folder, f"{rest}{_COST}{line}\n\n")


def entry_of(adapter: Adapter) -> dict[str, Any]:
    """Return the configuration's entry that the model's layers share."""
    return config_entry(adapter.sites()[0].attention.config)


def _replace_section(folder: Path, text: str) -> None:
    path, new = folder / CARD, f"{_BEGIN}\n{text}{_END}\n"
    card = path.read_text(encoding="utf-8") if path.is_file() else _NEW_CARD
    match = _SECTION.search(card)
    # Not `_SECTION.sub`, which would read backslashes in the text as groups.
    card = f"{card.rstrip()}\n\n{new}" if match is None else card.replace(match[0], new)
    write_atomically(path, card.encode())


def _section(adapter: Adapter) -> str:
    counts = {kind: len(adapter.heads(kind)) for kind in _MARKS}
    total, entry = sum(counts.values()), entry_of(adapter)
    longest = entry["max_length"]
    limit = "" if longest is None else f" It takes inputs of up to {longest} tokens, the length it was calibrated on."
    name = type(adapter.model).__name__
    opens = "AutoModelForCausalLM" if name.endswith(CAUSAL) else name
    rows = []
    for number, site in enumerate(adapter.sites()):
        marks = {head: mark for kind, mark in _MARKS.items() for head in getattr(site.layout, kind)}
        rows.append(f"layer {number:3d}  {''.join(marks[head] for head in sorted(marks))}\n")
    current = current_events(entry["events"], adapter.heads(*EDITED))
    events = "".join(f"- {_event_line(event)}\n" for event in current)
    return (
        f"## Frozen attention heads\n\nOf its {total} attention heads this model has {heads_in_words(counts)}, a share "
        f"of {(total - counts['live']) / total:.1%}.{limit} This opens the folder:\n\n"
        f"```python\n{IMPORT_LINE}  # without it, transformers refuses the shapes of the weights\n"
        f"from transformers import {opens}\n\nmodel = {opens}.from_pretrained(folder)\n```\n\n"
        f"A character a head, `.` ordinary, `F` frozen, `P` pruned:\n\n```text\n{''.join(rows)}```\n\n{events}"
    )


def _event_line(event: dict[str, Any]) -> str:
    count = len(event["heads"])
    chosen = "as named" if event.get("named") else f"by {event['score_name']}"
    patterns = f", patterns by {event['pattern']}" if event["kind"] == "frozen" else ""
    undone = "" if event["remaining"] == count else f" ({event['remaining']} of them still)"
    noun = "head" if count == 1 else "heads"
    parts = [f"{count} {noun} {event['kind']}{undone} {chosen}{patterns}"]
    if event.get("update") is not None:
        parts.append(f"after update {event['update']}")
    data = f" of {event['data']}" if event.get("data") else ""
    bos = ", each begun by the BOS token" if event.get("bos") is not None else ""
    parts.append(f"calibrated on {event['num_sequences']} sequences of {event['length']} tokens{data}{bos}")
    if divergences := [kl for *_, kl in event["fit_kl"]]:
        parts.append(f"KL of the fits {median(divergences):.4f} nats (median), {max(divergences):.4f} at most")
    if loss_of(event) is not None:
        parts.append(cost_words(event))
    if event.get("healing"):
        parts.append(healing_words(event["healing"]))
    return "; ".join(parts) + f" (SHA-256 of the sequences {event['sequences_hash'][:16]})"
