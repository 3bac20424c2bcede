"""`Run` is the state of a training run: its time, its next update, and the files that it writes, to its result.json."""

import hashlib
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch

from saf.checkpoint import (
    capture_random_state,
    checkpoint_hash,
    latest,
    prune_checkpoints_,
    save_checkpoint,
    step_name,
)
from saf.distributed import on_rank0
from saf.errors import InputError, SafWarning
from saf.heads import EDITED, HeadSet
from saf.machine import Execution, untimed_updates
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.records.events import EVENTS, EventRecord, append_event, arm, heads_in_force, read_events
from saf.records.files import append_line, file_hash, flush, read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import MANIFEST
from saf.records.table import duration, plain
from saf.schedules import Event, Proposer
from saf.surgery import pattern_parameters
from saf.tasks import Task
from saf.train.config import TrainConfig
from saf.train.events import GRADIENT
from saf.train.step import Updater, learning_rate

# --- time

PARTS = {
    "load": "opening data, building or restoring the model, reading logs",
    "train": "updates, and the time between them",
    "compile": "updates that compile",
    "freeze": "events: calibration, scores, selection, fits, installation, and recording them",
    "evaluate": "losses on the controller's windows, those around events and after the last update included",
    "checkpoint": "writing checkpoints, but for the last one",
}
"""The parts of a run's elapsed time. Reports and the last checkpoint are in none."""


