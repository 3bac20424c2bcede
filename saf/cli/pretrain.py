"""`saf pretrain` trains one arm, ordinary, frozen or pruned. `saf finetune` shares its flags and its result table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from saf.checkpoint import Checkpoint, find_checkpoint, refers_to_checkpoint
from saf.cli.output import print_progress, show
from saf.cli.parsing import parse
from saf.compare import arms_table, unlearnt_reason
from saf.distributed import is_rank0, process_group
from saf.errors import InputError
from saf.freeze_config import COUNT_SETTINGS, FreezeConfig
from saf.records.run import RecordedRun
from saf.records.table import Table, signed
from saf.schedules import OneTime, Schedule
from saf.tasks import FinetuneSettings, TextTask
from saf.tasks.mqar import recall_tables
from saf.train import EXIT_STOPPED, TrainConfig, continue_from, open_checkpoint, pretrain
from saf.train.config import recorded_config

# tyro makes flags only where the default is an instance: with None there would be no `--freeze.*`.
NOTHING_FROZEN = FreezeConfig(rate=0.0)
"""The default of `--freeze.*`, by which no head freezes."""
FREEZING_HELP_FIELDS = {FreezeConfig: ("rate", "score", "operation")}
"""The settings of `--freeze.*` that `--help` shows."""


@dataclass(kw_only=True)
class TrainFlags(TrainConfig):
    """The settings of a run as flags; `freeze` and `schedule` are never None, so that both have flags of their own."""

    freeze: FreezeConfig = field(default_factory=lambda: NOTHING_FROZEN)
    """These settings say how heads are frozen; without a rate, a count or heads nothing is frozen."""
    schedule: Schedule = field(default_factory=OneTime)
    """The schedule says when heads freeze; an ordinary arm saves a checkpoint at the first event."""
    finetuning: Annotated[FinetuneSettings | None, tyro.conf.Suppress] = None
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the run's own settings."""
    json: bool = False
    """Print the result as JSON instead of a table."""

    def __post_init__(self):
        """Check nothing, unlike `TrainConfig`: tyro creates instances before it has parsed all flags."""
        self.config: TrainConfig = self  # replaced by `parse_words` with the checked settings

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        values = {each.name: getattr(config, each.name) for each in fields(TrainConfig)}
        groups = {"freeze": config.freeze or NOTHING_FROZEN, "schedule": config.schedule or OneTime()}
        return cls(**values | groups)

    def train(self) -> dict[str, Any]:
        """Train by `config` and return the result, which has `stopped_at` where a signal stopped the run."""
        raise NotImplementedError

    def run(self) -> dict[str, Any]:
        """Train in the process group of torchrun, if there is one, show the result and return it.

        Exits with code 75 when a signal stopped the run.
        """
        with process_group(self.config.device):
            result = self.train()
            stopped = "stopped_at" in result
            if is_rank0() and stopped:
                where = f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}"
                print_progress(f"{where}. Go on with the same command and --resume")
            elif is_rank0():
                run = RecordedRun.open(self.config.out)
                show(result, result_table(run), *recall_tables(result), as_json=self.json)
        if stopped:  # a code of its own, by which a job's script starts the same command again with --resume
            raise SystemExit(EXIT_STOPPED)
        return result


