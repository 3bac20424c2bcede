"""`saf freeze`: the whole recipe on a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from saf.cli.command import Command, build, given_values
from saf.cli.output import LayerProgress, show
from saf.errors import InputError
from saf.freeze_checkpoint import freeze_checkpoint
from saf.freeze_settings import CheckpointFreezing
from saf.freezing.config import BUDGETS, OF_PATTERNS, refuse_patterns
from saf.integrations.models import transformers_folders
from saf.records.paths import means_transformers
from saf.settings import FLAT


@dataclass(kw_only=True)
class Freeze(Command):
    """Calibrate, choose, fit and install frozen heads in a checkpoint, or prune them; write the result as a new one.

    The optimiser's state is carried along, so `saf pretrain --parent OUT` continues from there. Of a model of
    transformers OUT is a folder that from_pretrained opens.
    """

    settings: Annotated[CheckpointFreezing, FLAT]
    """What is frozen, and how."""
    json: bool = False
    """Print JSON instead of a table."""

    @classmethod
    def from_words(cls, words: Sequence[str], *, prog: str | None = None) -> Self:
        """Return the command; raise InputError where words contradict one another, as `check_freezing` does."""
        given = given_values(cls, words, prog=prog)
        check_freezing(given["settings"].get("config", {}))
        return build(cls, given)

    def run(self) -> dict[str, Any]:
        """Freeze, write the checkpoint, show and return the report with the checkpoint's hash."""
        freeze, kind = freeze_checkpoint, "checkpoint"
        if means_transformers(self.settings.checkpoint):
            freeze, kind = transformers_folders().freeze_folder, "model"
        with LayerProgress() as progress:
            report, written, parent = freeze(self.settings, say=progress.say, progress=progress)
        out = self.settings.out
        result = {"checkpoint": str(out), "hash": written, "parent": parent, **report.to_dict()}
        show(result, report.table(), f"{kind} {out}", f"hash {written}", as_json=self.json)
        return result


COMMAND = Freeze


def check_freezing(given: Mapping[str, Any]) -> None:
    """Raise InputError when more than one of the settings given says how many heads are frozen.

    A setting of patterns, of fits or of what executes them is refused where they prune, its default too.
    """
    if len(budgets := [name for name in BUDGETS if name in given]) > 1:
        raise InputError(f"give either a rate, a count or the heads to freeze or to match; got {' and '.join(budgets)}")
    if given.get("operation") == "prune":
        refuse_patterns([name for name in OF_PATTERNS if name in given])
