"""The record of a run's events: a line of events.jsonl each, and beside it one file of tensors each.

An event is one change of the heads: a freeze, a prune or an undo. Its line says what kind it is, after which update it
came and why, which heads it concerns, what it cost in seconds and what came of it: `loss_before` and `loss_after`, the
controller losses around it, where a run carried it out; the rest depends on the kind. `undone_by` is the number of the
event that took it back, null for an event that was kept. `saf freeze` writes the line of
its event into the folder of the checkpoint that it makes.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from saf.errors import InputError
from saf.records.files import (
    append_line,
    check_file,
    file_hash,
    read_json,
    read_lines,
    read_tensors,
    to_json,
    write_atomically,
    write_lines,
    write_tensors,
)
from saf.records.paths import Kind, kind_of
from saf.records.result import read_result

EVENTS = "events.jsonl"
SUM = "tensors_sha256"
"""Entry of an event's line: the SHA-256 of the file of its tensors."""
MADE = {"freeze": "frozen", "prune": "pruned", "undo": "live again"}
"""What each kind of event makes of its heads."""
_OF_FITS = ("fit_kl", "rejected", "certificates", "exponential")
"""What a freeze lists of the heads that were fitted."""


@dataclass(frozen=True)
class EventRecord:
    """One event as it was recorded; `values` is its line, with whatever its kind adds."""

    folder: Path
    values: dict[str, Any]

    @property
    def number(self) -> int:
        """Its number in the run, from 1."""
        return int(self.values["number"])

    @property
    def kind(self) -> str:
        """freeze, prune or undo."""
        return str(self.values["kind"])

    @property
    def made(self) -> str:
        """What its heads are after it: frozen, pruned or live again."""
        return MADE[self.kind]

    @property
    def update(self) -> int | None:
        """After how many updates it came; None for an event outside of training."""
        return self.values.get("update")

    @property
    def heads(self) -> list[list[int]]:
        """Its heads, `[[layer, head], ...]`: frozen, removed, or live again."""
        return [list(head) for head in self.values["heads"]]

    @property
    def undone_by(self) -> int | None:
        """The number of the event that took it back; None for one that was kept."""
        return self.values.get("undone_by")

    @property
    def seconds(self) -> dict[str, float]:
        """What its parts cost in seconds."""
        return dict(self.values.get("seconds", {}))

    @property
    def tensors_path(self) -> Path | None:
        """The file of its tensors; None when it has none or the file is gone."""
        name = self.values.get("tensors")
        return self.folder / name if name and (self.folder / name).is_file() else None

    @property
    def lacks(self) -> list[str]:
        """What of it is gone, in words: the file of its tensors."""
        name = self.values.get("tensors")
        if not name or self.tensors_path is not None:
            return []
        return [f"events: {name} is missing, so the patterns and statistics of event {self.number} are not known"]

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name; empty when it has none, or their file is gone.

        A freeze has the patterns' alpha, rho and log_z `[F, T]`, the marginals `[L, H, T]` and the statistics `[L, H]`.
        Raises InputError for a file that is not as it was recorded.
        """
        path = self.checked_tensors_path()
        return {} if path is None else read_tensors(path)

    def tensors_hash(self) -> str | None:
        """Return the recorded SHA-256 of the file of its tensors; None without one."""
        return None if self.tensors_path is None else self.values.get(SUM)

    def checked_tensors_path(self) -> Path | None:
        """Return `tensors_path` after comparing the file with its sum; raise InputError as `tensors` does."""
        if self.tensors_path is not None:
            advice = "move it away to go on without patterns and statistics"
            check_file(self.tensors_path, sha256=self.values[SUM], advice=advice)
        return self.tensors_path


def read_events(path: Path | str) -> list[EventRecord]:
    """Return the events recorded in a folder of a run or checkpoint, in order; none where there are none.

    `path` may also be the events.jsonl. Raises InputError when it cannot be read.
    """
    path = events_file(path)
    if path.is_dir() and path.name != EVENTS:
        return []
    if not path.is_file() or path.suffix != ".jsonl":
        raise InputError(f"{path} must be a run's {EVENTS} or the folder that holds it")
    lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        if not {"kind", "heads"} <= line.keys():
            raise InputError(f"{path}, line {number}, must have a kind and heads")
    return [EventRecord(path.parent, line) for line in lines]


def events_file(path: Path | str) -> Path:
    """Return the file that holds a folder's record of events; `path` itself where it is one, or none is in it."""
    path = Path(path)
    return path / EVENTS if os.path.lexists(path / EVENTS) else path


