"""What runs train on and are judged by, one task a file; a new one is a file and a name in the dictionary below."""

from saf.tasks.task import MicroBatches, Task, TaskSettings
from saf.tasks.text import TextTask

TASKS: dict[str, type[TextTask]] = {TextTask.name: TextTask}

__all__ = ["TASKS", "MicroBatches", "Task", "TaskSettings", "TextTask"]
