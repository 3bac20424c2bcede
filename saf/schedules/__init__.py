"""When heads are frozen during training, one schedule a file."""

from collections.abc import Callable

from saf.schedules.one_time import OneTime
from saf.schedules.schedule import Event, Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {"one_time": OneTime}

__all__ = ["SCHEDULES", "Event", "OneTime", "Schedule"]
