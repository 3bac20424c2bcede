"""What a path holds (`kind_of`), and the folder of a run: settings, metrics, events, evaluation and final numbers."""

import json
import os
import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import CheckpointError, InputError, SafError
from saf.records.events import (
    STATE_AFTER,
    EventRecord,
    arm,
    chosen,
    heads_in_force,
    heads_in_words,
    read_events,
)
from saf.records.files import read_json, read_lines
from saf.records.result import read_result
from saf.records.table import natural_order

MANIFEST = "manifest.json"
"""The file of a checkpoint that lists its others with their sums."""

# --- the kinds of paths


class Kind(StrEnum):
    """The kinds of what paths hold."""

    CHECKPOINT = "checkpoint"
    RUN = "run"
    DATA = "data"
    MODEL = "model"
    HEADS = "heads"
    TRANSFORMERS = "transformers"
    EVALUATION = "evaluation"
    RESULT = "result"


_WORDS = {
    Kind.CHECKPOINT: "a checkpoint (step-N)",
    Kind.RUN: "a run",
    Kind.DATA: "a folder made by `saf data prepare`",
    Kind.MODEL: "a folder written by saf.save",
    Kind.HEADS: "the frozen heads of a model that keeps its own weights",
    Kind.TRANSFORMERS: "a model of transformers (save_pretrained)",
    Kind.EVALUATION: "an evaluation (`saf evaluate --out`)",
    Kind.RESULT: "a result (.json)",
}


