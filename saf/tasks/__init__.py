"""What runs train on and are judged by, one task a file; a new one is a file and a name in the dictionary below."""

from collections.abc import Callable

from saf.tasks.finetuning import BoolQTask, FinetuneSettings, FinetuneTask, OwnTask, QualityTask, SST2Task
from saf.tasks.mqar import MQARSettings, MQARSource, MQARTask
from saf.tasks.task import MicroBatches, Task, TaskSettings
from saf.tasks.text import TextTask

TASKS: dict[str, Callable[..., Task]] = {
    TextTask.name: TextTask,
    SST2Task.name: SST2Task,
    BoolQTask.name: BoolQTask,
    QualityTask.name: QualityTask,
    OwnTask.name: OwnTask,
    MQARTask.name: MQARTask,
}
"""What opens a task, by its name: called with a run's settings and `length=`, the tokens of a sequence."""

__all__ = [
    "TASKS",
    "FinetuneSettings",
    "FinetuneTask",
    "MQARSettings",
    "MQARSource",
    "MQARTask",
    "MicroBatches",
    "Task",
    "TaskSettings",
    "TextTask",
]
