"""What `saf pretrain` and `saf finetune` share: their flags, how a run ends or stops, and the table of its result."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

import tyro

from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate.recall import not_learnt, recall_tables
from saf.freezing.config import BUDGETS, FreezeConfig
from saf.machine.processes import is_first, joined
from saf.records.events import beside_earlier, head_counts, heads_in_words
from saf.records.quantities import seconds, signed
from saf.records.table import Table
from saf.schedules import OneTime, Schedule
from saf.tasks import FinetuneSettings, TextTask
from saf.train import EXIT_STOPPED, TrainConfig
from saf.train.clock import LOST

NOTHING_FROZEN = FreezeConfig(rate=0.0)
"""The default of the command line: no flag says how many heads are frozen."""
FIRST = (
    *("data", "out", "parent", "resume", "model", "length", "batch_size", "accumulation", "updates", "peak_lr"),
    *("seed", "device", "freeze.rate", "freeze.score", "freeze.operation", "schedule", "json"),
)
"""The flags that `--help` shows."""


@dataclass(kw_only=True)
class TrainFlags(TrainConfig):
    """Hold the settings of a run as flags: groups in place of None, and nothing checked before all words are read."""

    freeze: FreezeConfig = field(default_factory=lambda: NOTHING_FROZEN)
    """How heads are frozen; nothing is without a rate, a count or heads."""
    schedule: Schedule = field(default_factory=OneTime)
    """When heads are frozen; an ordinary arm saves a checkpoint where the first event would come."""
    finetuning: Annotated[FinetuneSettings | None, tyro.conf.Suppress] = None
    """What finetuning on questions with choices adds."""
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
        values = {each.name: getattr(self, each.name) for each in fields(TrainConfig)}
        default = TrainFlags(data="", out="")
        check_effects(self, {name for name in values if values[name] != getattr(default, name)})
        return TrainConfig(**{**values, "freeze": frozen(self.freeze)})


def frozen(freeze: FreezeConfig) -> FreezeConfig | None:
    """Return the settings of freezing that flags give; None where none says how many heads.

    Raises InputError for flags of freezing without a number of heads, or with several.
    """
    budgets = [name for name in BUDGETS if getattr(freeze, name) not in (None, 0.0)]
    if len(budgets) > 1:
        raise InputError(f"give one of rate, count, heads and match_heads, got {' and '.join(budgets)}")
    given = [each.name for each in fields(freeze) if getattr(freeze, each.name) != getattr(NOTHING_FROZEN, each.name)]
    if given and not budgets:
        raise InputError(f"--freeze.{given[0].replace('_', '-')} needs --freeze.rate beside it")
    return freeze if budgets else None


def changes_of(flags: TrainFlags, default: TrainFlags) -> dict[str, Any]:
    """Return the settings, by name, in which flags differ from those that a parent or a run to resume has."""
    names = [each.name for each in fields(TrainConfig)]
    changes = {name: getattr(flags, name) for name in names if getattr(flags, name) != getattr(default, name)}
    check_effects(flags, changes.keys())
    if "freeze" in changes:
        changes["freeze"] = frozen(flags.freeze)
    return changes


def check_effects(flags: TrainFlags, given: Collection[str]) -> None:
    """Raise InputError for a flag that would have no effect (docs/schedules.md); `given` names those that words set."""
    if "schedule" in given and flags.freeze == NOTHING_FROZEN:
        raise InputError(
            "--schedule says when heads are frozen, and nothing says how many: add --freeze.rate (or --freeze.count, "
            "--freeze.heads), or leave it out; --save-at saves a checkpoint for arms to go on from"
        )
    of_text = [name for name in ("sampler", "calibration_source", "token_losses") if name in given]
    if flags.task != TextTask.name and of_text:
        raise InputError(f"{' and '.join(of_text)} has an effect on text alone; leave it out")


def show_result(train: Callable[[], dict[str, Any]], flags: TrainFlags) -> dict[str, Any]:
    """Train in the group of processes that is there, show the result and return it.

    Exits with code 75 when a signal stopped the run.
    """
    with joined(flags.config.device):
        result = train()
        if is_first() and "stopped_at" in result:
            print(
                f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}. "
                "Go on with the same command and --resume",
                file=sys.stderr,
            )
        elif is_first():
            show(result, result_table(result), *recall_tables(result), as_json=flags.json)
    if "stopped_at" in result:
        raise SystemExit(EXIT_STOPPED)
    return result


def _accuracy(result: dict[str, Any]) -> str:
    """Return a finetuned run's accuracy in words, with its standard error over questions."""
    words = f"{100 * result['accuracy']:.2f}% of {result['questions']:,} {result['judged_by']} questions"
    return f"{words} (standard error {100 * result['standard_error']:.2f} points)"


