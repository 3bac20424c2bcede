"""Read back what is on the disk: the folder of a run (`RecordedRun`), its events, and the kind of any path (`kind_of`).

An event is one change of the heads: a freeze, a prune or an undo. Its line in events.jsonl has its kind, update,
reason, heads, seconds and values, in a run also `loss_before` and `loss_after`. An undo has the number of the event
that it `undoes`. Each freeze has a file of tensors. `saf freeze` writes both into the folder of its checkpoint.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import CheckpointError, InputError, SafError
from saf.records.files import (
    append_line,
    read_json,
    read_lines,
    read_tensors,
    to_json,
    write_atomically,
    write_lines,
    write_tensors,
)
from saf.records.result import read_result
from saf.records.table import natural_order

# --- the folder of a run


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run; parts that the run did not write are empty."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    events: list["EventRecord"] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path | str) -> "RecordedRun":
        """Read a run folder; raise InputError for another folder."""
        folder = Path(folder)
        expect(folder, Kind.RUN)

        def read(name: str) -> dict[str, Any]:
            return read_result(folder / name) if (folder / name).exists() else {}

        return cls(
            folder=folder,
            config=read_json(folder / "config.json"),
            result=read("result.json"),
            evaluation=read("evaluation.json"),
            events=read_events(folder),
            metrics=read_lines(folder / "metrics.jsonl"),
            evaluations=read_lines(folder / "evaluations.jsonl"),
        )

    def finished_result(self) -> dict[str, Any]:
        """Return result.json; raise InputError when the run has not ended."""
        if not self.result:
            raise InputError(f"{self.folder} has no result.json: the run has not ended. Go on with --resume first")
        return self.result

    def seconds(self, clock: str) -> float | None:
        """Return the seconds of the run and its parents on a clock; None before the end.

        The clocks are "everything" and "warm", which leaves out loading and compilation.
        """
        return self.result.get("time", {}).get(clock, {}).get("seconds")

    @property
    def arm(self) -> str:
        """frozen, pruned, "frozen and pruned" or ordinary: by the heads at the end, before it by the settings."""
        if self.result:
            return str(self.result["arm"])
        if not self.events and (freeze := self.config["settings"]["freeze"]):
            return STATE_AFTER[freeze["operation"]]
        return arm_of(frozen=self.frozen_heads, pruned=self.pruned_heads, events=self.events)

    @property
    def num_heads(self) -> int:
        model = self.config.get("model", {})
        return int(model.get("num_layers", 0)) * int(model.get("num_heads", 0))

    @property
    def frozen_heads(self) -> list[list[int]]:
        """Heads frozen in the final model, `[[layer, head], ...]`; until the run ends, those that its events froze."""
        return self._heads("heads", "freeze")

    @property
    def pruned_heads(self) -> list[list[int]]:
        return self._heads("pruned", "prune")

    def _heads(self, name: str, kind: str) -> list[list[int]]:
        recorded = self.result.get("provenance", {}).get(name)
        return [list(head) for head in recorded or heads_edited_by(self.events, kind)]

    @property
    def edited_heads(self) -> list[list[int]]:
        return sorted(self.frozen_heads + self.pruned_heads)

    @property
    def head_counts(self) -> dict[str, int]:
        return {"frozen": len(self.frozen_heads), "pruned": len(self.pruned_heads)}

    @property
    def heads_in_words(self) -> str:
        return heads_in_words(self.head_counts)

    @property
    def last_change(self) -> int | None:
        """The update after which heads last changed, or None."""
        recorded = (self.result.get("intervention") or {}).get("update")  # of a run without its file of events
        return max((event.update for event in self.events if event.update is not None), default=recorded)

    @property
    def standing_freezes(self) -> list["EventRecord"]:
        """The events that froze or pruned heads and were not undone, in order."""
        return [event for event in self.events if event.kind != "undo" and event.undone_by is None]

    @property
    def newest_freeze(self) -> "EventRecord | None":
        return next(reversed(self.standing_freezes), None)

    @property
    def freeze_report(self) -> dict[str, Any] | None:
        """The reports of all standing freezes as one, in the form of `FreezeReport.to_dict`; None without any."""
        return merge_reports(self.standing_freezes)

    @cached_property
    def freeze_tensors(self) -> dict[str, Tensor]:
        """The tensors of all standing freezes as one, in the form of `FreezeReport.tensors`; empty without any.

        Patterns `[F, T]` are in the order of the events and their heads. Marginals `[L, H, T]` and statistics `[L, H]`
        of a frozen head are from the event that froze it, those of a live head from the newest.
        """
        if not (events := self.standing_freezes):
            return {}
        parts = [event.tensors() for event in events]
        merged = parts[-1]
        statistics = ("eta_abs", "eta_rel", "variance", "forward_kl", "row_entropy")
        # A later event measures only the heads that are live by then.
        for event, part in zip(events[:-1], parts[:-1], strict=True):
            for name in {*statistics} & merged.keys() & part.keys():
                for layer, head in event.heads:
                    merged[name][layer, head] = part[name][layer, head]
        for name in ("alpha", "rho"):
            if all(name in part for part in parts):
                merged[name] = torch.cat([part[name] for part in parts])
            else:  # pruned heads and dense patterns have none, and the rest would no longer be in the heads' order
                merged.pop(name, None)
        return merged


def heads_of_record(path: Path | str) -> list[list[int]]:
    """Return the heads that are frozen or pruned in a run, checkpoint or events.jsonl, sorted; InputError for none."""
    path = Path(path)
    if path.suffix == ".jsonl":
        heads = heads_edited_by(read_events(path))
    elif expect(path, Kind.RUN, Kind.CHECKPOINT) is Kind.CHECKPOINT:
        heads = _heads_of_checkpoint(path)
    else:
        run = RecordedRun.open(path)
        checkpoints = sorted(path.glob("checkpoints/step-*"), key=lambda each: natural_order(each.name))
        # Until a run has a result, its events are read, which do not name its parent's heads; a checkpoint does.
        heads = run.edited_heads if run.result or not checkpoints else _heads_of_checkpoint(checkpoints[-1])
    if not heads:
        raise InputError(f"{path} must have frozen or pruned heads, got none; name another run, or heads as LAYER:HEAD")
    return sorted(heads)


def _heads_of_checkpoint(folder: Path) -> list[list[int]]:
    layers = enumerate(read_json(folder / "saf.json")["layers"])
    return [[layer, head] for layer, each in layers for kind in ("frozen", "pruned") for head in each.get(kind, ())]


# --- events

EVENTS = "events.jsonl"
STATE_AFTER = {"freeze": "frozen", "prune": "pruned", "undo": "live again"}
"""The state of an event's heads after it, by its kind."""


