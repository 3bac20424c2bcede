"""config.json of a run: what was asked for and what that resolved to; settings of runs that resume and of branches."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.machine.execution import Execution
from saf.models import GPTConfig, preset
from saf.records.files import read_json, to_json
from saf.schedules import OneTime, setting_of_moment
from saf.tasks import Task
from saf.tasks.multiple_choice import PATHS
from saf.train.checkpoint import Checkpoint, open_checkpoint
from saf.train.config import TrainConfig

SCHEMA = "saf.run/1"
"""Of config.json."""
VOCABULARY_MULTIPLE = 64
"""The output's matrix product runs at full speed where its width, the vocabulary, is a multiple of this."""
_ARITHMETIC = (
    *("batch_size", "accumulation", "updates", "peak_lr", "min_lr_ratio", "warmup", "lr_by", "lr_start"),
    *(
        "time_budget_seconds",
        "match_clock",
        "match_speed",
        "match_speed_source",
        "match_charge_seconds",
        "betas",
        "weight_decay",
        "clip",
        "seed",
        "sampler",
    ),
)
"""Settings that decide what an update computes: both arms of a comparison must share them."""
_FREE_ON_RESUME = frozenset(
    (
        *("out", "data", "device", "activation_checkpointing", "graphs", "parallel"),
        *("eval_every", "save_every", "save_at", "keep", "log_every", "token_losses", "tensorboard", "quiet"),
        "compile_ahead",
    )
)
"""Settings that a resumed run may change: places, and what is logged or kept; the data are checked by their hash."""


def context_length(config: TrainConfig) -> int:
    """Return the context in tokens that a run trains on: its own, or the longest that its model takes."""
    return config.length or preset(config.model, **config.model_overrides).max_length


def model_config(config: TrainConfig, *, vocab_size: int) -> GPTConfig:
    """Return the model's shape: the preset, the task's `vocab_size`, the run's length, then the overrides.

    Raises:
        InputError: The vocabulary or the positions are too few for the data.
    """
    rounded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    length = {} if config.length is None else {"max_length": config.length}
    shape = preset(config.model, **{"vocab_size": rounded, **length, **config.model_overrides})
    if shape.vocab_size < vocab_size:
        raise InputError(f"vocab_size {shape.vocab_size} is less than the {vocab_size} tokens of the run's data")
    if config.length is not None and shape.max_length < config.length:
        raise InputError(
            f"max_length {shape.max_length} is less than the run's length {config.length}; make the model's max_length "
            "longer, or the run's length shorter"
        )
    return shape


