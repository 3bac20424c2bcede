"""`saf pretrain`: train one arm, ordinary, frozen or pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from saf.cli.parsing import parse
from saf.cli.training import FIRST, TrainFlags, changes_of, show_result
from saf.errors import InputError
from saf.train import TrainConfig, open_checkpoint, pretrain
from saf.train.checkpoint import find_checkpoint, names
from saf.train.run_config import recorded_config, settings_after


@dataclass(kw_only=True)
class Pretrain(TrainFlags):
    """Train a model, or one arm from another run's checkpoint, in a folder of its own.

    Settings left out take their default, with --parent the parent run's value, with --resume the run's own:
    `saf pretrain --parent FOLDER --out FOLDER --help-all` shows which.
    Several processes train together when `torchrun --nproc-per-node N -m saf pretrain ...` starts them.
    Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    def run(self) -> dict[str, Any]:
        """Train, show and return the result; exits with code 75 when a signal stopped the run."""
        return show_result(lambda: pretrain(self.config, resume=self.resume), self)


def parse_words(words: Sequence[str]) -> Pretrain:
    """Return the command; what the words leave out comes from the parent, or from the run to resume.

    Raises:
        CheckpointError: The parent is no whole checkpoint.
        InputError: There is no run to resume, or a setting that cannot be used.
    """
    start, _ = tyro.cli(_Start, args=list(words), add_help=False, return_unknown_args=True)
    before = start.before()
    default = None if before is None else Pretrain.of(before)
    flags = parse(Pretrain, words, prog="saf pretrain", default=default, first=FIRST)
    if default is None or before is None:
        flags.config = flags.settings()
        return flags
    changes = changes_of(flags, default)
    if before.parent and start.parent and names(start.parent, before.parent):
        changes.pop("parent", None)  # the same one, written another way
    if start.resumed:
        flags.config = replace(before, **changes)
    else:
        assert start.parent is not None
        checkpoint = open_checkpoint(find_checkpoint(start.parent) or start.parent)
        changes.pop("parent", None)
        flags.config = settings_after(checkpoint, **{"out": flags.out, **changes})
    return flags


@dataclass(kw_only=True)
class _Start:
    """Hold the flags that say where the other settings' defaults come from."""

    out: Path | None = None
    data: Path | None = None
    parent: Path | None = None
    resume: bool = False

    @property
    def resumed(self) -> bool:
        """Whether there is a run to resume."""
        return self.resume and self.out is not None and (self.out / "config.json").exists()

    def before(self) -> TrainConfig | None:
        """Return the settings that words change; None for a new run."""
        if self.resumed and self.out is not None:
            return recorded_config(self.out)
        if self.parent and self.out:
            return settings_after(open_checkpoint(find_checkpoint(self.parent) or self.parent), out=self.out)
        if self.resume and not self.data:
            raise InputError(f"{self.out} holds no run to resume; check --out, or start a new run with --data")
        return None
