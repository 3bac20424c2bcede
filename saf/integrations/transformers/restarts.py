"""Training that starts over or goes on: what of a callback's events is undone, refused, or taken up where it was."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerState

from saf.adapters import adapter_for
from saf.adapters.transformers.folder import mark_of
from saf.errors import InputError, SafError, SafWarning
from saf.heads import EDITED, HeadSet
from saf.records.events import EventRecord
from saf.schedules import Proposer
from saf.surgery import uninstall_

PROGRESS = "progress"
"""The attribute that a checkpoint's trainer_state.json keeps of the callback."""
_MOMENTS = ("at", "begin", "end", "every")
"""Settings of schedules that are a whole number of updates, or a share of all of them."""


@dataclass(frozen=True)
class Before:
    """Hold what of a model's heads was edited when a call of `train` began."""

    heads: HeadSet = HeadSet()  # noqa: RUF009, it is immutable
    told: int = 0
    """Of how many events the model's card told."""

    @classmethod
    def of(cls, model: nn.Module) -> "Before":
        """Return what is edited in a model now."""
        adapter = adapter_for(model)
        return cls(adapter.heads(*EDITED), len((mark_of(adapter.model.config) or {}).get("events", [])))

    def since(self, model: nn.Module) -> HeadSet:
        """Return the heads that were edited since."""
        return adapter_for(model).heads(*EDITED) - self.heads

    def refuse_more(self, model: nn.Module, events: Iterable[EventRecord]) -> None:
        """Raise InputError where heads were edited since, or by `events`: training anew would edit as many more."""
        own = {head for event in events for head in HeadSet.from_list(event.heads)}
        if heads := self.since(model) | (adapter_for(model).heads(*EDITED) & HeadSet(own)):
            raise InputError(
                f"training would begin anew at update 0, with {len(heads)} heads that this FreezeCallback froze or "
                "pruned before, and would freeze more: go on by train(resume_from_checkpoint=True), with a larger "
                "max_steps to train for longer; or train a new model with a new callback. To freeze more heads of this "
                "model, give its Trainer a new callback"
            )

    def restore_(self, model: nn.Module, optimizer: Any) -> None:
        """Make heads live again that were edited since, with the rows and moments that they had.

        Raises what `uninstall_` raises; nothing is changed then.
        """
        if heads := self.since(model):
            try:
                uninstall_(model, heads, optimizer=optimizer)
            except SafError as error:
                raise type(error)(
                    f"the Trainer starts over from where it began, with smaller batches, and {len(heads)} heads that "
                    f"were frozen or pruned since cannot be made live again ({error}): train a new model, with a new "
                    "callback and a smaller per_device_train_batch_size"
                ) from error
        if (mark := mark_of(adapter_for(model).model.config)) is not None:
            del mark["events"][self.told :]


def stored_in(state: TrainerState, name: str) -> dict[str, Any] | None:
    """Return what a checkpoint's trainer_state.json keeps of a callback; None where it was not there."""
    callbacks: Any = state.stateful_callbacks or {}
    kept = callbacks.get(name)
    return None if kept is None else kept["attributes"][PROGRESS]


def warn_of_others(stored: dict[str, Any] | None, found: str, proposer: Proposer) -> None:
    """Warn where calibration and held-out sequences, of this sum, are others than a checkpoint's training had.

    Once no event comes any more nothing is measured on them.
    """
    if stored is not None and stored.get("sequences", found) != found and not proposer.finished:
        warnings.warn(
            "the checkpoint was trained with other calibration or held-out sequences of FreezeCallback: what events "
            "measure from here on is of those given now, and training does not go on as it would have",
            SafWarning,
            stacklevel=3,
        )


def moments_of(stored: dict[str, Any], settings: dict[str, Any], updates: int) -> int:
    """Return of how many updates the schedule's shares are where a checkpoint's training goes on, of `updates` now.

    After an event these are the checkpoint's: what is behind stays there, and what is left of several comes when it was
    to come.

    Raises:
        InputError: Other settings, or another number of updates where a share decides when the first event comes.
    """
    theirs, before = stored["settings"], stored.get("updates", updates)
    meant, now = _whole(theirs, before), _whole(settings, updates)
    if meant == now:
        return updates
    if theirs != settings:
        raise InputError(
            f"the checkpoint was trained with other settings of FreezeCallback; it has {theirs}, here are {settings}: "
            "resume with those"
        )
    if not stored["events"]:
        told = [
            ", ".join(f"{name}={each['schedule'][name]}" for name in _MOMENTS if name in each["schedule"])
            for each in (meant, now)
        ]
        raise InputError(
            f"the moments of {theirs['schedule']} are shares of max_steps: the checkpoint is of training with "
            f"max_steps={before}, which is {told[0]}, and max_steps={updates} makes it {told[1]}. Resume with "
            f"max_steps={before}, or with a schedule of whole numbers of updates, {told[0]}"
        )
    return before


def _whole(settings: dict[str, Any], updates: int) -> dict[str, Any]:
    """Return a callback's settings with the moments of its schedule as whole numbers of updates."""
    schedule = {
        name: round(value * updates) if name in _MOMENTS and isinstance(value, float) else value
        for name, value in settings["schedule"].items()
    }
    return settings | {"schedule": schedule}