def heads_in_force(events: Iterable[EventRecord], made: str | None = None) -> list[list[int]]:
    """Return the heads that events froze or pruned and none made live again, `[[layer, head], ...]`, sorted.

    With `made`, "frozen" or "pruned", those alone.
    """
    heads = {(layer, head): event.made for event in events for layer, head in event.heads}
    return [list(head) for head, now in sorted(heads.items()) if now == made or (made is None and now != MADE["undo"])]


def heads_of_record(path: Path | str) -> list[list[int]]:
    """Return the heads that are frozen or pruned in a run or checkpoint, or in that of an events.jsonl, sorted.

    Those of its parent are among them. Raises InputError where there is none, or for a folder that is none of these.
    """
    path, advice = Path(path), "name a run that froze or pruned heads, or heads as LAYER:HEAD"
    events = read_events(path)
    changed = {tuple(head) for event in events for head in event.heads}  # perhaps since the newest checkpoint
    kept = {tuple(head) for head in _heads_of_model(path)} - changed
    if heads := sorted(kept | {tuple(head) for head in heads_in_force(events)}):
        return [list(head) for head in heads]
    if changed:
        raise InputError(f"{path} made all heads live again that it froze or pruned; {advice}")
    kind = kind_of(path)
    if events or path.suffix == ".jsonl" or kind is Kind.RUN:
        raise InputError(f"{path} froze and pruned no heads; {advice}")
    if kind is Kind.CHECKPOINT:
        raise InputError(f"{path} has no record of events; name the folder of its run, or heads as LAYER:HEAD")
    raise InputError(f"{path} must be a run or a checkpoint; {advice}")


def _heads_of_model(path: Path) -> list[list[int]]:
    """Return the heads that a run's result or its newest checkpoint, or a checkpoint, lists as frozen or pruned."""
    folder = path.parent if path.name == EVENTS else path
    if (result := folder / "result.json").is_file():
        provenance = read_result(result)["provenance"]
        return [*(provenance.get("heads") or []), *(provenance.get("pruned") or [])]
    steps = [(re.findall(r"\d+", state.parent.name), state) for state in folder.glob("checkpoints/step-*/saf.json")]
    newest = max(steps, key=lambda step: (int(step[0][0]), step[1].parent.name), default=(None, folder / "saf.json"))[1]
    layers = enumerate(read_json(newest).get("layers") or [] if newest.is_file() else [])
    return [[layer, head] for layer, edited in layers for made in MADE.values() for head in edited.get(made) or []]


def arm(*, frozen: Sequence[Any], pruned: Sequence[Any], events: Iterable[EventRecord]) -> str:
    """Return frozen, pruned, both or ordinary by a model's heads, or by its events where these were all undone."""
    kinds = [kind for kind, heads in ((MADE["freeze"], frozen), (MADE["prune"], pruned)) if heads]
    made = [event.made for event in events if event.kind != "undo" and event.heads]
    return " and ".join(kinds) if kinds else made[0] if made else "ordinary"


