"""When events happen during a run, one schedule a file; a new one is a file and a name in the two lines below.

The command line makes `--schedule NAME` and the flags of every schedule's fields from the registry.
"""

from dataclasses import asdict
from typing import Any

from saf.errors import InputError, did_you_mean
from saf.schedules.gradual import Gradual
from saf.schedules.one_time import OneTime
from saf.schedules.schedule import Event, Freeze, Outcome, Proposer, Prune, Timetable, Undo, setting_of_moment
from saf.schedules.train_loss import TrainLoss
from saf.schedules.validation_budget import ValidationBudget

Schedule = OneTime | Gradual | ValidationBudget | TrainLoss
"""Every schedule that settings may name, joined by `|`."""
SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (OneTime, Gradual, ValidationBudget, TrainLoss)}

__all__ = [
    "SCHEDULES",
    "Event",
    "Freeze",
    "Gradual",
    "OneTime",
    "Outcome",
    "Proposer",
    "Prune",
    "Schedule",
    "Timetable",
    "TrainLoss",
    "Undo",
    "ValidationBudget",
    "schedule_from_dict",
    "schedule_to_dict",
    "setting_of_moment",
]


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule's name and settings as plain values for JSON.

    >>> schedule_to_dict(OneTime(at=0.25))
    {'name': 'one_time', 'at': 0.25}
    """
    return {"name": schedule.name, **asdict(schedule)}


def schedule_from_dict(values: dict[str, Any]) -> Schedule:
    """Build a schedule from `schedule_to_dict`'s form; raise InputError naming an unknown schedule or setting.

    >>> schedule_from_dict({"name": "one_time", "at": 100})
    OneTime(at=100)
    """
    name = values.get("name")
    if name not in SCHEDULES:
        raise InputError(f"schedule must be one of {sorted(SCHEDULES)}; got {name!r}{did_you_mean(name, SCHEDULES)}")
    try:
        return SCHEDULES[name](**{key: value for key, value in values.items() if key != "name"})
    except TypeError as error:
        raise InputError(f"not the settings of a {name} schedule: {error}") from error
