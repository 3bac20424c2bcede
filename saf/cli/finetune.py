"""`saf finetune`: train a checkpoint on questions with choices, or on recall, and measure its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Self

import tyro

from saf.arguments import at_least
from saf.cli.command import build_groups, given_values
from saf.cli.training import Training, check_effects, check_freeze_words
from saf.errors import InputError
from saf.tasks import FinetuneSettings, MQARTask
from saf.tasks.examples import is_json_lines
from saf.train import TrainConfig, open_checkpoint, pretrain
from saf.train.checkpoint import find_checkpoint, names
from saf.train.finetuning import choosing, finetune, finetune_defaults, settings_like
from saf.train.run_config import recorded_config


@dataclass(kw_only=True)
class Finetune(Training):
    """Finetune a checkpoint on a task, in a folder of its own, and measure its accuracy.

    Tasks are sst2, boolq and quality with --data and --test, a user's own FILE.jsonl of training examples with --test,
    and mqar, associative recall, which needs no files and has --updates. The ordinary model chooses the number of
    epochs, from 1 to 5, on a share of the training file; other arms are finetuned --like it. Settings left out take
    the paper's value for the task, else the parent's: the help shows which beside --parent, --task and --out. Exit
    code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    epochs: Annotated[int | None, at_least(1)] = None
    """Passes over the training examples, instead of a choice by the ordinary model."""
    like: Path | None = None
    """Finetuned run of the ordinary arm whose files, settings and updates are taken over."""

    @classmethod
    def from_words(cls, words: Sequence[str], *, prog: str | None = None) -> Self:
        """Return the command; what the words leave out is the paper's, the task's or the parent's.

        Raises:
            CheckpointError: The parent is no whole checkpoint.
            InputError: A setting that cannot be used, or no parent, task or test file.
        """
        words = _task_named(words)
        start, _ = tyro.cli(_Start, args=list(words), add_help=False, return_unknown_args=True)
        if not start.starts:
            cls._check_words(words, prog)
        base = start.base()
        given = given_values(cls, words, prog=prog, base={"settings": _Shown(base)})
        own = given.pop("settings", {})
        freezes = base["freeze"] is not None
        check_freeze_words(own.get("freeze", {}), freezes=freezes)
        of_examples = own.pop("finetuning", {})
        groups = build_groups(TrainConfig, own, SimpleNamespace(**base))
        check_effects(own, task=base["task"], freezes=freezes)
        own |= {**groups, "parent": base["parent"]}
        if base["task"] == MQARTask.name:
            if of_examples:
                words = " and ".join(f"--{name.replace('_', '-')}" for name in of_examples)
                raise InputError(f"{words} is of tasks with files of examples; leave it out with --task mqar")
            last = own.get("updates", base["updates"])
            base["report_at"] = tuple(update for update in base["report_at"] if update <= last)
            return cls(settings=TrainConfig(**{**base, **own}), **given)
        if "updates" in own:
            raise InputError("updates follow from the examples and the epochs; give epochs")
        examples = {**base, **of_examples}
        named = {each.name for each in fields(FinetuneSettings)}
        if missing := [name for name in ("test", "data") if not ({**examples, **own}).get(name)]:
            raise InputError(
                f"finetuning on {base['task']!r} needs files of examples; name --{' and --'.join(missing)}"
            )
        finetuning = FinetuneSettings(**{name: examples[name] for name in named & examples.keys()})
        plain = {name: value for name, value in base.items() if name not in named}
        return cls(settings=TrainConfig(**{**plain, **own, "finetuning": finetuning}), **given)

    @classmethod
    def _check_words(cls, words: Sequence[str], prog: str | None) -> None:
        """Show the help if asked for, and raise for a setting that no run can use; nothing else is known yet."""
        if {"-h", "--help"} & set(words):
            given_values(cls, words, prog=prog, base=None)
        nowhere = {"data": "", "out": ""}
        own = given_values(cls, words, prog=prog, base={"settings": _Shown(nowhere)}).get("settings", {})
        FinetuneSettings(**own.pop("finetuning", {}))
        TrainConfig(**{**nowhere, **own, **build_groups(TrainConfig, own)})

    def train(self) -> dict[str, Any]:
        """Train for the updates of the run that this one is like, of its epochs, or as many as are given."""
        if self.like is None:
            return finetune(self.settings, epochs=self.epochs, resume=self.resume)
        if self.epochs is not None:
            raise InputError("epochs has no effect beside like, whose updates are taken over; leave one of them out")
        return pretrain(self.settings, resume=self.resume and _began(self.settings.out))


