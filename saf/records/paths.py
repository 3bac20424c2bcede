"""Which kind of folder or file a path is: a checkpoint, a run, data, a saved model, heads, an evaluation, a result."""

import json
import os
import re
from enum import StrEnum
from pathlib import Path

from saf.errors import CheckpointError, InputError, SafError
from saf.records.files import read_json
from saf.records.folders import MANIFEST, finish_files_


class Kind(StrEnum):
    """Name what a path holds."""

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

    Raises CheckpointError for a saf.json that cannot be read.

    A damaged one keeps its kind: a checkpoint that lost its manifest is still a checkpoint, refused when it is opened.
    """
    path = Path(path)
    if path.is_file():
        return Kind.RESULT if path.suffix == ".json" else None
    finish_files_(path)
    theirs = _of_transformers(path)
    if theirs is not None:
        return theirs
    saved = Kind.MODEL if (path / "model.safetensors").is_file() else Kind.HEADS
    # What saf.save wrote has sums in its saf.json, and stays what it is beside anything else, such as a trainer's
    # checkpoints; a checkpoint has a saf.json without sums. Files of saf.save from before there were sums come last.
    state = path / "saf.json"
    if state.is_file() and "sha256" in read_json(state, error=CheckpointError):
        return saved
    if any((path / name).is_file() for name in (MANIFEST, "state.json")):
        return Kind.CHECKPOINT
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file():
        return Kind.RUN
    if (path / "index.json").is_file():
        return Kind.DATA
    if state.is_file():
        return saved
    # A finished run may have been copied without its checkpoints; models of other libraries have a config.json too.
    if (path / "config.json").is_file() and saved is Kind.HEADS:
        return Kind.RUN
    evaluated = any((path / name).is_file() for name in ("evaluation.json", "zero_shot.json"))
    return Kind.EVALUATION if evaluated else None


def absolute_path(path: str) -> str:
    """Return a path that names the same file from every working directory; what is not there stays as it is."""
    return os.path.abspath(path) if path and os.path.exists(path) else path


def means_transformers(path: Path | str) -> bool:
    """Return whether a path is a folder of a model of transformers, or has the form of a name on the hub."""
    named = not Path(path).exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) is not None
    return named or kind_of(path) is Kind.TRANSFORMERS


def _of_transformers(folder: Path) -> Kind | None:
    """Return what a folder is whose config.json is one of transformers: the model, or heads beside it; None for others.

    Heads that config.json does not tell of are none of the model's: of a model saved there before, or of `saf.save`.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # also of too many brackets
        return None
    if not isinstance(config, dict) or "model_type" not in config:
        return None
    return Kind.TRANSFORMERS if "saf" in config or not (folder / "saf.json").is_file() else Kind.HEADS


def expect(path: Path | str, *kinds: Kind, error: type[SafError] = InputError) -> Kind:
    """Return what a path holds.

    Raises:
        error: It is none of `kinds`; the message says what was expected and what is there.
    """
    kind = kind_of(path)
    if kind in kinds and kind is not None:
        return kind
    *others, last = [_WORDS[kind] for kind in kinds]
    expected = f"{', '.join(others)} or {last}" if others else last
    raise error(f"{path} {_description(Path(path), kind)}; expected {expected}")


def _description(path: Path, kind: Kind | None) -> str:
    """Return what a path is, in words that follow its name."""
    if kind is Kind.RESULT:
        return "is a .json file"
    if kind is not None:
        return f"is {_WORDS[kind]}"
    if not path.exists():
        return "does not exist"
    return "holds nothing that saf writes" if path.is_dir() else "is a file"
