"""`saf pretrain`: train one arm, ordinary, frozen or pruned."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from saf.cli.command import Command, build_groups, given_values
from saf.cli.freeze import check_budget
from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate.recall import recall_table
from saf.freezing.config import BUDGETS
from saf.machine.processes import is_first, joined
from saf.records.quantities import seconds
from saf.records.table import Table
from saf.settings import FLAT
from saf.train import EXIT_STOPPED, TrainConfig, open_checkpoint, pretrain
from saf.train.run_config import recorded_config, settings_after


@dataclass(kw_only=True)
class Pretrain(Command):
    """Train a model, or one arm from another run's checkpoint, in a folder of its own.

    Settings left out take their default, with --parent the parent run's value, with --resume the run's own: the help
    shows which, as in `saf pretrain --parent FOLDER --out FOLDER --help`.
    Several processes train together when `torchrun --nproc-per-node N -m saf pretrain ...` starts them.
    Exit code 75: a signal stopped the run after a checkpoint; go on with --resume.
    """

    settings: Annotated[TrainConfig, FLAT]
    """Of the run."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, with the run's own settings."""
    json: bool = False
    """Print the result as JSON instead of a table."""

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
        check_freeze_words(own.get("freeze", {}), before)
        own |= build_groups(TrainConfig, own, before)
        if before and before.parent and start.parent and start.parent.resolve() == Path(before.parent).resolve():
            own["parent"] = before.parent  # however the path is written
        return cls(settings=settings(**own), **given)

    def run(self) -> dict[str, Any]:
        """Train, print the result and return it; exits with code 75 when a signal stopped the run."""
        with joined(self.settings.device):
            result, prints = pretrain(self.settings, resume=self.resume), is_first()
        if "stopped_at" in result:
            if prints:
                print(
                    f"stopped after update {result['stopped_at']}; checkpoint {result['checkpoint']}. "
                    f"Go on with: saf pretrain --out {self.settings.out} --resume",
                    file=sys.stderr,
                )
            raise SystemExit(EXIT_STOPPED)
        if prints:
            recall = [recall_table(result["recall"]["tests"], title="queries answered")] if "recall" in result else []
            show(result, result_table(result), *recall, as_json=self.json)
        return result


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
            checkpoint, out = open_checkpoint(self.parent), self.out
            return settings_after(checkpoint, out=out), partial(settings_after, checkpoint)
        if self.resume and not self.data:
            raise InputError(f"{self.out} holds no run to resume; check --out, or start a new run with --data")
        return None, TrainConfig


def check_freeze_words(given: Mapping[str, Any], before: TrainConfig | None) -> None:
    """Raise InputError for words about freezing none of which, nor the settings before, say how many heads."""
    check_budget(given)
    if given and not given.keys() & set(BUDGETS) and not (before and before.freeze):
        raise InputError(f"--freeze.{next(iter(given)).replace('_', '-')} needs --freeze.rate beside it")


def _accuracy(result: dict[str, Any]) -> str:
    """Return a finetuned run's accuracy in words, with its standard error over questions."""
    words = f"{100 * result['accuracy']:.2f}% of {result['questions']:,} {result['judged_by']} questions"
    return f"{words} (standard error {100 * result['standard_error']:.2f} points)"


def _whole_run(time: dict[str, Any]) -> str:
    everything, warm = (time[clock]["seconds"] for clock in ("everything", "warm"))
    parent = ", its parent's part included" if time["parent_parts"] else ""
    return f"{seconds(everything)}{parent}; without loading and compilation {seconds(warm)}"


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
        "unigram entropy": (entropy := result.get("unigram_entropy")) and f"{entropy:.4f} nats",
        "loss, training": result["train_loss"] and f"{result['train_loss']:.4f} nats per token",
        "update, median": timing
        and f"{timing['median']:.4f} s (updates {timing['first_update']} to {timing['last_update']})",
        "peak memory": result["peak_memory_bytes"] and f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
        "whole run": _whole_run(result["time"]),
    }
    if event:
        more, in_all = len(event["heads"]), sum(len(result["provenance"][kind]) for kind in ("heads", "pruned"))
        row = f"heads {result['arm']}"
        rows[row] = f"{more} after update {event['update']:,}"
        if event["events"] > 1:
            rows[row] = f"{more} by {event['events']} events, the first after update {event['update']:,}"
        elif in_all > more:
            rows[row] = f"{more} more after update {event['update']:,}, {in_all} in all"
        if result["trainable_pattern_parameters"]:
            rows["pattern parameters"] = f"{result['trainable_pattern_parameters']:,} trained"
        rows["intervention"] = f"{sum(event['seconds'].values()):.2f} s"
    if event.get("loss_before") is not None:
        rows["controller loss"] = f"{event['loss_before']:.4f} before, {event['loss_after']:.4f} after"
    rows["checkpoint"] = result["checkpoint"]
    return Table.facts(f"{result['arm']} arm, {result['updates']:,} updates, {result['tokens']:,} tokens", rows)