def kind_of(path: Path | str) -> Kind | None:
    """Return what a path holds, by the files that only that has; None for anything else.

    A damaged one keeps its kind: a checkpoint that lost its manifest is still a checkpoint, refused when it is opened.
    Raises CheckpointError for a saf.json that cannot be read.
    """
    path = Path(path)
    if path.is_file():
        return Kind.RESULT if path.suffix == ".json" else None
    has = lambda *names: any((path / name).is_file() for name in names)  # noqa: E731
    if (config := _transformers_config(path)) is not None:
        # Heads that config.json does not name are none of the model's: of a model saved there before, or of `saf.save`.
        return Kind.TRANSFORMERS if "saf" in config or not has("saf.json") else Kind.HEADS
    saved = Kind.MODEL if has("model.safetensors") else Kind.HEADS
    # `saf.save` writes sums into saf.json; a checkpoint's has none.
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
    """Return a folder's config.json if it is one of transformers."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # RecursionError: too many brackets
        return None
    return config if isinstance(config, dict) and "model_type" in config else None


def means_transformers(path: Path | str) -> bool:
    """Return whether a path is a folder of a model of transformers, or has the form of a name on the hub."""
    named = not Path(path).exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) is not None
    return named or kind_of(path) is Kind.TRANSFORMERS


def absolute_path(path: str) -> str:
    """Return an existing path so that it names the same file from every working directory; another one as it is."""
    return os.path.abspath(path) if path and os.path.exists(path) else path


def expect(path: Path | str, *kinds: Kind, error: type[SafError] = InputError) -> Kind:
    """Return what a path holds; raise `error`, with what was expected and what is there, for none of `kinds`."""
    kind = kind_of(path)
    if kind in kinds and kind is not None:
        return kind
    *others, last = [_WORDS[kind] for kind in kinds]
    expected = f"{', '.join(others)} or {last}" if others else last
    if kind is not None:
        actual = "is a .json file" if kind is Kind.RESULT else f"is {_WORDS[kind]}"
    elif Path(path).exists():
        actual = "holds nothing that saf writes" if Path(path).is_dir() else "is a file"
    else:
        steps = sorted((step.name for step in Path(path).parent.glob("step-*")), key=natural_order)
        actual = f"does not exist (there are {', '.join(steps)})" if steps else "does not exist"
    raise error(f"{path} {actual}; expected {expected}")


# --- the folder of a run


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run; parts that the run did not write are None or empty."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    events: list[EventRecord] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path | str) -> "RecordedRun":
        """Read a run folder; raise InputError for another folder."""
        folder = Path(folder)
        expect(folder, Kind.RUN)
        result, evaluation = (
            read_result(folder / name) if (folder / name).exists() else None
            for name in ("result.json", "evaluation.json")
        )
        return cls(
            folder=folder,
            config=read_json(folder / "config.json"),
            result=result,
            evaluation=evaluation,
            events=read_events(folder),
            metrics=read_lines(folder / "metrics.jsonl"),
            evaluations=read_lines(folder / "evaluations.jsonl"),
        )

    def finished_result(self) -> dict[str, Any]:
        """Return result.json; raise InputError when the run has not ended."""
        if self.result is None:
            raise InputError(f"{self.folder} has no result.json: the run has not ended. Resume it first")
        return self.result

    def seconds(self, clock: str) -> float | None:
        """Return the run's seconds on a clock, "everything" or "warm" (without loading and compilation).

        A branch counts its parent's part too. None before the end.
        """
        return (((self.result or {}).get("time") or {}).get(clock) or {}).get("seconds")

    @property
    def missing(self) -> list[str]:
        """Parts that a finished run's settings ask for and its records do not have, in words."""
        return list((self.result or {}).get("missing", []))

    # --- heads

    @property
    def arm(self) -> str:
        """frozen, pruned, "frozen and pruned" or ordinary: the state of the heads at the end, or the intended one."""
        if self.result is not None:
            return str(self.result["arm"])
        if not self.events and (freeze := self.config.get("freeze")):
            return STATE_AFTER[freeze.get("operation", "freeze")]
        return arm(frozen=self.frozen_heads, pruned=self.pruned_heads, events=self.events)

    @property
    def num_heads(self) -> int:
        model = self.config.get("model") or {}
        return int(model.get("num_layers", 0)) * int(model.get("num_heads", 0))

    @property
    def frozen_heads(self) -> list[list[int]]:
        """Every head frozen in the final model, `[[layer, head], ...]`; the events' until the run ends."""
        return self._heads("heads", "freeze")

    @property
    def pruned_heads(self) -> list[list[int]]:
        return self._heads("pruned", "prune")

    def _heads(self, name: str, kind: str) -> list[list[int]]:
        provenance = (self.result or {}).get("provenance") or {}
        return [list(head) for head in provenance.get(name) or heads_in_force(self.events, kind)]

    @property
    def edited_heads(self) -> list[list[int]]:
        return sorted(self.frozen_heads + self.pruned_heads)

    @property
    def head_counts(self) -> dict[str, int]:
        return {"frozen": len(self.frozen_heads), "pruned": len(self.pruned_heads)}

    @property
    def heads_in_words(self) -> str:
        return heads_in_words(self.head_counts)

    # --- events

    @property
    def freeze_update(self) -> int | None:
        """The update after which heads were first frozen or pruned, or None."""
        intervention = (self.result or {}).get("intervention") or {}
        update = intervention.get("update", self.events[0].update if self.events else None)
        return None if update is None else int(update)

    @property
    def last_change(self) -> int | None:
        """The update after which heads were last frozen, pruned or made live again, or None."""
        return max((event.update for event in self.events if event.update is not None), default=self.freeze_update)

    @property
    def _freezes(self) -> list[EventRecord]:
        """The events that froze or pruned heads and were not undone, in order."""
        return [event for event in self.events if event.kind != "undo" and event.undone_by is None]

    @property
    def newest_freeze(self) -> EventRecord | None:
        return next(reversed(self._freezes), None)

    @property
    def freeze(self) -> dict[str, Any] | None:
        """Heads, scores and fits of the freezes that were not undone, as `chosen` joins them; None without any."""
        return chosen(self._freezes)

    @cached_property
    def freeze_tensors(self) -> dict[str, Tensor]:
        """Patterns `[F, T]`, marginals `[L, H, T]` and statistics `[L, H]` of the freezes that were not undone.

        Patterns are in the order of the events and their heads. A frozen head's marginals and statistics are from the
        event that froze it, a live one's from the newest.
        """
        events = self._freezes
        if not events:
            return {}
        parts = [event.tensors() for event in events]
        joined = parts[-1]
        statistics = ("eta_abs", "eta_rel", "variance", "forward_kl", "row_entropy")
        for event, part in zip(events[:-1], parts[:-1], strict=True):
            for name in {*statistics} & joined.keys() & part.keys():
                for layer, head in event.heads:
                    joined[name][layer, head] = part[name][layer, head]
        for name in ("alpha", "rho"):
            if all(name in part for part in parts):
                joined[name] = torch.cat([part[name] for part in parts])
            else:
                joined.pop(name, None)
        return joined


def heads_of_record(path: Path | str) -> list[list[int]]:
    """Return the heads that are frozen or pruned in a run, checkpoint or events.jsonl, sorted.

    Raises InputError where there is no such head.
    """
    path, states = Path(path), []
    if path.suffix == ".jsonl":
        heads = heads_in_force(read_events(path))
    elif expect(path, Kind.RUN, Kind.CHECKPOINT) is Kind.CHECKPOINT:
        heads, states = [], [path / "saf.json"]
    else:
        run = RecordedRun.open(path)
        heads = run.edited_heads
        if run.result is None:  # its events do not name its parent's heads
            states = sorted(path.glob("checkpoints/step-*/saf.json"), key=lambda each: natural_order(each.parent.name))
    if states:
        layers = enumerate(read_json(states[-1])["layers"])
        heads = [
            [layer, head] for layer, each in layers for kind in STATE_AFTER.values() for head in each.get(kind, ())
        ]
    if not heads:
        raise InputError(f"{path} must have frozen or pruned heads, got none; name another run, or heads as LAYER:HEAD")
    return sorted(heads)
