"""The flags of `saf pretrain` and `saf finetune`, how a run ends or stops, and the table of its result."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from saf.checkpoint import Checkpoint, find_checkpoint
from saf.cli.output import show
from saf.distributed import is_rank0, process_group
from saf.errors import InputError
from saf.evaluate.recall import gate_problem, recall_tables
from saf.freeze_config import BUDGETS, FreezeConfig
from saf.records.events import head_counts, heads_in_words, more_and_total
from saf.records.table import Table, seconds, signed
from saf.schedules import OneTime, Schedule
from saf.tasks import FinetuneSettings, TextTask
from saf.train import EXIT_STOPPED, TrainConfig, open_checkpoint

NOTHING_FROZEN = FreezeConfig(rate=0.0)
"""The default of the command line: no flag sets a number of heads."""
FIRST = (
    *("data", "out", "parent", "resume", "model", "length", "batch_size", "accumulation", "updates", "peak_lr"),
    *("seed", "device", "freeze.rate", "freeze.score", "freeze.operation", "schedule", "json"),
)
"""The flags that `--help` shows."""


@dataclass(kw_only=True)
class TrainFlags(TrainConfig):
    """The settings of a run as flags: groups in place of None, and nothing checked before all words are read."""

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
        """Leave checks to `settings`: tyro makes instances of defaults, too."""
        self.config: TrainConfig = self

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the flags of a run's settings."""
        values = {each.name: getattr(config, each.name) for each in fields(TrainConfig)}
        values["freeze"] = config.freeze or NOTHING_FROZEN
        values["schedule"] = config.schedule or OneTime()
        return cls(**values)

    def settings(self) -> TrainConfig:
        """Return the settings of a new run; raise InputError for those that cannot be used, or have no effect."""
        changes = changes_of(self, TrainFlags(data="", out=""))
        return TrainConfig(**{**changes, "data": self.data, "out": self.out})


@dataclass(kw_only=True)
class Start:
    """The flags that decide where the defaults of all others come from."""

    out: Path | None = None
    data: Path | None = None
    parent: Path | None = None
    task: str | None = None
    like: Path | None = None
    resume: bool = False

    @classmethod
    def of(cls, words: Collection[str]) -> "Start":
        """Read these flags alone."""
        start, _ = tyro.cli(cls, args=list(words), add_help=False, return_unknown_args=True)
        return start

    @property
    def resumed(self) -> bool:
        """Whether there is a run to resume."""
        return self.resume and self.out is not None and (self.out / "config.json").exists()

    def checkpoint(self) -> Checkpoint:
        """Open the parent's checkpoint."""
        assert self.parent is not None
        return open_checkpoint(find_checkpoint(self.parent) or self.parent)


def frozen(freeze: FreezeConfig) -> FreezeConfig | None:
    """Return the settings of freezing; None where no flag sets a number of heads.

    Raises InputError for several numbers of heads, or flags of freezing without one.
    """
    budgets = [name for name in BUDGETS if getattr(freeze, name) not in (None, 0.0)]
    if len(budgets) > 1:
        raise InputError(f"give one of rate, count, heads and match_heads, got {' and '.join(budgets)}")
    flags = [each.name for each in fields(freeze) if getattr(freeze, each.name) != getattr(NOTHING_FROZEN, each.name)]
    if flags and not budgets:
        raise InputError(f"--freeze.{flags[0].replace('_', '-')} needs --freeze.rate beside it")
    return freeze if budgets else None


def changes_of(flags: TrainFlags, default: TrainFlags) -> dict[str, Any]:
    """Return the settings in which flags differ from their defaults; InputError for one without effect."""
    names = [each.name for each in fields(TrainConfig)]
    changes = {name: getattr(flags, name) for name in names if getattr(flags, name) != getattr(default, name)}
    if "schedule" in changes and flags.freeze == NOTHING_FROZEN:
        raise InputError(
            "--schedule has no effect without a number of heads: add --freeze.rate, or leave it out "
            "(--save-at saves checkpoints for arms to go on from)"
        )
    of_text = [name for name in ("sampler", "calibration_source", "token_losses") if name in changes]
    if flags.task != TextTask.name and of_text:
        raise InputError(f"{' and '.join(of_text)} has an effect on text alone; leave it out")
    if "freeze" in changes:
        changes["freeze"] = frozen(flags.freeze)
    return changes