class Elapsed:
    """Seconds of a run by part, over all processes that resumed it; a branch has its parent's beside them.

    >>> elapsed = Elapsed()
    >>> with elapsed("evaluate"):
    ...     pass
    >>> elapsed.parts["evaluate"] < elapsed.total
    True
    """

    def __init__(self):
        self._part: str | None = "load"
        self._since = time.perf_counter()
        self._own = dict.fromkeys(PARTS, 0.0)
        self.parent: dict[str, float] | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of this run until now, its parent's left out."""
        self.enter(self._part)
        return dict(self._own)

    @property
    def total(self) -> float:
        """The seconds of this run until now, its parent's left out."""
        return sum(self.parts.values())

    def enter(self, part: str | None) -> None:
        """Count the seconds from now on under `part`; under None they do not count."""
        now = time.perf_counter()
        if self._part is not None:
            self._own[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def __call__(self, part: str | None) -> Iterator[None]:
        """Count a block under `part`, but not where nothing counts any more; then go on with the part before."""
        outer = self._part
        self.enter(outer and part)
        try:
            yield
        finally:
            self.enter(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of this run and of its parent, as JSON values."""
        return {"parts": self.parts, "parent": self.parent}

    def go_on_(self, state: Mapping[str, Any], *, branch: bool) -> None:
        """Add the seconds in a checkpoint of this run; those of another run's, of which this is a branch, aside."""
        if branch:
            self.parent = _sum(state["parts"], state["parent"] or {})
        else:
            self._own, self.parent = _sum(self._own, state["parts"]), state["parent"]

    def record(self) -> dict[str, Any]:
        """Return the entries of result.json: both totals, the parent's part included, and the parts."""
        parts = self.parts
        both = _sum(parts, self.parent or {})
        everything = sum(both.values())
        totals = {"everything": everything, "warm": everything - both["load"] - both["compile"]}
        clocks = {name: {"seconds": seconds} for name, seconds in totals.items()}
        return {**clocks, "parts": parts, "parent_parts": self.parent}


def with_freeze(state: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the elapsed seconds of a checkpoint, in `Elapsed.state_dict`'s form, with those of an event upon it."""
    return {**state, "parts": _sum(state["parts"], {"freeze": seconds})}


def _sum(*records: Mapping[str, float]) -> dict[str, float]:
    return {part: sum(each.get(part, 0.0) for each in records) for part in PARTS}


# --- logs

CHECKPOINT_LOG = "clock.jsonl"
"""A line for each checkpoint of a run, also of those removed since: its hash and the elapsed seconds."""


class RunLog:
    """Write metrics.jsonl, evaluations.jsonl and TensorBoard events, and show progress on standard error.

    Progress is a bar on a terminal, and elsewhere a line now and then.
    """

    def __init__(self, folder: Path, config: TrainConfig, *, done: int, total: int, tokens: int, peak: float | None):
        """Go on with the logs in `folder`; an update has so many `tokens` and takes `peak` seconds at rated speed."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._metrics, self._evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        self._total, self._every, self._tokens, self._peak = total, config.log_every, tokens, peak
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=config.quiet)
        self._bar = self._board = None
        if self._console.is_terminal and not config.quiet:
            counts = TextColumn("{task.completed:.0f}/{task.total:.0f}")
            self._bar = Bar(counts, BarColumn(), TextColumn("{task.fields[text]}"), console=self._console)
            self._task = self._bar.add_task("training", total=total, completed=done, text="")
            self._bar.start()
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def updated(self, record: dict[str, Any], *, left: float | None) -> None:
        """Record one update, a line of metrics.jsonl, and show it with the seconds `left`, if they are known."""
        append_line(self._metrics, record, wait=False)
        update, seconds = record["update"], record["update_seconds"]
        values = {f"train/{name}": record[name] for name in ("loss", "lr", "grad_norm")}
        values["speed/tokens_per_second"] = speed = self._tokens / seconds
        words = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"{speed:,.0f} tokens/s"]
        if self._peak:
            values["speed/model_flop_utilisation"] = utilisation = self._peak / seconds
            words.append(f"MFU {utilisation:.1%}")
        if left is not None:
            words.append(f"{duration(left)} left")
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, update)
        if self._bar:
            self._bar.update(self._task, completed=update, text="  ".join(words))
        elif update % self._every == 0 or update == self._total:
            self._console.print(f"update {update}/{self._total}  " + "  ".join(words))

    def evaluated(self, update: int, loss: float, when: str) -> None:
        """Record one loss on the controller partition."""
        line = {"update": update, "partition": "controller", "loss": loss, "when": when}
        append_line(self._evaluations, line, wait=False)
        if self._board and when == "periodic":
            self._board.add_scalar("controller/loss", loss, update)
        self.say(f"update {update}: controller loss {loss:.4f} ({when.replace('_', ' ')})")

    def say(self, text: str) -> None:
        self._console.print(plain(text))

    def flush(self) -> None:
        for path in filter(Path.exists, (self._metrics, self._evaluations)):
            flush(path)

    def close(self) -> None:
        for each in filter(None, (self._board and self._board.close, self._bar and self._bar.stop)):
            each()


# --- the run


@dataclass(kw_only=True)
class Run:
    """One training run; of several ranks only rank 0 writes."""

    config: TrainConfig
    folder: Path
    execution: Execution
    task: Task
    model: GPT
    updater: Updater
    proposer: Proposer | None
    """Decides when events come; None for a run that changes no heads."""
    elapsed: Elapsed
    start: int
    """Update of the checkpoint that the run began at; 0 for a new one."""
    parent_hash: str | None
    log: RunLog | None = None
    """None on a rank that writes nothing."""
    heads_changed: int | None = None
    """Update after which the newest event of its own came; None before any."""
    peak_memory: int | None = None
    """Largest bytes allocated on CUDA in the updates that count; None elsewhere."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Seconds of the newest updates since heads changed. A time budget expects the next one to take as long as the
    longest of them: every second update would exceed an average."""
    guard_sequences: None = None
    """Events are recorded with their cost, and never refused for it."""

    @property
    def update(self) -> int:
        return self.updater.done

    @property
    def tokens(self) -> int:
        return self.update * self.task.targets_per_update

    @property
    def changed(self) -> bool:
        """Whether events came since the last update."""
        return self.heads_changed == self.update

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def events(self) -> list[EventRecord]:
        """The events recorded so far, inherited ones first."""
        return read_events(self.folder)

    @property
    def timed_from(self) -> int:
        """The first update whose time and memory count: past the newest event, compilation and cold caches.

        An ordinary arm leaves out as many, so that both are timed over the same updates.
        """
        begin = max(self.start, self.heads_changed or 0, self.config.freeze_update or 0)
        begin = begin if begin < self.config.updates else self.start
        return begin + 1 + untimed_updates(self.config.updates - begin)

    # --- updates

    def budget_share(self) -> float | None:
        """Return the share of the run's own budget that is used once the next update is done; None without one."""
        if (updates := self.config.update_budget) is not None:
            return (self.update - self.start + 1) / updates
        if (seconds := self.config.time_budget_seconds) is None:
            return None
        expected = self.elapsed.total + max(self.recent, default=0.0)
        return self.updater.parallel.first(expected / seconds)  # all ranks must stop at the same update

    def finished(self) -> bool:
        """Return whether the updates are done, or the next one would exceed the budget."""
        share = self.budget_share()
        return self.update >= self.config.updates if share is None else share > 1

    def next_learning_rate(self) -> float:
        """Return the learning rate of the next update; a budget stretches the rest of the schedule over itself.

        After an event it rises again from zero, over `rewarm_updates`.
        """
        config, share = self.config, self.budget_share()
        done = self.update + 1 if share is None else self.start
        progress = (done - config.lr_start) / (config.updates - config.lr_start)
        if share is not None:
            begin = max(progress, 0.0)
            progress = begin + (1 - begin) * min(share, 1.0)
        rate = learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=config.warmup_share)
        if self.heads_changed is None or config.rewarm_updates == 0:
            return rate
        return rate * min((self.update - self.heads_changed + 1) / config.rewarm_updates, 1.0)

    def run_update(self) -> dict[str, Any]:
        """Do one update and return its line for metrics.jsonl; raise DivergenceError as `Updater.update` does."""
        cuda = self.execution.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rate, compiling = self.next_learning_rate(), self.updater.compiling
        if compiling:
            self.say("compiling the model for the next update, which may take a minute or more ...")
        with self.elapsed("compile" if compiling else "train"):
            done = self.updater.update(rate)
        if not compiling:
            self.recent.append(done.seconds)
        if cuda and self.update >= self.timed_from:
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated())
        record = {"update": self.update, "tokens": self.tokens, "loss": done.loss, "lr": rate}
        record |= {"grad_norm": done.grad_norm, "update_seconds": done.seconds}
        if self.log:
            self.log.updated(record, left=self._seconds_left())
        return record

    def _seconds_left(self) -> float | None:
        config = self.config
        if config.time_budget_seconds is not None:
            return config.time_budget_seconds - self.elapsed.total
        end = config.updates if config.update_budget is None else self.start + config.update_budget
        return median(self.recent) * (end - self.update) if self.recent else None

    # --- logs and checkpoints

    def say(self, text: str) -> None:
        """Show a line about this moment of the run."""
        if self.log:
            self.log.say(f"update {self.update}: {text}")

    def controller_loss(self, when: str, *, batches: int | None = None) -> float:
        """Return the task's controller loss, nats per target, of so many batches if given, and log it as `when`."""
        with self.elapsed("evaluate"), self.updater.parallel.whole():
            loss = self.task.controller_loss(self.model, self.execution, batches=batches)
            if self.log:
                self.log.evaluated(self.update, loss, when)
        return loss

    def record_event(self, event: Event, heads: HeadSet, values: dict[str, Any], tensors: dict[str, Any]) -> int:
        """Add a line to events.jsonl for an event that took place, and return its number."""
        # Memory and times from before the heads changed say nothing about the updates to come.
        self.heads_changed, self.peak_memory = self.update, None
        self.recent.clear()
        line = {"update": self.update, "reason": event.reason, "heads": heads.to_list(), **values}
        return on_rank0(lambda: append_event(self.folder, event.kind, line, tensors).number)

    def save(self) -> None:
        """Save a checkpoint, unless it is there already, and remove the oldest ones; every rank calls this."""
        path = self.checkpoints / step_name(self.update, after_freezing=self.changed)
        # Rank 0 looks for all: on a disk that machines share, others may see later what it has written.
        if on_rank0(path.exists):
            return
        with self.elapsed("checkpoint"):
            state = {
                "update": self.update,
                "tokens": self.tokens,
                "elapsed": self.elapsed.state_dict(),
                "recent": list(self.recent),
                "model": self.model.config.to_dict(),
                "settings": self.config.to_dict(),
                "schedule": self.proposer.state_dict() if self.proposer else None,
                GRADIENT: self.updater.gradient.state_dict() if self.updater.gradient else None,
                "random": capture_random_state(),
                **self.task.state(self.update),
            }
            if self.log:
                self.log.flush()  # a checkpoint counts on the logs before it
            engine = self.updater.engine
            saved = save_checkpoint(path, engine.module, engine.optimizer, state=state, parent=self.parent_hash)
            on_rank0(lambda: self._log_checkpoint(path, saved))

    def _log_checkpoint(self, path: Path, saved: str) -> None:
        protect = {step_name(update) for update in self.config.branch_updates}
        prune_checkpoints_(self.checkpoints, keep=self.config.keep, protect=protect)
        line = {"checkpoint": path.name, "hash": saved, "elapsed": self.elapsed.state_dict()}
        append_line(self.folder / CHECKPOINT_LOG, line)

    def last_good(self) -> str:
        """Return a sentence that says from which checkpoint to go on after an error."""
        good = latest(self.checkpoints) or self.config.parent
        if good is None:
            return "There is no checkpoint yet: start again"
        return f"The last good checkpoint is {good}: continue from it"


# --- reports and result.json


def report_between(run: Run) -> None:
    """Report on the model where the settings ask for it before the end, unless it was done before a resumption."""
    path = _report_path(run, run.update)
    if run.update not in run.config.report_at or run.finished() or on_rank0(path.is_file):
        return
    with run.elapsed(None), run.updater.parallel.whole():
        checkpoints = {"parent": run.parent_hash}
        report = run.task.report(run.model, run.execution, folder=path.parent, checkpoints=checkpoints)
        on_rank0(lambda: write_json(path, report))


def _report_path(run: Run, update: int) -> Path:
    return run.folder / "reports" / f"update-{update}" / "report.json"


def finish(run: Run) -> dict[str, Any]:
    """Evaluate the reporting partition, write result.json and return it; every rank calls this.

    `train_loss` averages the last twentieth of the updates (at most 100). `time` has both totals, with and without
    loading and compilation, and the parts. `missing` names events, reports and seconds that differ from the settings.

    Raises:
        InputError: The run's time was over before the first update.
    """
    final, budget = on_rank0(lambda: latest(run.checkpoints)), run.config.time_budget_seconds
    if final is None or (budget is not None and run.update == run.start):
        raise InputError(
            f"time_budget_seconds={budget:g} must allow an update, and {run.elapsed.total:.1f} s passed before the "
            "first one; allow more time, in another folder"
        )
    with run.updater.parallel.whole():
        checkpoints: dict[str, str | None] = {"final": on_rank0(lambda: checkpoint_hash(final))}
        report = run.task.report(run.model, run.execution, folder=run.folder, checkpoints=checkpoints)
    return on_rank0(lambda: _write(run, final, report))


def _write(run: Run, final: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write result.json with the task's report of the checkpoint `final`, and return it."""
    config, metrics, events = run.config, read_lines(run.folder / "metrics.jsonl"), run.events
    if config.freeze is not None and not events:
        warnings.warn(_why_nothing_froze(run), SafWarning, stacklevel=4)
    branch = None if config.freeze_update is None else run.checkpoints / step_name(config.freeze_update)
    branched = checkpoint_hash(branch) if branch and (branch / MANIFEST).is_file() else None
    saved = {"parent": run.parent_hash, "branch": branched, "final": checkpoint_hash(final)}
    # One for both: the fingerprint of a task covers all its data, for training and measuring.
    data = {"train": run.task.fingerprint, "report": run.task.fingerprint}
    settings, device = config.to_dict(), run.execution.device_name
    header = result_header("run", settings, device=device, checkpoints=saved, data=data)
    frozen, pruned = (adapter_for(run.model).heads(kind).to_list() for kind in EDITED)
    names = {"patterns_hash": _patterns_hash(events), "heads": frozen, "pruned": pruned, "seed": config.seed}
    header["provenance"] |= names
    last = [line["loss"] for line in metrics[-max(1, min(100, config.updates // 20)) :]]
    paths = {update: _report_path(run, update) for update in config.report_at}
    reports = {update: read_json(path) if path.is_file() else None for update, path in paths.items()}
    reports |= {run.update: report} if run.update in paths else {}
    result = {
        **header,
        "arm": arm(frozen=frozen, pruned=pruned, events=events),
        "updates": run.update,
        "tokens": run.tokens,
        "trainable_pattern_parameters": sum(logits.numel() for logits in pattern_parameters(run.model)),
        "train_loss": fmean(last) if last else None,
        **report,
        "reports": {str(update): reports[update] for update in sorted(reports) if reports[update] is not None},
        "update_seconds": _update_seconds(metrics, run.timed_from),
        "peak_memory_bytes": run.peak_memory,
        "time": run.elapsed.record(),
        "missing": list(_missing(run, reports)),
        "intervention": _intervention(events) if events else None,
        "checkpoint": str(final),
    }
    write_json(run.folder / "result.json", result)
    return result


def _missing(run: Run, reports: dict[int, Any]) -> Iterator[str]:
    """Yield differences from the settings: time beyond the budget, events without effect, reports not made."""
    budget, used = run.config.time_budget_seconds or math.inf, run.elapsed.total
    if used > 1.001 * budget:  # updates of the same work differ by a thousandth
        yield f"time: the budget was {budget:.2f} s, and the run used {used:.2f} s"
    if run.changed and run.budget_share() is not None:
        yield f"events: no training followed the event after update {run.update}"
    # Schedules whose events come when the loss decides have none that must come.
    if run.proposer and not run.proposer.finished and run.config.freeze_update is not None:
        yield f"events: the run ended after update {run.update}, before all events of its schedule"
    yield from (f"reports: none after update {update}" for update, each in reports.items() if each is None)


def _why_nothing_froze(run: Run) -> str:
    if adapter_for(run.model).heads(*EDITED):
        return f"{run.folder} has lost {EVENTS}: heads are frozen or pruned, and how they were chosen is not known"
    if (first := run.config.freeze_update) is None:
        return f"no heads were frozen: until update {run.update} the schedule found no moment for an event"
    return (
        f"no heads were frozen: the run ended after update {run.update}, before its freezing point at update {first}; "
        "allow more time, or freeze earlier"
    )


def _update_seconds(metrics: list[dict[str, Any]], timed_from: int) -> dict[str, Any] | None:
    """Return median, 20th and 80th percentile of the seconds of updates from `timed_from` on, or of all."""
    timed = [line for line in metrics if line["update"] >= timed_from] or metrics
    if not timed:
        return None
    seconds = [line["update_seconds"] for line in timed]
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    spread = {"median": cuts[4], "p20": cuts[1], "p80": cuts[7]}
    return {**spread, "first_update": timed[0]["update"], "last_update": timed[-1]["update"]}


def _intervention(events: list[EventRecord]) -> dict[str, Any]:
    """Return the summary of a run's events, at least one: first update, heads in force, seconds by part, losses.

    `loss_rise` adds up the immediate rises of the controller loss at each event; None where no run measured them.
    """
    seconds: dict[str, float] = {}
    around = [(event.values.get("loss_before"), event.values.get("loss_after")) for event in events]
    rises = [after - before for before, after in around if before is not None and after is not None]
    for event in events:
        seconds |= {name: seconds.get(name, 0.0) + cost for name, cost in event.seconds.items()}
    return {
        "update": events[0].update,
        "events": len(events),
        "heads": heads_in_force(events),
        "seconds": seconds,
        "loss_before": around[0][0],
        "loss_after": around[-1][1],
        "loss_rise": math.fsum(rises) if len(rises) == len(events) else None,
    }


def _patterns_hash(events: list[EventRecord]) -> str | None:
    """Return the SHA-256 of the tensors of the freezes that were not undone: of one file, or of the files' hashes."""
    hashes = [file_hash(event.tensors_path) for event in events if event.undone_by is None and event.tensors_path]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if len(hashes) > 1 else next(iter(hashes), None)