@dataclass(kw_only=True)
class Command(TrainFlags):
    r"""Train a model, or one arm from another run's checkpoint, in a folder of its own.

    An ordinary model, then an arm that starts at its checkpoint and freezes a quarter of the heads:

      $ saf pretrain --data data --out runs/ordinary
      $ saf pretrain --parent runs/ordinary/checkpoints/step-500 \
            --out runs/frozen --freeze.rate 0.25

    A setting that is left out has its default, with --parent the parent run's value, and with --resume the run's own;
    --help-all with these flags and --out shows the values. `torchrun --nproc-per-node N -m saf pretrain ...` trains in
    several processes. Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    def train(self) -> dict[str, Any]:
        return pretrain(self.config, resume=self.resume)


HELP_FIELDS = {
    Command: (
        "data", "out", "parent", "resume", "model", "length", "batch_size", "accumulation", "updates", "peak_lr",
        "seed", "device", "freeze", "schedule", "json",
    ),
    **FREEZING_HELP_FIELDS,
}  # fmt: skip
"""The settings that `--help` shows."""


def parse_words(words: Sequence[str]) -> Command:
    """Return the command; settings left out come from the parent, or from the run to resume.

    Raises:
        CheckpointError: The parent is no whole checkpoint.
        InputError: There is no run to resume, or a setting that cannot be used.
    """
    # The settings of the parent, or of the run to resume, are the defaults of the flags: they are read first.
    early = EarlyFlags.of(words)
    build: Callable[..., TrainConfig] = TrainConfig
    default = Command(data=tyro.MISSING, out=tyro.MISSING)
    if early.resumed and early.out is not None:
        base = recorded_config(early.out)  # and so the seed, the data and all else: resuming is exact
        default, build = Command.of(base), partial(replace, base)
    elif early.parent and early.out:
        # Not `replace`: `continue_from` lets --freeze.rate without a schedule freeze right at the parent.
        build = partial(continue_from, early.checkpoint(), out=early.out)
        default = Command.of(build())
    elif early.resume and not early.data:
        raise InputError(f"{early.out} holds no run to resume; check --out, or start a new run with --data")
    flags = parse(Command, words, prog="saf pretrain", default=default, help_fields=HELP_FIELDS)
    changes = changes_of(flags, default)
    if flags.parent and default.parent and refers_to_checkpoint(flags.parent, default.parent):
        # The same checkpoint by another path. A run that began at another one refuses it when it starts.
        changes.pop("parent", None)
    # Only the changes: `flags` has `NOTHING_FROZEN` where the config of an ordinary arm has None.
    flags.config = build(**changes)
    return flags


# --- flags


@dataclass(kw_only=True)
class EarlyFlags:
    """Flags that are read before all others: the parent or the run that they name sets the defaults of the others."""

    out: Path | None = None
    data: Path | None = None
    parent: Path | None = None
    task: str | None = None
    like: Path | None = None  # of `saf finetune` alone
    resume: bool = False

    @classmethod
    def of(cls, words: Sequence[str]) -> "EarlyFlags":
        # The parser of the whole command reads the other words, --help among them.
        early, _ = tyro.cli(cls, args=words, add_help=False, return_unknown_args=True)
        return early

    @property
    def resumed(self) -> bool:
        """Whether --resume finds a run in --out; without one, the same command starts it."""
        return self.resume and self.out is not None and (self.out / "config.json").exists()

    def checkpoint(self) -> Checkpoint:
        assert self.parent is not None
        return open_checkpoint(find_checkpoint(self.parent) or self.parent)


def changes_of(flags: TrainFlags, default: TrainFlags) -> dict[str, Any]:
    """Return the settings in which flags differ from their defaults; raise InputError for one without effect."""
    names = [each.name for each in fields(TrainConfig)]
    changes = {name: getattr(flags, name) for name in names if getattr(flags, name) != getattr(default, name)}
    # A flag without effect is refused: otherwise a user would learn after days that the run ignored it.
    if "schedule" in changes and flags.freeze == NOTHING_FROZEN:
        raise InputError("--schedule has no effect without a number of heads: add --freeze.rate, or leave it out")
    text_only = [name for name in ("sampler", "calibration_source", "token_losses") if name in changes]
    if flags.task != TextTask.name and text_only:
        raise InputError(f"{' and '.join(text_only)} has an effect on text alone; leave it out")
    if "freeze" in changes:
        changes["freeze"] = _freeze_or_none(flags.freeze)
    return changes


def _freeze_or_none(freeze: FreezeConfig) -> FreezeConfig | None:
    """Return the settings of freezing, or None for `NOTHING_FROZEN`; raise InputError unless one sets the heads."""
    counts = [name for name in COUNT_SETTINGS if getattr(freeze, name) not in (None, 0.0)]
    if len(counts) > 1:
        raise InputError(f"give one of rate, count, heads and match_heads, got {' and '.join(counts)}")
    flags = [each.name for each in fields(freeze) if getattr(freeze, each.name) != getattr(NOTHING_FROZEN, each.name)]
    if flags and not counts:
        raise InputError(f"--freeze.{flags[0].replace('_', '-')} needs --freeze.rate")
    return freeze if counts else None


# --- results


def result_table(run: RecordedRun) -> Table:
    """Return a table with a row for each column of `arms_table`, and further facts about the run."""
    result = run.finished_result()
    arms = arms_table([run], [run.arm], [])
    facts: dict[str, Any] = dict(zip(arms.columns[1:], arms.rows[0][1:], strict=True))
    if (accuracy := result.get("accuracy")) is not None:
        questions = f"{result['questions']:,} {result['judged_by']} questions"
        facts["accuracy"] = f"{100 * accuracy:.2f} ± {100 * result['standard_error']:.2f}% of {questions}"
    facts["not to be compared"] = unlearnt_reason(result)  # None, and so left out, for a run that learnt
    if event := result["intervention"]:
        several = event["events"] > 1
        events = f", the first of {event['events']} events" if several else ""
        last = ", the last: no training followed" if event["update"] == result["updates"] else ""
        facts["heads changed"] = f"after update {event['update']:,}{events}{last}"
        if event.get("loss_before") is not None:
            before, after = ("before the first", "after the last") if several else ("before", "after")
            facts["controller loss"] = f"{event['loss_before']:.4f} {before}, {event['loss_after']:.4f} {after}"
            if several and event["loss_rise"] is not None:
                facts["controller loss"] += f"; {signed(event['loss_rise'], 4, '')} by the events themselves"
    facts["checkpoint"] = result["checkpoint"]
    return Table.facts(f"{run.arm} arm, {result['updates']:,} updates, {result['tokens']:,} tokens", facts)