def _whole_run(time: dict[str, Any]) -> str:
    everything, warm = (time[clock]["seconds"] for clock in ("everything", "warm"))
    parent = ", its parent's part included" if time["parent_parts"] else ""
    lost = f"; {seconds(time['parts'][LOST])} of updates that were lost are in neither" if LOST in time["parts"] else ""
    return f"{seconds(everything)}{parent}; without loading and compilation {seconds(warm)}{lost}"


def _head_rows(result: dict[str, Any], event: dict[str, Any]) -> dict[str, str]:
    """Return the row of the heads that a run's own events froze or pruned, beside those of its parent."""
    frozen, pruned = (result["provenance"][name] for name in ("heads", "pruned"))
    own = head_counts(event["heads"], pruned=pruned)
    in_all = head_counts([*frozen, *pruned], pruned=pruned)
    kinds = [kind for kind, count in own.items() if count]
    more, whole = beside_earlier(own, in_all)
    when = f"after update {event['update']:,}"
    if event["events"] > 1:
        when = f"by {event['events']} events, the first {when}"
    if result["arm"] == "ordinary":
        by = f"the event {when}" if event["events"] == 1 else when.removeprefix("by ")
        return {"heads frozen or pruned": f"none by {by}"}
    count = str(len(event["heads"])) if len(kinds) < 2 else heads_in_words(own)
    told = " ".join(filter(None, [count, more, when]))
    return {f"heads {' and '.join(kinds) or result['arm']}": ", ".join(filter(None, [told, whole]))}


def _controller_loss(event: dict[str, Any]) -> str:
    """Return the losses around a run's events in words, and of several what they changed at once, added up."""
    before, after, rise = (event.get(name) for name in ("loss_before", "loss_after", "loss_rise"))
    if event["events"] == 1:
        return f"{before:.4f} before, {after:.4f} after"
    at_once = "" if rise is None else f"; {signed(rise, 4, '')} by the events themselves"
    return f"{before:.4f} before the first, {after:.4f} after the last{at_once}"


def result_table(result: dict[str, Any]) -> Table:
    """Return the table of a run's result; a row without a value is not shown."""
    timing, event = result["update_seconds"], result["intervention"] or {}
    rows = {
        "accuracy": (result.get("accuracy") is not None and _accuracy(result)) or None,
        "taken, by choice": result.get("taken") and ", ".join(f"{k}: {n:,}" for k, n in result["taken"].items()),
        "perplexity, report": (perplexity := result.get("report_perplexity")) and f"{perplexity:.4f}",
        "loss, report": f"{result['report_loss']:.5f} nats per {'query' if 'recall' in result else 'token'}",
        "development queries answered": (recall := result.get("recall"))
        and f"{100 * recall['development']['accuracy']:.2f}%",
        "not to be compared": recall and not_learnt(recall),
        "unigram entropy": (entropy := result.get("unigram_entropy")) and f"{entropy:.4f} nats",
        "loss, training": result["train_loss"] and f"{result['train_loss']:.4f} nats per token",
        "update, median": timing
        and f"{timing['median']:.4f} s (updates {timing['first_update']} to {timing['last_update']})",
        "without a graph": (graphs := result["graphs"])
        and f"{graphs['uncaptured']:,} of {graphs['micro_batches']:,} micro-batches, of shapes beyond those kept",
        "peak memory": result["peak_memory_bytes"] and f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
        "whole run": _whole_run(result["time"]),
    }
    if event:
        rows |= _head_rows(result, event)
        if result["trainable_pattern_parameters"]:
            rows["pattern parameters"] = f"{result['trainable_pattern_parameters']:,} trained"
        rows["intervention"] = f"{sum(event['seconds'].values()):.2f} s"
    if event.get("loss_before") is not None:
        rows["controller loss"] = _controller_loss(event)
    rows["checkpoint"] = result["checkpoint"]
    return Table.facts(f"{result['arm']} arm, {result['updates']:,} updates, {result['tokens']:,} tokens", rows)
