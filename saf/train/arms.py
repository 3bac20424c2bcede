"""A second arm: a run that continues from another run's checkpoint with the same settings."""

from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.schedules import OneTime
from saf.train.checkpoint import open_checkpoint
from saf.train.config import TrainConfig


def continue_from(parent: Path | str, *, out: Path | str, **changes: Any) -> TrainConfig:
    """Return the settings of a run that starts at checkpoint `parent`: those of its run, but for `changes`.

    With `freeze=` and no `schedule=`, heads are frozen right there. `track_gradients` is not taken over.

    >>> continue_from("runs/ordinary/checkpoints/step-2500", out="runs/frozen",
    ...               freeze=FreezeConfig(rate=0.25))  # doctest: +SKIP

    Raises:
        CheckpointError: `parent` is no whole checkpoint.
        InputError: Freezing before the parent, or an unknown setting.
    """
    checkpoint = open_checkpoint(parent)
    settings = TrainConfig.from_dict({**checkpoint.state["settings"], "freeze": None}).to_dict()
    if unknown := sorted(changes.keys() - settings.keys()):
        raise InputError(f"unknown settings {unknown}; expected some of {sorted(settings)}")
    freeze = changes.get("freeze")
    moment = {} if freeze is None else {"schedule": OneTime(at=checkpoint.update)}
    settings |= {"out": str(out), "parent": str(parent), "freeze": None, "track_gradients": False, **moment, **changes}
    config = TrainConfig.from_dict(settings)
    if freeze is not None and (config.freeze_update or 0) < checkpoint.update:
        raise InputError(
            f"{config.schedule} freezes after update {config.freeze_update}, before the parent's {checkpoint.update}; "
            "choose a later moment (freeze_at) or an earlier parent"
        )
    return config
