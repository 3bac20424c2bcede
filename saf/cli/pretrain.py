"""`saf pretrain`: train one arm, ordinary, frozen or pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from saf.checkpoint import is_same_checkpoint
from saf.cli.parsing import parse
from saf.cli.training import FIRST, Start, TrainFlags, changes_of, show_result
from saf.errors import InputError
from saf.train import pretrain
from saf.train.config import continue_from, recorded_config


@dataclass(kw_only=True)
class Pretrain(TrainFlags):
    """Train a model, or one arm from another run's checkpoint, in a folder of its own.

    A setting that is left out has its default, with --parent the parent run's value, and with --resume the run's own;
    `saf pretrain --parent FOLDER --out FOLDER --help-all` shows these values.
    Several processes train together when `torchrun --nproc-per-node N -m saf pretrain ...` starts them.
    Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    def run(self) -> dict[str, Any]:
        return show_result(lambda: pretrain(self.config, resume=self.resume), self)


def parse_words(words: Sequence[str]) -> Pretrain:
    """Return the command; settings left out come from the parent, or from the run to resume.

    Raises:
        CheckpointError: The parent is no whole checkpoint.
        InputError: There is no run to resume, or a setting that cannot be used.
    """
    start = Start.of(words)
    before = None
    if start.resumed and start.out is not None:
        before = recorded_config(start.out)
    elif start.parent and start.out:
        before = continue_from(start.checkpoint(), out=start.out)
    elif start.resume and not start.data:
        raise InputError(f"{start.out} holds no run to resume; check --out, or start a new run with --data")
    default = None if before is None else Pretrain.of(before)
    flags = parse(Pretrain, words, prog="saf pretrain", default=default, first=FIRST)
    if default is None or before is None:
        flags.config = flags.settings()
        return flags
    changes = changes_of(flags, default)
    if before.parent and start.parent and is_same_checkpoint(start.parent, before.parent):
        changes.pop("parent", None)  # the same one, written another way
    if start.resumed:
        flags.config = replace(before, **changes)
    else:
        changes.pop("parent", None)
        flags.config = continue_from(start.checkpoint(), **{"out": flags.out, **changes})
    return flags