def head_counts(heads: Iterable[Sequence[int]], *, pruned: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return how many of some heads, all frozen but those in `pruned`, are frozen and how many are pruned."""
    removed = {tuple(head) for head in pruned}
    kinds = [MADE["prune" if tuple(head) in removed else "freeze"] for head in heads]
    return {kind: kinds.count(kind) for kind in (MADE["freeze"], MADE["prune"])}


def heads_in_words(counts: Mapping[str, int]) -> str:
    """Return how many heads are frozen and how many are pruned.

    >>> heads_in_words({"frozen": 24, "pruned": 12}), heads_in_words({"pruned": 3}), heads_in_words({})
    ('24 frozen and 12 pruned', '3 pruned', '0 frozen')
    """
    told = [f"{counts[kind]} {kind}" for kind in (MADE["freeze"], MADE["prune"]) if counts.get(kind)]
    return " and ".join(told) or f"0 {MADE['freeze']}"


def beside_earlier(changed: Mapping[str, int], in_all: Mapping[str, int]) -> tuple[str, str]:
    """Return "more" where heads of the changed kind existed before, and all heads by kind; "" for none before.

    >>> beside_earlier({"frozen": 3}, {"frozen": 8}), beside_earlier({"frozen": 3}, {"frozen": 3, "pruned": 4})
    (('more', '8 in all'), ('', '3 frozen and 4 pruned in all'))
    >>> beside_earlier({"pruned": 3}, {"frozen": 1, "pruned": 4}), beside_earlier({"pruned": 3}, {"pruned": 3})
    (('more', '1 frozen and 4 pruned in all'), ('', ''))
    """
    total = sum(in_all.values())
    if total <= sum(changed.values()):
        return "", ""
    more = "more" if any(0 < count < in_all[kind] for kind, count in changed.items()) else ""
    kinds = {kind for kind, count in (*changed.items(), *in_all.items()) if count}
    return more, f"{total if len(kinds) == 1 else heads_in_words(in_all)} in all"


def chosen(events: Iterable[EventRecord]) -> dict[str, Any] | None:
    """Return the line of the newest kept event with heads, scores and fits of all; None without one that has scores.

    `scores` `[L][H]` are those by which each head was chosen, and the newest ones of live heads.
    """
    kept = [event.values for event in events if event.undone_by is None and {"heads", "scores"} <= event.values.keys()]
    if not kept:
        return None
    scores = [list(row) for row in kept[-1]["scores"]]
    for event in kept:
        for layer, head in event["heads"]:
            scores[layer][head] = event["scores"][layer][head]
    joined = {name: [one for event in kept for one in event.get(name) or ()] for name in ("heads", *_OF_FITS)}
    return {**kept[-1], **joined, "scores": scores}


def append_event(
    folder: Path, kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> EventRecord:
    """Record one more event in an existing folder: its tensors first, then its line; return the record."""
    number = 1 + max((event.number for event in read_events(folder)), default=0)
    line: dict[str, Any] = {"number": number, "kind": kind}
    if tensors:
        line["tensors"] = f"event-{number}.safetensors"
        line[SUM] = file_hash(write_tensors(folder / line["tensors"], tensors))
    event = EventRecord(folder, to_json({**line, **values, "undone_by": None}))
    if "undoes" in values:
        _write(folder, [*read_events(folder), event])  # whose line is told too, at once
    else:
        append_line(folder / EVENTS, event.values)
    return event


def keep_events_(folder: Path, keep: Callable[[EventRecord], bool]) -> None:
    """Forget the events of a folder that `keep` refuses, with their tensors."""
    events = read_events(folder)
    if not events:
        return
    kept = [event for event in events if keep(event)]
    _write(folder, kept)
    for event in events:
        if event.number not in {each.number for each in kept} and event.tensors_path is not None:
            event.tensors_path.unlink()


def inherit_events(source: Path, folder: Path) -> None:
    """Record in `folder`, instead of what it had, the events of `source`, marked as `inherited`."""
    keep_events_(folder, lambda event: False)
    events = read_events(source)
    for event in events:
        if (path := event.checked_tensors_path()) is not None:
            write_atomically(folder / path.name, path.read_bytes())
    _write(folder, [EventRecord(folder, {**event.values, "inherited": True}) for event in events])


def _write(folder: Path, events: list[EventRecord]) -> None:
    """Write lines that say of each event whether one of the others undoes it."""
    undone = {event.values["undoes"]: event.number for event in events if "undoes" in event.values}
    write_lines(folder / EVENTS, [{**event.values, "undone_by": undone.get(event.number)} for event in events])