def run_config(
    config: TrainConfig,
    *,
    model: GPTConfig,
    task: Task,
    execution: Execution,
    parent: dict[str, Any] | None,
    matched: dict[str, Any] | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Return the contents of config.json; `train` holds what decides the arithmetic of an update."""
    settings = config.to_dict()
    train = {
        "length": task.length,
        **{name: settings[name] for name in _ARITHMETIC},
        "precision": execution.precision,
        "compile": "layers" if execution.by_layer else execution.compile,
    }
    freeze = None
    if config.freeze is not None:
        names = ("schedule", "rewarm", "calibration_sequences", "calibration_source", "heldout_sequences")
        freeze = {**settings["freeze"], "freeze_at": config.freeze_update, **{name: settings[name] for name in names}}
    return {
        "schema": SCHEMA,
        "model": asdict(model),
        "train": train,
        "freeze": freeze,
        "data": task.description(),
        "parent": parent,
        "matched": matched,
        "device": execution.device_name,
        "processes": processes,
        "settings": settings,
    }


def recorded_config(folder: Path | str) -> TrainConfig:
    """Return the settings of the run in `folder`, to resume it; raise InputError when there is no run."""
    return TrainConfig.from_dict(read_run_config(Path(folder))["settings"])


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a run; raise InputError when it is not there, or not what a run writes."""
    path = folder / "config.json"
    record = read_json(path)
    if not isinstance(record.get("settings"), dict) or "parent" not in record:
        raise InputError(f"{path} does not tell the settings and the parent of a run; restore it, or train anew")
    return record


def check_same_run(config: TrainConfig, before: dict[str, Any]) -> None:
    """Raise InputError naming every setting that differs from the recorded ones, but for paths and logging."""
    asked, before = to_json(config.to_dict()), dict(before)
    for settings in (asked, before):
        if settings["finetuning"]:
            settings["finetuning"] = {k: v for k, v in settings["finetuning"].items() if k not in PATHS}
    kept = sorted(asked.keys() - _FREE_ON_RESUME)
    if shown := "; ".join(change for key in kept for change in _changes(key, before.get(key), asked[key])):
        raise InputError(
            f"cannot resume with other settings ({shown}). Leave them out, or start another run with this one as "
            "its parent"
        )


def _changes(name: str, before: Any, asked: Any) -> Iterator[str]:
    """Say what differs, of settings that have settings of their own only those."""
    if isinstance(before, dict) and isinstance(asked, dict):
        for key in sorted({*before, *asked}):
            yield from _changes(f"{name}.{key}", before.get(key), asked.get(key))
    elif before != asked:
        yield f"{name}: the run has {before!r}, got {asked!r}"


def continue_from(parent: Path | str, *, out: Path | str, **changes: Any) -> TrainConfig:
    """Return the settings of a run that starts at checkpoint `parent`: those of its run, but for `changes`.

    With `freeze=` and no `schedule=`, heads are frozen right there. `track_gradients` is not taken over.

    >>> continue_from("runs/ordinary/checkpoints/step-2500", out="runs/frozen",
    ...               freeze=FreezeConfig(rate=0.25))  # doctest: +SKIP

    Raises:
        CheckpointError: `parent` is no whole checkpoint.
        InputError: Freezing, saving or reporting before the parent, fewer updates than it has done, or an unknown
            setting.
    """
    return settings_after(open_checkpoint(parent), out=out, **changes)


def settings_after(checkpoint: Checkpoint, *, out: Path | str, **changes: Any) -> TrainConfig:
    """Return what `continue_from` does, for a checkpoint that is open already."""
    settings = TrainConfig.from_dict(
        {**checkpoint.state["settings"], "freeze": None, "rewarm": 0, "compile_ahead": False}
    ).to_dict()
    if unknown := sorted(changes.keys() - settings.keys()):
        raise InputError(f"unknown settings {unknown}; expected some of {sorted(settings)}")
    freeze = changes.get("freeze")
    begins = 0 if changes.get("fresh") else checkpoint.update
    if (updates := changes.get("updates", settings["updates"])) < begins:
        raise InputError(
            f"updates={updates:,} are fewer than the {begins:,} that the parent has done, which count among them; "
            "ask for more, or go on from an earlier parent"
        )
    schedule = {} if freeze is None else {"schedule": OneTime(at=begins)}
    if freeze is None and changes.get("fresh"):  # the parent's may be an update that this run does not have
        schedule = {"schedule": OneTime()}
    settings |= {
        "out": str(out),
        "parent": str(checkpoint.path),
        "freeze": None,
        "track_gradients": False,
        "fresh": False,
    }
    if changes.get("fresh"):  # another task may have other tokens, the model keeps its own
        vocabulary = {"vocab_size": checkpoint.state["model"]["vocab_size"]}
        settings["model_overrides"] = {**vocabulary, **settings["model_overrides"]}
    config = TrainConfig.from_dict({**settings, **schedule, **changes})
    first = config.freeze_update
    if freeze is not None and config.schedule is not None and first is not None and first < begins:
        raise InputError(
            f"{config.schedule} begins after update {first}, before the parent's {checkpoint.update}; choose a later "
            f"moment ({setting_of_moment(config.schedule)}) or an earlier parent"
        )
    asked = {
        "save_at": [OneTime(at=share).first_update(config.updates) for share in config.save_at],
        "report_at": list(config.report_at),
    }
    for name, moments in asked.items():  # those of the parent's run itself are over, and its own
        if name in changes and (passed := [update for update in moments if update < begins]):
            raise InputError(
                f"{name} asks for update {min(passed)}, and this run goes on from its parent's {begins}; ask for later "
                "ones, or go on from an earlier parent"
            )
    return config
