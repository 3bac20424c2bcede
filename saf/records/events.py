"""The record of a run's events: a line of events.jsonl for each, and beside it a file of its tensors.

An event is one change of the heads: a freeze, a prune or an undo. Its line has its kind, update and reason, its heads,
its cost in seconds and its values, `loss_before` and `loss_after` among them in a run; an undo has the number of the
event that it `undoes`. `saf freeze` writes the line of its event into the folder of the checkpoint that it makes.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from saf.errors import InputError
from saf.records.files import (
    append_line,
    read_lines,
    read_tensors,
    to_json,
    write_atomically,
    write_lines,
    write_tensors,
)

EVENTS = "events.jsonl"
STATE_AFTER = {"freeze": "frozen", "prune": "pruned", "undo": "live again"}
"""What the heads of each kind of event are after it."""


@dataclass
class EventRecord:
    """One recorded event; `values` is its line.

    `number` counts from 1 in the run. `kind` is freeze, prune or undo. `update` is the number of updates before it,
    None outside of training. `heads` are frozen, removed, or live again. `seconds` are those of its parts. `undone_by`
    is the number of the event that took it back; None for one that stands.
    """

    folder: Path
    values: dict[str, Any]

    def __post_init__(self):
        line = self.values
        self.number: int = line.get("number", 0)
        self.kind: str = line["kind"]
        self.update: int | None = line.get("update")
        self.heads: list[list[int]] = line["heads"]
        self.seconds: dict[str, float] = line.get("seconds", {})
        self.undone_by: int | None = line.get("undone_by")

    @property
    def tensors_path(self) -> Path | None:
        """The file of its tensors; None when it has none or the file is gone."""
        name = self.values.get("tensors")
        return self.folder / name if name and (self.folder / name).is_file() else None

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name; empty when it has none, or their file is gone.

        A freeze has the patterns' alpha and rho `[F, T]`, the marginals `[L, H, T]` and the statistics `[L, H]`.
        """
        return {} if self.tensors_path is None else read_tensors(self.tensors_path)


# --- reading


def read_events(path: Path | str) -> list[EventRecord]:
    """Return the events recorded in a folder of a run or checkpoint, or in its events.jsonl, in order."""
    path = events_file(path)
    if path.is_dir() and path.name != EVENTS:
        return []
    if not path.is_file() or path.suffix != ".jsonl":
        raise InputError(f"{path} must be a run's {EVENTS} or the folder that holds it")
    lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        if not {"kind", "heads"} <= line.keys():
            raise InputError(f"{path}, line {number}, must have a kind and heads")
    undone = {line["undoes"]: line["number"] for line in lines if "undoes" in line}
    return [EventRecord(path.parent, {**line, "undone_by": undone.get(line.get("number"))}) for line in lines]


def events_file(path: Path | str) -> Path:
    """Return the events.jsonl of a folder; `path` itself where it is one, or the folder has none."""
    path = Path(path)
    return path / EVENTS if os.path.lexists(path / EVENTS) else path


def heads_in_force(events: Iterable[EventRecord], kind: str | None = None) -> list[list[int]]:
    """Return the heads that events froze or pruned and no undo made live again, sorted; of one kind if given."""
    last = {(layer, head): event.kind for event in events for layer, head in event.heads}
    return [list(head) for head, now in sorted(last.items()) if now != "undo" and kind in (None, now)]


def chosen(events: Iterable[EventRecord]) -> dict[str, Any] | None:
    """Return the line of the newest event that stands with heads, scores and fits of all; None without scores.

    `scores` `[L][H]` are those by which each head was chosen, and the newest ones of live heads.
    """
    lines = [event.values for event in events if event.undone_by is None and "scores" in event.values]
    if not lines:
        return None
    scores = [list(row) for row in lines[-1]["scores"]]
    for line in lines:
        for layer, head in line["heads"]:
            scores[layer][head] = line["scores"][layer][head]
    names = ("heads", "fit_kl", "rejected", "certificates", "exponential")
    joined = {name: [each for line in lines for each in line.get(name) or ()] for name in names}
    return {**lines[-1], **joined, "scores": scores}


# --- in words


def arm(*, frozen: Sequence[Any], pruned: Sequence[Any], events: Iterable[EventRecord]) -> str:
    """Return frozen, pruned, both or ordinary by a model's heads, or by its events where these were all undone."""
    kinds = [kind for kind, heads in (("frozen", frozen), ("pruned", pruned)) if heads]
    undone = [STATE_AFTER[event.kind] for event in events if event.kind != "undo" and event.heads]
    return " and ".join(kinds) or next(iter(undone), "ordinary")


def head_counts(heads: Iterable[Sequence[int]], *, pruned: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return how many of some heads, all frozen but those in `pruned`, are frozen and how many are pruned."""
    removed = {tuple(head) for head in pruned}
    kinds = ["pruned" if tuple(head) in removed else "frozen" for head in heads]
    return {kind: kinds.count(kind) for kind in ("frozen", "pruned")}


def heads_in_words(counts: Mapping[str, int]) -> str:
    """Return how many heads are frozen and how many are pruned.

    >>> heads_in_words({"frozen": 24, "pruned": 12}), heads_in_words({"pruned": 3}), heads_in_words({})
    ('24 frozen and 12 pruned', '3 pruned', '0 frozen')
    """
    return " and ".join(f"{counts[kind]} {kind}" for kind in ("frozen", "pruned") if counts.get(kind)) or "0 frozen"


def total_in_words(changed: Mapping[str, int], in_all: Mapping[str, int]) -> str:
    """Return how many heads are frozen and pruned in all, where that is more than an event changed.

    >>> total_in_words({"frozen": 3}, {"frozen": 3, "pruned": 4}), total_in_words({"frozen": 3}, {"frozen": 3})
    (', 3 frozen and 4 pruned in all', '')
    """
    return f", {heads_in_words(in_all)} in all" if sum(in_all.values()) > sum(changed.values()) else ""


# --- writing


def append_event(
    folder: Path, kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> EventRecord:
    """Record one more event in an existing folder: its tensors first, then its line; return the record."""
    number = 1 + max((event.number for event in read_events(folder)), default=0)
    line: dict[str, Any] = {"number": number, "kind": kind}
    if tensors:
        line["tensors"] = f"event-{number}.safetensors"
        write_tensors(folder / line["tensors"], tensors)
    event = EventRecord(folder, to_json({**line, **values}))
    append_line(folder / EVENTS, event.values)
    return event


def keep_events_(folder: Path, keep: Callable[[EventRecord], bool]) -> None:
    """Forget the events of a folder that `keep` refuses, with their tensors."""
    if not (events := read_events(folder)):
        return
    write_lines(folder / EVENTS, [event.values for event in events if keep(event)])
    for event in events:
        if not keep(event) and event.tensors_path is not None:
            event.tensors_path.unlink()


def inherit_events(source: Path, folder: Path) -> None:
    """Replace the events of `folder` by those of `source`, marked as `inherited`."""
    keep_events_(folder, lambda event: False)
    events = read_events(source)
    for event in events:
        if (path := event.tensors_path) is not None:
            write_atomically(folder / path.name, path.read_bytes())
    write_lines(folder / EVENTS, [{**event.values, "inherited": True} for event in events])
