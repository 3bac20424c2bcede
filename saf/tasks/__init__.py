"""`TASKS` lists the tasks that runs train on and models are measured by; each kind of task has a file."""

from collections.abc import Callable

from saf.tasks.base import Task
from saf.tasks.mqar import MQARSettings, MQARTask
from saf.tasks.multiple_choice import EXAMPLE_FORMATS, FinetuneSettings, FinetuneTask
from saf.tasks.text import TextTask, evaluate_perplexity

__all__ = [
    "TASKS", "FinetuneSettings", "FinetuneTask", "MQARSettings", "MQARTask", "Task", "TextTask", "evaluate_perplexity",
]  # fmt: skip


TASKS: dict[str, Callable[..., Task]] = {
    TextTask.name: TextTask,
    MQARTask.name: MQARTask,
    **dict.fromkeys(EXAMPLE_FORMATS, FinetuneTask),  # one task for each format of files of examples
}
"""The class of each task by name; it is called with a run's settings and `length=`, the tokens of a sequence."""
