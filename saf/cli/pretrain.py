"""`saf pretrain`: train one arm, ordinary, frozen or pruned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import tyro

from saf.cli.command import build_groups, given_values
from saf.cli.training import Training, check_effects, check_freeze_words
from saf.errors import InputError
from saf.train import TrainConfig, open_checkpoint, pretrain
from saf.train.checkpoint import find_checkpoint, names
from saf.train.run_config import recorded_config, settings_after


@dataclass(kw_only=True)
class Pretrain(Training):
    """Train a model, or one arm from another run's checkpoint, in a folder of its own.

    Settings left out take their default, with --parent the parent run's value, with --resume the run's own: the help
    shows which, as in `saf pretrain --parent FOLDER --out FOLDER --help`.
    Several processes train together when `torchrun --nproc-per-node N -m saf pretrain ...` starts them.
    Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    @classmethod
    def from_words(cls, words: Sequence[str], *, prog: str | None = None) -> Self:
        """Return the command; what the words leave out comes from the parent, or from the run to resume.

        Raises:
            CheckpointError: The parent is no whole checkpoint.
            InputError: There is no run to resume, or a setting that cannot be used.
        """
        start, _ = tyro.cli(_Start, args=list(words), add_help=False, return_unknown_args=True)
        before, settings = start.before()
        given = given_values(cls, words, prog=prog, base={"settings": before} if before else None)
        own = given.pop("settings", {})
        freezes, task = before is not None and before.freeze is not None, before.task if before else TrainConfig.task
        check_freeze_words(own.get("freeze", {}), freezes=freezes)
        groups = build_groups(TrainConfig, own, before)
        check_effects(own, task=own.get("task", task), freezes=freezes)
        own |= groups
        if before and before.parent and start.parent and names(start.parent, before.parent):
            own["parent"] = before.parent  # however the path is written
        return cls(settings=settings(**own), **given)

    def train(self) -> dict[str, Any]:
        """Train one arm."""
        return pretrain(self.settings, resume=self.resume)


COMMAND = Pretrain


@dataclass(kw_only=True)
class _Start:
    """Hold the flags that say where the other settings' defaults come from."""

    out: Path | None = None
    data: Path | None = None
    parent: Path | None = None
    resume: bool = False

    def before(self) -> tuple[TrainConfig | None, Callable[..., TrainConfig]]:
        """Return the settings that words change, None for a new run, and what makes the run's from those given."""
        if self.resume and self.out and (self.out / "config.json").exists():
            recorded = recorded_config(self.out)
            return recorded, partial(replace, recorded)
        if self.parent and self.out:
            checkpoint, out = open_checkpoint(find_checkpoint(self.parent) or self.parent), self.out
            return settings_after(checkpoint, out=out), partial(settings_after, checkpoint)
        if self.resume and not self.data:
            raise InputError(f"{self.out} holds no run to resume; check --out, or start a new run with --data")
        return None, TrainConfig
