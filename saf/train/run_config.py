"""config.json: what a run was asked for, and what that resolved to."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saf.data import TokenData
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.models import GPTConfig, preset
from saf.records.files import read_json, to_json
from saf.train.config import TrainConfig, in_present_form

SCHEMA = "saf.run/1"
VOCABULARY_MULTIPLE = 64
_ARITHMETIC = (
    *("batch_size", "accumulation", "updates", "peak_lr", "min_lr_ratio", "warmup", "lr_by", "lr_start"),
    *("time_budget_seconds", "betas", "weight_decay", "clip", "seed", "sampler"),
)
_FREE_ON_RESUME = frozenset(
    ("out", "data", "device", "eval_every", "save_every", "keep", "log_every", "tensorboard", "quiet")
)


def model_config(config: TrainConfig, data: TokenData) -> GPTConfig:
    """Return the model's shape: the preset, the data's vocabulary, the run's length, then the overrides.

    Raises:
        InputError: The vocabulary or the positions are too few for the data.
    """
    rounded = -(-data.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    length = {} if config.length is None else {"max_length": config.length}
    shape = preset(config.model, **{"vocab_size": rounded, **length, **config.model_overrides})
    if shape.vocab_size < data.vocab_size:
        raise InputError(f"vocab_size {shape.vocab_size} is less than the tokenizer's {data.vocab_size}")
    if config.length is not None and shape.max_length < config.length:
        raise InputError(f"max_length {shape.max_length} is less than the run's length {config.length}")
    return shape


def run_config(
    config: TrainConfig, *, model: GPTConfig, data: TokenData, execution: Execution, parent: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the contents of config.json; `train` holds what decides the arithmetic of an update."""
    settings = config.to_dict()
    train = {
        "length": config.length or model.max_length,
        **{name: settings[name] for name in _ARITHMETIC},
        "precision": execution.precision,
        "compile": execution.compile,
    }
    freeze = None
    if config.freeze is not None:
        names = ("schedule", "calibration_sequences", "calibration_source", "heldout_sequences")
        freeze = {**settings["freeze"], "freeze_at": config.freeze_update, **{name: settings[name] for name in names}}
    return {
        "schema": SCHEMA,
        "model": asdict(model),
        "train": train,
        "freeze": freeze,
        "data": {"folder": config.data, "fingerprint": data.fingerprint, "tokenizer": data.index.tokenizer.sha256},
        "parent": parent,
        "device": execution.device_name,
        "settings": settings,
    }


def recorded_config(folder: Path | str) -> TrainConfig:
    """Return the settings of the run in `folder`, to resume it; raise InputError when there is no run."""
    return TrainConfig.from_dict(read_json(Path(folder) / "config.json")["settings"])


def check_same_run(config: TrainConfig, before: dict[str, Any]) -> None:
    """Raise InputError naming every setting that differs from the recorded ones, but for paths and logging."""
    asked, before = to_json(config.to_dict()), in_present_form(before)
    kept = sorted(asked.keys() - _FREE_ON_RESUME)
    if shown := "; ".join(told for key in kept for told in _changes(key, before.get(key), asked[key])):
        raise InputError(
            f"cannot resume with other settings ({shown}). Leave them out, or start another run with parent="
        )


def _changes(name: str, before: Any, asked: Any) -> Iterator[str]:
    """Say what differs, of settings that have settings of their own only those."""
    if isinstance(before, dict) and isinstance(asked, dict):
        for key in sorted({*before, *asked}):
            yield from _changes(f"{name}.{key}", before.get(key), asked.get(key))
    elif before != asked:
        yield f"{name}: the run has {before!r}, got {asked!r}"
