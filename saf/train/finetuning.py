"""Finetuning as a run: its settings from a parent's checkpoint, and how many epochs, as the ordinary model chooses.

Two kinds of task are finetuned on: questions with choices, files of examples that are gone through in epochs; and
associative recall, whose examples are made and whose updates are given.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from saf.errors import CheckpointError, InputError, SafWarning
from saf.evaluate.recall import RECALL
from saf.heads import EDITED
from saf.machine.processes import done_once, is_first, joined
from saf.records.files import read_json, write_json
from saf.records.folders import remove_folder_
from saf.records.result import result_header
from saf.schedules import OneTime
from saf.tasks import TASKS, FinetuneTask, MQARSettings, MQARTask
from saf.train.checkpoint import Checkpoint, checkpoint_hash
from saf.train.config import TrainConfig
from saf.train.loop import pretrain
from saf.train.run_config import (
    check_same_run,
    context_length,
    read_run_config,
    recorded_config,
    settings_after,
)

MOST_EPOCHS = 5
"""The paper's ordinary model chooses one to five."""
CHOICE = "epochs"
"""Folder in a run's own of the runs that chose its epochs, one an epoch, and of choice.json."""
SETTINGS = "settings.json"
"""What that folder has of the run to come, from before the first epoch on: its settings, so that choosing can go on."""
DEFAULTS: Mapping[str, Any] = {
    "peak_lr": 2e-5,
    "min_lr_ratio": 1.0,
    "warmup": 0,
    "weight_decay": 0.01,
    "batch_size": 16,
    "accumulation": 1,
    "clip": 1.0,
    "lr_by": "update",
    "lr_start": 0,
    "time_budget_seconds": None,
    "match_time": None,
    "match_clock": "everything",
    "match_speed": None,
    "match_speed_source": "",
    "match_charge_seconds": 0.0,
    "compile": "off",
    "eval_every": 0,
    "report_at": (),
    "save_at": (),
    "schedule": OneTime(),
    "mqar": MQARSettings(),
}
"""The paper's settings, and what is not taken over from a parent. The rate is constant, so that an epoch is the same
whatever the number of epochs; batches have many lengths, so nothing is compiled unless asked for."""
OF_TASKS: Mapping[str, Mapping[str, Any]] = {
    "jsonl": {},
    "sst2": {"max_tokens": 128},
    "boolq": {"max_tokens": 512, "too_long": "shorten"},
    "quality": {"max_tokens": 8_192, "too_long": "shorten", "batch_size": 4, "accumulation": 4},
    "mqar": {"data": "none", "updates": 1_500, "peak_lr": 1e-4},
}
"""Tasks that can be finetuned on, and the paper's settings of each."""
RECOVERY: Mapping[str, Any] = {"updates": 500, "report_at": (0, 50, 200, 500), "schedule": OneTime(at=0)}
"""What is different where the parent was trained on recall already: heads are replaced before the first update, and the
model is judged there and after the paper's numbers of recovery updates."""
NEW_STREAM = 1_000
"""Added to the seed of a parent that was trained on recall, so that its examples are not trained on again."""


def finetune_defaults(checkpoint: Checkpoint, *, task: str, out: Path | str) -> dict[str, Any]:
    """Return the settings of a run that finetunes a checkpoint, without its files.

    They are the parent's, over them the paper's, and over these the task's. Those of finetuning itself are among
    them by their own names.
    """
    if task not in OF_TASKS:
        raise InputError(f"task must be one of {', '.join(OF_TASKS)}, or a FILE.jsonl, to finetune; got {task!r}")
    before = settings_after(checkpoint, out=out, fresh=True, **DEFAULTS)
    own = {**vars(before), "task": task}
    if task == MQARTask.name:
        return {**own, **OF_TASKS[task], "finetuning": None, **_of_recall(checkpoint, before)}
    tokenizer = before.finetuning.tokenizer if before.finetuning else before.data
    return {**own, "data": "", "tokenizer": tokenizer, **OF_TASKS[task]}


def _of_recall(checkpoint: Checkpoint, before: TrainConfig) -> dict[str, Any]:
    """Return the settings of recall that depend on the parent: its context, and whether it was trained on recall.

    The gate is then of the parent's run, or of the ordinary run that this one names.
    """
    parent = TrainConfig.from_dict(checkpoint.state["settings"])
    if parent.task != MQARTask.name:
        return {"mqar": MQARSettings().within(context_length(before))}
    run = checkpoint.path.parent.parent
    own = str(run) if (run / RECALL).is_file() else ""
    mqar = replace(parent.mqar, ordinary=parent.mqar.ordinary or own)
    return {**RECOVERY, "mqar": mqar, "seed": parent.seed + NEW_STREAM}


