"""`finetune` trains a checkpoint on a task, `choose_epochs` finds its length, `finetune_defaults` has its settings.

Two kinds of task are finetuned on: questions with choices, whose files of examples are read in epochs, and associative
recall, whose examples are generated and whose number of updates is a setting. Both are runs of `pretrain`.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from saf.checkpoint import Checkpoint, checkpoint_hash
from saf.distributed import is_rank0, on_rank0, process_group
from saf.errors import CheckpointError, InputError, SafWarning
from saf.heads import EDITED
from saf.records.files import read_json, remove_folder_, write_json
from saf.records.result import result_header
from saf.schedules import OneTime
from saf.tasks import TASKS, FinetuneTask, MQARSettings, MQARTask
from saf.train.config import TrainConfig, check_same_run, context_length, continue_from, recorded_config
from saf.train.loop import pretrain

MAX_EPOCHS = 5
"""The paper's ordinary model chooses one to five."""
CHOICE, SETTINGS = "epochs", "settings.json"
"""Subfolder of a run for the choice of its epochs, and the file there with the settings of the run to come."""


def finetune(config: TrainConfig, *, epochs: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Finetune by these settings and return result.json; a task with examples has the updates of `epochs`.

    Without `epochs` the ordinary model chooses them, see `choose_epochs`. As `pretrain`, it returns `{"stopped_at":
    ...}` after a signal, and goes on with `resume`.

    Raises:
        InputError: Epochs of a task that has none, or others than those of the run to resume; epochs that only an
            ordinary model may choose; both epochs and a budget.
    """
    has_epochs = config.task != MQARTask.name
    if not has_epochs and epochs is not None:
        raise InputError(f"epochs must be left out with task={config.task!r}, got {epochs}; give updates")
    with process_group(config.device):
        # A folder with config.json has its epochs: the run itself began.
        if has_epochs and not (Path(config.out) / "config.json").exists():
            if config.time_budget_seconds is not None or config.update_budget is not None:
                raise InputError("time_budget_seconds and update_budget must be None with epochs, which fix the length")
            if epochs is None:
                choice = choose_epochs(config, resume=resume)
                if "stopped_at" in choice:
                    return choice
                epochs, resume = int(choice["epochs"]), False  # what was resumed is the choice; the run begins now
        if epochs is not None:
            config = replace(config, updates=_updates_of_epochs(config, epochs)[0])
        return pretrain(config, resume=resume)


def _updates_of_epochs(config: TrainConfig, *epochs: int) -> list[int]:
    """Return the updates of each number of epochs of a run's examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SafWarning)  # the run itself warns of its examples
        task = TASKS[config.task](config, length=context_length(config))
    assert isinstance(task, FinetuneTask), f"the task {config.task} has no epochs"
    return [task.updates_of(each) for each in epochs]


# --- the number of epochs


def choose_epochs(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Finetune an ordinary model for five epochs; write to `epochs/choice.json` the number that it chooses.

    It is the smallest number with the largest accuracy on the development share, on which the run in `epochs/trial`
    reports after each epoch. The record is returned, or `{"stopped_at": ...}` after a signal.
    """
    _check_can_choose(config, resume=resume)
    counts = _updates_of_epochs(config, *range(1, MAX_EPOCHS + 1))
    if len(set(counts)) < MAX_EPOCHS:
        numbers = ", ".join(map(str, counts))
        raise InputError(f"1 to {MAX_EPOCHS} epochs must have different updates, got {numbers}; give epochs")
    assert config.finetuning is not None, "the task was opened by these settings"
    folder = Path(config.out) / CHOICE
    record_file, trial = folder / "choice.json", folder / "trial"
    if resume and on_rank0(record_file.is_file):
        return on_rank0(lambda: read_json(record_file))
    on_rank0(lambda: write_json(folder / SETTINGS, config.to_dict()))  # `pending_choice` reads it, to resume
    trial_config = replace(
        config,
        out=str(trial),
        # The test questions must not choose: the numbers of the run to come are measured on them.
        finetuning=replace(config.finetuning, judge="development"),
        schedule=None,
        updates=counts[-1],
        # The rate is constant, so one run of five epochs passes through the ends of all shorter ones.
        report_at=tuple(counts),
        keep=1,
    )
    result = pretrain(trial_config, resume=resume and (trial / "config.json").exists())
    if "stopped_at" in result:
        return result
    tried = []
    for epoch, updates in enumerate(counts, 1):
        report = result["reports"][str(updates)]
        tried.append({"epochs": epoch, "accuracy": report["accuracy"], "loss": report["report_loss"]})
    best = max(tried, key=lambda one: (one["accuracy"], -one["epochs"]))  # of equal ones, the fewest epochs
    if is_rank0() and not config.quiet:
        shares = ", ".join(f"{100 * one['accuracy']:.2f}%" for one in tried)
        words = f"{shares} of {result['questions']:,} development questions after 1 to {MAX_EPOCHS} epochs"
        print(f"{words}; training begins anew, for {best['epochs']}", file=sys.stderr)
    head = result_header("epochs", config.to_dict(), checkpoints={"parent": checkpoint_hash(Path(str(config.parent)))})
    record = {**head, "epochs": best["epochs"], "tried": tried}
    on_rank0(lambda: write_json(record_file, record))
    on_rank0(lambda: remove_folder_(trial / "checkpoints"))
    return record


def _check_can_choose(config: TrainConfig, *, resume: bool) -> None:
    """Raise InputError where no ordinary model could choose epochs by these settings, or other epochs are there."""
    layers = read_json(Path(str(config.parent)) / "saf.json", error=CheckpointError)["layers"]
    edited = [kind for kind in EDITED if any(layer.get(kind) for layer in layers)]
    if config.freeze is not None or edited:
        parent = f"; {config.parent} has {' and '.join(edited)} heads" if edited else ""
        remedy = "finetune that first, then this arm with --like; or give epochs"
        raise InputError(f"epochs must be chosen by the ordinary model{parent}: {remedy}")
    if config.min_lr_ratio != 1 or config.warmup != 0:
        raise InputError("epochs can be chosen with a constant rate alone (min_lr_ratio=1, warmup=0); or give epochs")
    recorded = pending_choice(config.out)
    check_same_run(config, recorded.to_dict() if recorded else None, resume=resume)


def pending_choice(out: Path | str) -> TrainConfig | None:
    """Return the settings of a run that was choosing its epochs when it ended, or None."""
    path = Path(out) / CHOICE / SETTINGS
    return TrainConfig.from_dict(read_json(path)) if path.is_file() else None


# --- settings

DEFAULTS: dict[str, Any] = {
    "peak_lr": 2e-5,
    "min_lr_ratio": 1.0,
    "warmup": 0,
    "weight_decay": 0.01,
    "batch_size": 16,
    "accumulation": 1,
    "clip": 1.0,
    "lr_start": 0,
    "compile": "off",  # every length of a batch would be a program of its own
    "eval_every": 0,
    "report_at": (),
    "save_at": (),
    "schedule": OneTime(),
    "mqar": MQARSettings(),
}
"""The paper's settings, and those that are not taken over from a parent. The rate is constant, so that an epoch is the
same whatever the number of epochs."""
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "jsonl": {},
    "sst2": {"max_tokens": 128},
    "boolq": {"max_tokens": 512, "too_long": "shorten"},
    "quality": {"max_tokens": 8_192, "too_long": "shorten", "batch_size": 4, "accumulation": 4},
    "mqar": {"data": "none", "updates": 1_500, "peak_lr": 1e-4},
}
"""Tasks that can be finetuned on, and the paper's settings of each."""
RECOVERY: dict[str, Any] = {"updates": 500, "report_at": (0, 50, 200, 500), "schedule": OneTime(at=0)}
"""Where the parent was trained on recall already: heads are replaced before the first update, and reports come there
and after the paper's numbers of recovery updates."""
NEW_STREAM = 1_000
"""Added to the seed of a parent that was trained on recall, so that its examples are not trained on again."""


def finetune_defaults(checkpoint: Checkpoint, *, task: str, out: Path | str) -> dict[str, Any]:
    """Return the settings of a run that finetunes a checkpoint, without its files.

    They are the parent's, over them the paper's, and over these the task's. Settings of `FinetuneSettings` stand
    among them by their own names.
    """
    if task not in TASK_SETTINGS:
        raise InputError(f"task must be one of {', '.join(TASK_SETTINGS)}, or a FILE.jsonl, to finetune; got {task!r}")
    before = continue_from(checkpoint, out=out, fresh=True, **DEFAULTS)
    settings = vars(before) | {"task": task}
    if task != MQARTask.name:
        tokenizer = before.finetuning.tokenizer if before.finetuning else before.data
        return settings | {"data": "", "tokenizer": tokenizer} | TASK_SETTINGS[task]
    settings |= TASK_SETTINGS[task] | {"finetuning": None}
    parent = TrainConfig.from_dict(checkpoint.state["settings"])
    if parent.task != MQARTask.name:
        return settings | {"mqar": MQARSettings().within(context_length(before))}
    return settings | RECOVERY | {"mqar": parent.mqar, "seed": parent.seed + NEW_STREAM}


def settings_like(run: Path | str, *, parent: Checkpoint, out: Path | str) -> dict[str, Any]:
    """Return the settings of a finetuned ordinary run for another parent: the same examples, order and updates."""
    like = recorded_config(run)
    if like.task not in TASK_SETTINGS or like.parent is None:
        raise InputError(f"{run} must be the finetuned run of the ordinary arm")
    settings = finetune_defaults(parent, task=like.task, out=out)
    own = ("out", "parent", "model", "model_overrides", "length", "freeze")
    settings |= {name: value for name, value in vars(like).items() if name not in own}
    return settings | (vars(like.finetuning) if like.finetuning else {})
