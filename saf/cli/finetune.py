"""`saf finetune` trains a checkpoint on questions with choices, or on recall, and measures its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.checkpoint import refers_to_checkpoint
from saf.cli.parsing import HELP, parse
from saf.cli.pretrain import FREEZING_HELP_FIELDS, EarlyFlags, TrainFlags, changes_of
from saf.data.reading import JSON_LINES, bare_suffix
from saf.errors import InputError
from saf.tasks import FinetuneSettings, MQARTask
from saf.train import TrainConfig, pretrain
from saf.train.config import recorded_config
from saf.train.finetune import finetune, finetune_defaults, pending_choice, settings_like


@dataclass(kw_only=True)
class Command(TrainFlags):
    r"""Finetune a checkpoint on a task, in a folder of its own, and measure its accuracy.

    Finetune the ordinary model, which chooses 1 to 5 epochs by a share of the training file. Then finetune another arm
    with the same examples, order and updates:

      $ saf finetune --task train.jsonl --test test.jsonl \
            --parent runs/ordinary --out runs/own
      $ saf finetune --like runs/own --parent runs/frozen --out runs/own-frozen

    Settings left out take the paper's value for the task, else the parent's: --help-all with --parent, --task and --out
    shows them. Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    task: str = field()
    """Finetune on sst2, boolq or quality (with --data and --test), your own FILE.jsonl of training examples (with
    --test), or mqar, associative recall, which needs no files (docs/tasks.md)."""
    parent: str | None = field()
    """Start from the weights of this checkpoint, or of a run's newest one."""
    data: str = ""
    """Read the training examples from this file, in the layout of the task."""
    examples: Annotated[FinetuneSettings, tyro.conf.OmitArgPrefixes] = field(default_factory=FinetuneSettings)
    """The files of examples."""
    epochs: int | None = None
    """Pass over the training examples this many times, instead of a choice by the ordinary model."""
    like: Path | None = None
    """Take the files, settings and updates of this finetuned run of the ordinary arm."""

    def train(self) -> dict[str, Any]:
        if self.like is None:
            return finetune(self.config, epochs=self.epochs, resume=self.resume)
        if self.epochs is not None:
            raise InputError("epochs has no effect with like, whose updates are taken over; leave one of them out")
        # A run that was stopped before it wrote its settings has nothing to resume: it begins again.
        has_begun = (Path(self.out) / "config.json").exists()
        return pretrain(self.config, resume=self.resume and has_begun)


_OF_TASK = ("batch_size", "updates", "peak_lr")  # their defaults depend on the task: no help shows them without one
HELP_FIELDS = {
    Command: (
        "data", "out", "parent", "resume", "task", "examples", "epochs", "like", *_OF_TASK,
        "seed", "device", "freeze", "json",
    ),
    FinetuneSettings: ("test", "tokenizer"),
    **FREEZING_HELP_FIELDS,
}  # fmt: skip
"""The settings that `--help` shows."""


def parse_words(words: Sequence[str]) -> Command:
    """Return the command; settings left out are the paper's, the task's or the parent's.

    Raises:
        CheckpointError: The parent is no whole checkpoint.
        InputError: A setting that cannot be used, or no parent, task or test file.
    """
    # The parent's settings are the defaults of these flags, so it is opened before all flags are parsed.
    early = EarlyFlags.of(words)
    if early.task and _is_file(early.task):
        early.task = "jsonl"
    if early.out is None or not (early.parent or early.resume):
        if HELP & set(words):
            shown = [name for name in HELP_FIELDS[Command] if name not in _OF_TASK]
            return parse(Command, words, prog="saf finetune", help_fields={**HELP_FIELDS, Command: shown})
        raise InputError("finetuning starts from a checkpoint; name it with --parent, and the run's folder with --out")
    base = _base_settings(early, early.out)
    config, examples = _built(TrainConfig, base), _built(FinetuneSettings, base)
    default = replace(Command.of(config), examples=examples)
    flags = parse(Command, words, prog="saf finetune", default=default, help_fields=HELP_FIELDS)
    if _is_file(flags.task):
        flags.task, flags.data = "jsonl", flags.task
    changes = changes_of(flags, default) | {"parent": base["parent"]}
    if config.task == MQARTask.name:
        if flags.examples != examples:
            raise InputError("--test and other flags for files of examples have no effect on mqar; leave them out")
        # The defaults were chosen for the task's own number of updates: a shorter run does not reach all reports.
        updates = changes.get("updates", config.updates)
        reports = changes.get("report_at", config.report_at)
        changes["report_at"] = tuple(update for update in reports if update <= updates)
    else:
        if "updates" in changes:
            raise InputError("updates follow from the examples and the epochs; give epochs")
        files = {"test": flags.examples.test, "data": changes.get("data", config.data)}
        if missing := [name for name, file in files.items() if not file]:
            raise InputError(f"finetuning on {config.task!r} needs files of examples; name --{' and --'.join(missing)}")
        changes["finetuning"] = flags.examples
    flags.config = replace(config, **changes)
    return flags


def _built(kind: type[Any], values: dict[str, Any]) -> Any:
    """Return the settings of a dataclass, its fields taken from `values`, which may have others."""
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})


def _is_file(task: str) -> bool:
    """Return whether --task names a file of training examples: task jsonl with this file as --data."""
    return bare_suffix(Path(task)) in (*JSON_LINES, ".json")


def _base_settings(early: EarlyFlags, out: Path) -> dict[str, Any]:
    """Return the settings that flags change: those of the run to resume, of the run given by --like, or of the task."""
    if early.resume:
        # A run that is still choosing its number of epochs has no config.json yet.
        recorded = recorded_config(out) if early.resumed else pending_choice(out)
        if recorded is not None:
            own = vars(recorded.finetuning) if recorded.finetuning else {}
            began_at = recorded.parent
            if early.parent is not None and not (began_at and refers_to_checkpoint(early.parent, began_at)):
                raise InputError(f"the run in {out} began at {began_at}; got parent {early.parent}")
            return {**vars(recorded), **own}
    if early.parent is None:
        raise InputError(f"{out} holds no run to resume; check --out, or start a new run with --parent")
    checkpoint = early.checkpoint()
    if early.like is not None:
        base = settings_like(early.like, parent=checkpoint, out=out)
        if early.task not in (None, base["task"]):
            raise InputError(f"{early.like} was finetuned on {base['task']}; leave --task {early.task} out")
    elif early.task is None:
        raise InputError("finetuning needs a task; name --task sst2, boolq, quality, mqar, or a FILE.jsonl")
    else:
        base = finetune_defaults(checkpoint, task=early.task, out=out)
    return {**base, "parent": str(checkpoint.path)}
