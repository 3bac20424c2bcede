"""`kind_of` returns the `Kind` of a path: a checkpoint, run, data, saved model, heads, evaluation or result."""

import json
import os
import re
from enum import StrEnum
from pathlib import Path

from saf.errors import CheckpointError, InputError, SafError
from saf.records.files import read_json
from saf.records.folders import MANIFEST, finish_files_


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
    finish_files_(path)
    has = lambda *names: any((path / name).is_file() for name in names)  # noqa: E731
    if _is_transformers(path):
        # Heads that config.json does not name are none of the model's: of a model saved there before, or of `saf.save`.
        named = "saf" in json.loads((path / "config.json").read_bytes())
        return Kind.TRANSFORMERS if named or not has("saf.json") else Kind.HEADS
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


def _is_transformers(folder: Path) -> bool:
    """Return whether a folder's config.json is one of transformers."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # RecursionError: too many brackets
        return False
    return isinstance(config, dict) and "model_type" in config


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
        found = "is a .json file" if kind is Kind.RESULT else f"is {_WORDS[kind]}"
    elif Path(path).exists():
        found = "holds nothing that saf writes" if Path(path).is_dir() else "is a file"
    else:
        found = "does not exist"
    raise error(f"{path} {found}; expected {expected}")
