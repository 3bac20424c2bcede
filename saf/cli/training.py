"""What commands that train a run share: its settings as flags, how it ends or stops, and the table of its result."""

import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from saf.cli.command import Command
from saf.cli.freeze import check_freezing
from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate.recall import not_learnt, recall_tables
from saf.freezing.config import BUDGETS
from saf.machine.processes import is_first, joined
from saf.records.events import beside_earlier, head_counts, heads_in_words
from saf.records.quantities import seconds, signed
from saf.records.table import Table
from saf.settings import FLAT
from saf.tasks import TextTask
from saf.train import EXIT_STOPPED, TrainConfig
from saf.train.clock import LOST

OF_TEXT = ("sampler", "calibration_source", "token_losses")
"""Settings of a run that no task but text reads."""


@dataclass(kw_only=True)
class Training(Command):
    """Train a run in a folder of its own, or go on with it, and show its result."""

    settings: Annotated[TrainConfig, FLAT]
    """Of the run."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the run's own settings."""
    json: bool = False
    """Print the result as JSON instead of a table."""

    @abstractmethod
    def train(self) -> dict[str, Any]:
        """Train, and return result.json, or where a signal stopped it."""

    def run(self) -> dict[str, Any]:
        """Train, print the result and return it; exits with code 75 when a signal stopped the run."""
        with joined(self.settings.device):
            result = self.train()
            if is_first():
                self._tell(result)
        if "stopped_at" in result:
            raise SystemExit(EXIT_STOPPED)
        return result

    def _tell(self, result: dict[str, Any]) -> None:
        """Print the result, or where the run stopped."""
        if "stopped_at" not in result:
            show(result, result_table(result), *recall_tables(result), as_json=self.json)
            return
        print(
            f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}. "
            "Go on with the same command and --resume",
            file=sys.stderr,
        )


def check_freeze_words(given: Mapping[str, Any], *, freezes: bool) -> None:
    """Raise InputError for words about freezing none of which, nor the settings before, say how many heads."""
    check_freezing(given)
    if given and not given.keys() & set(BUDGETS) and not freezes:
        raise InputError(f"--freeze.{next(iter(given)).replace('_', '-')} needs --freeze.rate beside it")


def check_effects(own: Mapping[str, Any], *, task: str, freezes: bool) -> None:
    """Raise InputError for words that would be silently without effect in a run of the task (docs/schedules.md).

    `own` is what words give, `freezes` whether the settings that they change say already how many heads are frozen.
    Settings of calibration and evaluation are not refused in an ordinary run: arms that go on from it, or are finetuned
    like it, take them over.
    """
    schedule = own.get("schedule")
    if schedule is not None and schedule.name is not None and not (own.get("freeze") or freezes):
        raise InputError(
            "--schedule and --freeze-at say when heads are frozen, and nothing says how many: add --freeze.rate (or "
            "--freeze.count, --freeze.heads), or leave them out; --save-at saves a checkpoint for arms to go on from"
        )
    if task != TextTask.name and (of_text := [f"--{name.replace('_', '-')}" for name in OF_TEXT if name in own]):
        raise InputError(f"{' and '.join(of_text)} has an effect on text alone; leave it out")


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