COMMAND = Finetune


def _began(out: Path | str) -> bool:
    return (Path(out) / "config.json").exists()


def _task_named(words: Sequence[str]) -> list[str]:
    """Return the words with `--task FILE.jsonl` written as the task jsonl and its file of training examples."""
    found: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        named = value if flag == "--task" and equals else word if found[-1:] == ["--task"] else None
        if named is not None and is_json_lines(named):
            if found[-1:] == ["--task"]:
                found.pop()
            found += ["--task", "jsonl", "--data", named]
        else:
            found.append(word)
    return found


@dataclass(kw_only=True)
class _Start:
    """Hold the flags that say where the other settings' defaults come from."""

    out: Path | None = None
    parent: Path | None = None
    task: str | None = None
    like: Path | None = None
    resume: bool = False

    @property
    def starts(self) -> bool:
        """Return whether the words say what to begin with, and where."""
        return self.out is not None and (self.parent is not None or self.resume)

    def recorded(self) -> TrainConfig | None:
        """Return the settings of the run to resume, which may still be choosing its epochs; None where none began."""
        if not self.resume or not self.out:
            return None
        return recorded_config(self.out) if _began(self.out) else choosing(self.out)

    def check_parent(self, recorded: TrainConfig) -> None:
        """Raise InputError for a parent that is named and is not the one of the run to resume."""
        if self.parent is None or (recorded.parent and names(self.parent, recorded.parent)):
            return
        raise InputError(
            f"the run in {self.out} began at {recorded.parent}; got parent {self.parent}. Leave it out, or start "
            "another run"
        )

    def base(self) -> dict[str, Any]:
        """Return the settings that words change; none where the words do not say what begins."""
        if (recorded := self.recorded()) is not None:
            self.check_parent(recorded)
            return {**vars(recorded), **(vars(recorded.finetuning) if recorded.finetuning else {})}
        if not self.starts:
            raise InputError(
                "finetuning starts from a checkpoint; name it with --parent, and the run's folder with --out"
            )
        assert self.out is not None
        if self.parent is None:
            raise InputError(f"{self.out} holds no run to resume; check --out, or start a new run with --parent")
        found = find_checkpoint(self.parent)
        checkpoint = open_checkpoint(self.parent if found is None else found)
        if self.like is not None:
            base = settings_like(self.like, parent=checkpoint, out=self.out)
            if self.task not in (None, base["task"]):
                raise InputError(
                    f"{self.like} was finetuned on {base['task']}; leave --task {self.task} out beside --like"
                )
        elif self.task is None:
            raise InputError("finetuning needs a task; name --task sst2, boolq, quality, mqar, or a FILE.jsonl")
        else:
            base = finetune_defaults(checkpoint, task=self.task, out=self.out)
        return {**base, "parent": str(checkpoint.path)}


class _Shown:
    """Hold settings as defaults that the help shows."""

    def __init__(self, values: dict[str, Any]):
        named = {each.name for each in fields(FinetuneSettings)}
        self.__dict__ |= {name: value for name, value in values.items() if name not in named}
        shown = {each.name: values.get(each.name, "") for each in fields(FinetuneSettings) if each.name in values}
        self.finetuning = _Values(shown)


class _Values:
    """Hold values by name."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__ |= values