def epochs_in(config: TrainConfig, *epochs: int) -> list[int]:
    """Return how many updates so many epochs of a run's training examples have, for each number of epochs.

    What there is to tell of the examples the run itself tells. Raises InputError for a task without examples.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SafWarning)
        task = TASKS[config.task](config, length=context_length(config))
    if not isinstance(task, FinetuneTask):
        raise InputError(f"task {config.task!r} has no epochs; give the number of updates")
    return [task.updates_of(each) for each in epochs]


def finetune(config: TrainConfig, *, epochs: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Finetune as the settings say and return result.json; a task with epochs has the updates of `epochs`.

    Without `epochs` the ordinary model chooses them, see `choose_epochs`. As `pretrain`, it returns `{"stopped_at":
    ...}` after a signal, and goes on with `resume`.

    Raises:
        InputError: Epochs that nobody chose for an arm whose heads are frozen or pruned, or of a task that has none, or
            others than those of the run to resume; a time budget beside them.
    """
    with joined(config.device):
        return _finetune(config, epochs, resume)


def _finetune(config: TrainConfig, epochs: int | None, resume: bool) -> dict[str, Any]:
    """Do what `finetune` does, in the group of processes that is there."""
    if config.task == MQARTask.name and epochs is not None:
        raise InputError(f"epochs cannot be given with task={config.task!r}, whose examples come once; give updates")
    if resume and (Path(config.out) / "config.json").exists():
        if epochs is not None and (asked := epochs_in(config, epochs)[0]) != config.updates:
            raise InputError(
                f"the run to resume has {config.updates} updates, epochs={epochs} would be {asked}; leave epochs out, "
                "or start another run"
            )
        return pretrain(config, resume=True)
    if resume and not (Path(config.out) / CHOICE).exists():
        raise InputError(f"{config.out} holds no run to resume; check out, or leave resume out")
    if config.task == MQARTask.name:
        return pretrain(config)
    if config.time_budget_seconds is not None:
        raise InputError(
            f"time_budget_seconds must be None where epochs say how long a run is; got {config.time_budget_seconds:g}"
        )
    if epochs is None:
        chosen = choose_epochs(config, resume=resume)
        if "stopped_at" in chosen:
            return chosen
        epochs = int(chosen["epochs"])
    return pretrain(replace(config, updates=epochs_in(config, epochs)[0]))


def choose_epochs(config: TrainConfig, *, most: int = MOST_EPOCHS, resume: bool = False) -> dict[str, Any]:
    """Finetune an ordinary model up to `most` epochs and return, and write, which number of them it chooses.

    The number is that of the largest accuracy on the development share, the smallest such number. Each epoch is a run
    that goes on from the one before it, in the folder `epochs` of the run's own; `choice.json` there has all. The
    checkpoint of an epoch is removed as soon as the next one has ended, and the last one once the choice is written.

    Raises:
        InputError: A model or settings that freeze or prune heads, a learning rate that depends on the updates, fewer
            examples than an update takes, or other settings than those of the epochs to resume.
    """
    _check_can_choose(config, resume=resume)
    assert config.finetuning is not None, "the task was opened"
    folder, tried, parent = Path(config.out) / CHOICE, [], str(config.parent)
    judged = replace(config.finetuning, judge="development")
    for epoch, updates in enumerate(_updates_apart(config, most), 1):
        out = folder / f"epoch-{epoch}"
        one = replace(
            config,
            out=str(out),
            parent=parent,
            fresh=epoch == 1,
            updates=updates,
            finetuning=judged,
            schedule=None,
            report_at=(),
            keep=1,
        )
        result = _finished(out) if resume else None
        if result is not None:
            check_same_run(one, read_run_config(out)["settings"])
        else:
            with _kept(config, folder):
                result = pretrain(one, resume=resume and (out / "config.json").exists())
        if "stopped_at" in result:
            return result
        tried.append({"epochs": epoch, "accuracy": result["accuracy"], "loss": result["report_loss"]})
        share = f"{100 * result['accuracy']:.2f}% of {result['questions']:,} development questions"
        _tell(config, f"after epoch {epoch} of {most}: {share}")
        if epoch > 1:
            done_once(partial(_let_go_, Path(parent)))
        parent = str(result["checkpoint"])
    best = max(tried, key=lambda one: (one["accuracy"], -one["epochs"]))
    _tell(config, f"epochs chosen: {best['epochs']}; training begins anew, for as many")
    head = result_header("epochs", config.to_dict(), checkpoints={"parent": checkpoint_hash(Path(str(config.parent)))})
    record = {**head, "epochs": best["epochs"], "tried": tried}

    def write() -> None:
        write_json(folder / "choice.json", record)
        _let_go_(Path(parent))

    done_once(write)
    return record