@dataclass
class EventRecord:
    """One recorded event: `values` is its line, from which the attributes are read.

    `number` counts from 1 in the run. `update` is the number of updates before the event, None outside of training.
    `undone_by` is the number of the event that undid it, or None.
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
        """The file of its tensors; None where there is none."""
        name = self.values.get("tensors")
        return self.folder / name if name and (self.folder / name).is_file() else None

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name: alpha and rho `[F, T]`, marginals `[L, H, T]` and statistics `[L, H]`."""
        return {} if self.tensors_path is None else read_tensors(self.tensors_path)


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
    return event_records(path.parent, lines)


def event_records(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[EventRecord]:
    """Return the records of the events with these lines, whose tensors are in `folder`."""
    # The line of an event was written before anybody knew that it would be undone: the undo's names it.
    undone = {line["undoes"]: line["number"] for line in lines if "undoes" in line}
    return [EventRecord(folder, {**line, "undone_by": undone.get(line.get("number"))}) for line in lines]


def events_file(path: Path | str) -> Path:
    """Return the events.jsonl of a folder; `path` itself where it is one, or the folder has none."""
    path = Path(path)
    return path / EVENTS if os.path.lexists(path / EVENTS) else path


def heads_edited_by(events: Iterable[EventRecord], kind: str | None = None) -> list[list[int]]:
    """Return the heads that events froze or pruned, or only those of one kind, without undone ones; sorted."""
    last = {(layer, head): event.kind for event in events for layer, head in event.heads}
    return [list(head) for head, now in sorted(last.items()) if now != "undo" and kind in (None, now)]


def merge_reports(events: Iterable[EventRecord]) -> dict[str, Any] | None:
    """Return the report of the newest freeze that was not undone, with heads and fits of all of them; None without any.

    `scores` `[L][H]` has for each frozen head the score by which it was chosen, and for live heads the newest.
    """
    lines = [event.values for event in events if event.undone_by is None and "scores" in event.values]
    if not lines:
        return None
    # The newest scores are None for heads that were frozen before.
    scores = [list(row) for row in lines[-1]["scores"]]
    for line in lines:
        for layer, head in line["heads"]:
            scores[layer][head] = line["scores"][layer][head]
    names = ("heads", "fit_kl", "rejected", "certificates", "exponential")
    of_all = {name: [each for line in lines for each in line.get(name) or ()] for name in names}
    return {**lines[-1], **of_all, "scores": scores}


def append_event(
    folder: Path, kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> EventRecord:
    """Record one more event in an existing folder, and return the record."""
    number = 1 + max((event.number for event in read_events(folder)), default=0)
    # Tensors first: after a kill in between, a line must not name a file that was never written.
    line: dict[str, Any] = {"number": number, "kind": kind}
    if tensors:
        line["tensors"] = f"event-{number}.safetensors"
        write_tensors(folder / line["tensors"], tensors)
    event = EventRecord(folder, to_json({**line, **values}))
    append_line(folder / EVENTS, event.values)
    return event


def keep_events_(folder: Path, condition: Callable[[EventRecord], bool]) -> None:
    """Remove the events of a folder that do not meet a condition, with their tensors."""
    if not (events := read_events(folder)):
        return
    # Lines first, for the same reason as in `append_event`.
    write_lines(folder / EVENTS, [event.values for event in events if condition(event)])
    for event in events:
        if not condition(event) and event.tensors_path is not None:
            event.tensors_path.unlink()


def inherit_events(source: Path, folder: Path) -> None:
    """Replace the events of `folder` by those of `source`, marked as `inherited`."""
    keep_events_(folder, lambda event: False)
    events = read_events(source)
    for event in events:
        if (path := event.tensors_path) is not None:
            write_atomically(folder / path.name, path.read_bytes())
    write_lines(folder / EVENTS, [{**event.values, "inherited": True} for event in events])


def arm_of(*, frozen: Sequence[Any], pruned: Sequence[Any], events: Iterable[EventRecord]) -> str:
    """Return frozen, pruned, "frozen and pruned" or ordinary, by heads; if all were undone, by the first event."""
    if frozen and pruned:
        return "frozen and pruned"
    if frozen or pruned:
        return "frozen" if frozen else "pruned"
    # A schedule that undid all its events is still its arm, not a second ordinary one.
    undone = [STATE_AFTER[event.kind] for event in events if event.kind != "undo" and event.heads]
    return undone[0] if undone else "ordinary"


def heads_in_words(counts: Mapping[str, int]) -> str:
    """Return how many heads are frozen and how many are pruned.

    >>> heads_in_words({"frozen": 24, "pruned": 12}), heads_in_words({"pruned": 3}), heads_in_words({})
    ('24 frozen and 12 pruned', '3 pruned', '0 frozen')
    """
    return " and ".join(f"{counts[kind]} {kind}" for kind in ("frozen", "pruned") if counts.get(kind)) or "0 frozen"


def total_in_words(changed: Mapping[str, int], in_all: Mapping[str, int]) -> str:
    """Return the words after an event's own heads: how many are frozen and pruned in all, where that is more.

    >>> total_in_words({"frozen": 3}, {"frozen": 3, "pruned": 4}), total_in_words({"frozen": 3}, {"frozen": 3})
    (', 3 frozen and 4 pruned in all', '')
    """
    return f", {heads_in_words(in_all)} in all" if sum(in_all.values()) > sum(changed.values()) else ""


# --- settings of two runs


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each entry that differs, nested ones by dotted names.

    >>> list(differing({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    [('b.c', 2, 3)]
    """
    for key in sorted({*one, *other}):
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from differing(left, right, f"{prefix}{key}.")
        elif left != right:
            yield f"{prefix}{key}", left, right


# --- what a path on the disk holds

MANIFEST = "manifest.json"
"""The file of a checkpoint that lists its other files with their checksums."""


class Kind(Enum):
    """The kinds of folders and files that commands open; values are the words for them in messages."""

    CHECKPOINT = "a checkpoint (step-N)"
    RUN = "a run"
    DATA = "a folder written by `saf data prepare`"
    MODEL = "a folder written by saf.save"
    HEADS = "the frozen heads of a model that keeps its own weights"
    TRANSFORMERS = "a model of transformers (save_pretrained)"
    EVALUATION = "an evaluation (`saf evaluate --out`)"
    RESULT = "a .json file, such as a result"


def kind_of(path: Path | str) -> Kind | None:
    """Return what a path holds, by the names of its files; None for anything else.

    A damaged folder keeps its kind: a checkpoint without its manifest is still a checkpoint, refused when it is opened.
    Raises CheckpointError for a saf.json that cannot be read.
    """
    path = Path(path)
    if path.is_file():
        return Kind.RESULT if path.suffix == ".json" else None

    def has(*names: str) -> bool:
        return any((path / name).is_file() for name in names)

    if (config := _transformers_config(path)) is not None:
        # Heads that config.json does not name are not this model's: `saf.save` or an earlier model left them there.
        return Kind.TRANSFORMERS if "saf" in config or not has("saf.json") else Kind.HEADS
    saved = Kind.MODEL if has("model.safetensors") else Kind.HEADS
    # `saf.save` writes checksums into saf.json; a checkpoint's has none.
    if has("saf.json") and "sha256" in read_json(path / "saf.json", error=CheckpointError):
        return saved
    if has(MANIFEST, "state.json"):
        return Kind.CHECKPOINT
    if (path / "checkpoints").is_dir() or has("metrics.jsonl"):
        return Kind.RUN
    if has("index.json"):
        return Kind.DATA
    if has("saf.json"):
        return saved
    # A finished run may have been copied without its checkpoints; models of other libraries have a config.json too.
    if has("config.json") and saved is Kind.HEADS:
        return Kind.RUN
    return Kind.EVALUATION if has("evaluation.json", "zero_shot.json") else None


def _transformers_config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and "model_type" in config else None


def is_transformers_model(path: Path | str) -> bool:
    """Return whether a path is a folder of a model of transformers, or has the form of a name on the hub."""
    # A folder of that name comes first, as in from_pretrained.
    is_hub_name = not Path(path).exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) is not None
    return is_hub_name or kind_of(path) is Kind.TRANSFORMERS


def expect(path: Path | str, *kinds: Kind, error: type[SafError] = InputError) -> Kind:
    """Return what a path holds; raise `error` where it is none of `kinds`."""
    kind = kind_of(path)
    if kind is not None and kind in kinds:
        return kind
    *others, last = [each.value for each in kinds]
    expected = f"{', '.join(others)} or {last}" if others else last
    # The commonest mistakes: a neighbouring kind of folder, or a checkpoint that `keep` removed.
    if kind is not None:
        actual = f"is {kind.value}"
    elif Path(path).exists():
        actual = "holds nothing that saf writes" if Path(path).is_dir() else "is a file"
    else:
        steps = sorted((step.name for step in Path(path).parent.glob("step-*")), key=natural_order)
        actual = f"does not exist (there are {', '.join(steps)})" if steps else "does not exist"
    raise error(f"{path} {actual}; expected {expected}")


def absolute_path(path: str) -> str:
    """Return the absolute form of a path that exists; another text, such as a name, as it is."""
    return os.path.abspath(path) if path and os.path.exists(path) else path
