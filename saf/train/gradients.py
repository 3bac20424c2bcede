"""The Q/K-gradient average of a run: kept when a score or a later arm will read it, and carried by checkpoints."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from saf.calibration import QKGradient
from saf.errors import InputError
from saf.schedules import Proposer
from saf.train.config import TrainConfig

KEY = "qk_gradient"
"""Its name in a checkpoint's state.json."""


def recorded_gradient(model: nn.Module, state: Mapping[str, Any]) -> QKGradient | None:
    """Return the average that a checkpoint's `state` holds; None when its run kept none."""
    if state.get(KEY) is None:
        return None
    gradient = QKGradient(model)
    gradient.load_state_dict(state[KEY])
    return gradient


def reads_gradient(config: TrainConfig, schedule: Proposer | None) -> bool:
    """Return whether an event that may still come freezes by Q/K gradients."""
    expected = schedule is not None and not schedule.finished
    return expected and config.freeze is not None and "gradient" in config.freeze.needs


def start_gradient(
    model: nn.Module,
    config: TrainConfig,
    schedule: Proposer | None,
    *,
    state: Mapping[str, Any] | None,
    update: int,
) -> QKGradient | None:
    """Return the average that a run keeps from `update` on; None when neither a score nor a later arm needs it.

    Raises InputError when heads are to be frozen right away by gradients that nobody kept.
    """
    reads = reads_gradient(config, schedule)
    if not (reads or config.track_gradients):
        return None
    found = recorded_gradient(model, state or {})
    moment = config.freeze_update
    if reads and found is None and moment is not None and moment <= update:
        kept = "the checkpoint to start from holds none" if update else "nothing was trained yet"
        raise InputError(
            f"a score reads an average of Q/K gradients, and {kept}. Train its run with --track-gradients "
            f"(track_gradients=True), or freeze after some updates of this one (freeze_at above {update})"
        )
    return QKGradient(model) if found is None else found