def _check_can_choose(config: TrainConfig, *, resume: bool) -> None:
    """Raise InputError where no ordinary model could choose epochs by these settings, or other epochs are there."""
    if config.freeze is not None:
        raise InputError("epochs are chosen by the ordinary model alone; finetune it first, then this arm --like it")
    if config.min_lr_ratio != 1 or config.warmup != 0:
        raise InputError("epochs can be chosen with a constant rate alone (min_lr_ratio=1, warmup=0); or give epochs")
    out = Path(config.out)
    if (out / "config.json").exists():
        raise InputError(f"{out} holds a run already; resume it, or choose another folder")
    if not resume and (out / CHOICE / "epoch-1" / "config.json").exists():
        raise InputError(f"{out} holds a run that was choosing its epochs; resume it, or choose another folder")
    if resume and (recorded := choosing(out)) is not None:
        check_same_run(config, recorded.to_dict())
    if changed := _edited(Path(str(config.parent))):
        raise InputError(
            f"{config.parent} has {changed} heads; epochs are chosen by the ordinary model alone: finetune it first, "
            "then this one --like it, or give epochs"
        )


def choosing(out: Path | str) -> TrainConfig | None:
    """Return the settings of a run that was choosing its epochs when it ended; None where none was."""
    path = Path(out) / CHOICE / SETTINGS
    return TrainConfig.from_dict(read_json(path)) if path.is_file() else None


@contextmanager
def _kept(config: TrainConfig, folder: Path) -> Iterator[None]:
    """Keep a run's settings in the folder of its epochs; where none of them could begin, nothing is left behind."""
    path, first = folder / SETTINGS, folder / "epoch-1" / "config.json"
    done_once(lambda: None if path.is_file() and first.is_file() else write_json(path, config.to_dict()))
    try:
        yield
    except Exception:
        if is_first() and not first.exists():
            path.unlink(missing_ok=True)
            for each in (folder, folder.parent):
                if not any(each.iterdir()):
                    each.rmdir()
        raise


def _updates_apart(config: TrainConfig, most: int) -> list[int]:
    """Return the updates of one to `most` epochs; raise InputError where two numbers of epochs have the same."""
    counts = epochs_in(config, *range(1, most + 1))
    if len(set(counts)) < most:
        raise InputError(
            f"1 to {most} epochs of so few examples have {', '.join(map(str, counts))} updates, which cannot be told "
            "apart; give epochs, more examples or a smaller batch_size"
        )
    return counts


def _edited(checkpoint: Path) -> str:
    """Return which of "frozen" and "pruned" heads a checkpoint has, joined by "and"; "" for an ordinary one."""
    layers = read_json(checkpoint / "saf.json", error=CheckpointError)["layers"]
    return " and ".join(kind for kind in EDITED if any(layer.get(kind) for layer in layers))


def _let_go_(checkpoint: Path) -> None:
    """Remove the checkpoint of an epoch, weights and moments, from which nothing goes on any more."""
    if checkpoint.is_dir():
        remove_folder_(checkpoint)


def _tell(config: TrainConfig, words: str) -> None:
    """Show people a line on standard error, unless the run is quiet."""
    if is_first() and not config.quiet:
        print(words, file=sys.stderr)


def _finished(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has ended; None for another one."""
    path = folder / "result.json"
    return read_json(path) if path.is_file() else None


def settings_like(run: Path | str, *, parent: Checkpoint, out: Path | str) -> dict[str, Any]:
    """Return the settings of a finetuned ordinary run for another parent: the same examples, order and updates.

    Raises:
        InputError: No finetuned run.
    """
    like = recorded_config(run)
    if like.task not in OF_TASKS or like.parent is None:
        raise InputError(f"{run} was not finetuned; name the finetuned run of the ordinary arm")
    own = finetune_defaults(parent, task=like.task, out=out)
    kept = ("out", "parent", "model", "model_overrides", "length", "freeze")
    taken = {name: getattr(like, name) for name in vars(like) if name not in kept}
    if like.finetuning is None:
        return {**own, **taken, "mqar": replace(like.mqar, ordinary=like.mqar.ordinary or str(run))}
    return {**own, **taken, **vars(like.finetuning)}