def show_result(train: Callable[[], dict[str, Any]], flags: TrainFlags) -> dict[str, Any]:
    """Train in the group of processes that is there, show the result and return it.

    Exits with code 75 when a signal stopped the run.
    """
    with process_group(flags.config.device):
        result = train()
        stopped = "stopped_at" in result
        if is_rank0() and stopped:
            where = f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}"
            print(f"{where}. Go on with the same command and --resume", file=sys.stderr)
        elif is_rank0():
            show(result, result_table(result), *recall_tables(result), as_json=flags.json)
    if stopped:
        raise SystemExit(EXIT_STOPPED)
    return result


def result_table(result: dict[str, Any]) -> Table:
    """Return the table of a run's result; a row without a value is not shown."""
    timing, recall = result["update_seconds"], result.get("recall")
    perplexity, entropy, taken = (result.get(name) for name in ("report_perplexity", "unigram_entropy", "taken"))
    peak, train_loss = result["peak_memory_bytes"], result["train_loss"]
    rows = {
        "accuracy": _accuracy(result) if result.get("accuracy") is not None else None,
        "taken, by choice": taken and ", ".join(f"{choice}: {count:,}" for choice, count in taken.items()),
        "perplexity, report": perplexity and f"{perplexity:.4f}",
        "loss, report": f"{result['report_loss']:.5f} nats per {'query' if recall else 'token'}",
        "development queries answered": recall and f"{100 * recall['development']['accuracy']:.2f}%",
        "not to be compared": recall and gate_problem(recall),
        "unigram entropy": entropy and f"{entropy:.4f} nats",
        "loss, training": train_loss and f"{train_loss:.4f} nats per token",
        "update, median": timing
        and f"{timing['median']:.4f} s (updates {timing['first_update']} to {timing['last_update']})",
        "peak memory": peak and f"{peak / 2**30:.2f} GiB",
        "whole run": _whole_run(result["time"]),
        **_event_rows(result),
        "checkpoint": result["checkpoint"],
    }
    return Table.facts(f"{result['arm']} arm, {result['updates']:,} updates, {result['tokens']:,} tokens", rows)


def _accuracy(result: dict[str, Any]) -> str:
    words = f"{100 * result['accuracy']:.2f}% of {result['questions']:,} {result['judged_by']} questions"
    return f"{words} (standard error {100 * result['standard_error']:.2f} points)"


def _whole_run(time: dict[str, Any]) -> str:
    everything, warm = (time[clock]["seconds"] for clock in ("everything", "warm"))
    parent = ", its parent's part included" if time["parent_parts"] else ""
    return f"{seconds(everything)}{parent}; without loading and compilation {seconds(warm)}"


def _event_rows(result: dict[str, Any]) -> dict[str, str | None]:
    event = result["intervention"]
    if not event:
        return {}
    pruned, several = result["provenance"]["pruned"], event["events"] > 1
    own = head_counts(event["heads"], pruned=pruned)
    when = f"after update {event['update']:,}"
    if result["arm"] == "ordinary":
        by = f"{event['events']} events, the first {when}" if several else f"the event {when}"
        rows: dict[str, str | None] = {"heads frozen or pruned": f"none by {by}"}
    else:
        kinds = [kind for kind, count in own.items() if count]
        more, total = more_and_total(own, head_counts([*result["provenance"]["heads"], *pruned], pruned=pruned))
        count = str(len(event["heads"])) if len(kinds) < 2 else heads_in_words(own)
        when = f"by {event['events']} events, the first {when}" if several else when
        words = " ".join(filter(None, [count, more, when]))
        rows = {f"heads {' and '.join(kinds) or result['arm']}": ", ".join(filter(None, [words, total]))}
    if trained := result["trainable_pattern_parameters"]:
        rows["pattern parameters"] = f"{trained:,} trained"
    rows["intervention"] = f"{sum(event['seconds'].values()):.2f} s"
    before, after, rise = (event.get(name) for name in ("loss_before", "loss_after", "loss_rise"))
    if before is not None and several:
        at_once = "" if rise is None else f"; {signed(rise, 4, '')} by the events themselves"
        rows["controller loss"] = f"{before:.4f} before the first, {after:.4f} after the last{at_once}"
    elif before is not None:
        rows["controller loss"] = f"{before:.4f} before, {after:.4f} after"
    return rows
