"""`Run` holds the state of a training run: its folder, its time, its logs and checkpoints, and its result.json.

loop.py calls all of this; read it first.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from saf.checkpoint import capture_random_state, checkpoint_hash, remove_old_checkpoints_, save_checkpoint, step_name
from saf.distributed import on_rank0
from saf.errors import SafWarning
from saf.heads import EDITED
from saf.machine import Execution, device_name, rated_flops, untimed_updates
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.records.files import append_line, fsync, read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import MANIFEST, EventRecord, append_event, arm_of, heads_edited_by, read_events
from saf.records.table import plain
from saf.records.table import seconds as in_words
from saf.schedules import Proposer
from saf.surgery import pattern_parameters
from saf.tasks import Task
from saf.train.config import TrainConfig
from saf.train.events import Change
from saf.train.step import Updater, UpdateResult

GRADIENT = "qk_gradient"
"""Name of the Q/K-gradient average in a checkpoint's state.json."""


@dataclass(kw_only=True)
class Run:
    """One training run; of several ranks only rank 0 writes."""

    config: TrainConfig
    folder: Path
    task: Task
    updater: Updater
    proposer: Proposer | None
    """Decides when events come; None for a run that changes no heads."""
    elapsed: "Elapsed"
    start: int
    """Update of the parent's checkpoint; 0 without a parent."""
    parent_hash: str | None
    log: "RunLog | None" = None
    """None on a rank that writes nothing."""
    last_change: int | None = None
    """The update after which an event of this run last changed heads; None before any."""
    peak_memory: int | None = None
    """Largest number of bytes allocated on CUDA in the timed updates; None elsewhere."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Seconds of the newest updates since heads changed. A time budget expects the next one to take as long as the
    longest of them: every second update would exceed an average."""

    @property
    def model(self) -> GPT:
        return self.updater.model  # type: ignore[return-value]

    @property
    def execution(self) -> Execution:
        return self.updater.execution

    @property
    def update(self) -> int:
        return self.updater.done

    @property
    def tokens(self) -> int:
        return self.update * self.task.targets_per_update

    @property
    def just_changed(self) -> bool:
        """Whether heads changed after the last update."""
        return self.last_change == self.update

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def events(self) -> list[EventRecord]:
        """The events recorded so far, inherited ones first."""
        return read_events(self.folder)

    # --- updates

    def budget_share(self) -> float | None:
        """Return the share of the run's own budget that is used after the next update; None without a budget."""
        if (updates := self.config.update_budget) is not None:
            return (self.update - self.start + 1) / updates
        if (seconds := self.config.time_budget_seconds) is None:
            return None
        expected = self.elapsed.total + max(self.recent, default=0.0)
        return on_rank0(lambda: expected / seconds)  # all ranks must stop at the same update

    def finished(self) -> bool:
        """Return whether the updates are done, or the next one would exceed the budget."""
        share = self.budget_share()
        return self.update >= self.config.updates if share is None else share > 1

    @property
    def timed_from(self) -> int:
        """The first update whose time and memory count: past the newest event, compilation and cold caches.

        An ordinary arm that others branch from leaves out as many, so that all are timed over the same updates.
        """
        begin = max(self.start, self.last_change or 0, self.config.freeze_update or 0)
        if begin >= self.config.updates:
            begin = self.start  # no update follows the event: those before it are timed
        return begin + 1 + untimed_updates(self.config.updates - begin)

    @property
    def last_update(self) -> int:
        """The update at which the run ends, unless its time is over before."""
        budget = self.config.update_budget
        return self.config.updates if budget is None else self.start + budget

    # --- logs and checkpoints

    def say(self, text: str) -> None:
        if self.log:
            self.log.say(text)

    def controller_loss(self, when: str, *, batches: int | None = None) -> float:
        count = self.config.eval_windows if batches is None else batches * self.config.batch_size
        with self.elapsed("evaluate"), self.updater.parallel.whole():
            loss = self.task.controller_loss(self.model, self.execution, count)
            if self.log:
                self.log.evaluated(loss, when)
        return loss

    def save(self) -> None:
        """Save a checkpoint, unless it is there already, and remove the oldest ones; every rank calls this."""
        path = self.checkpoints / step_name(self.update, after_freezing=self.just_changed)
        # Rank 0 looks for all: on a disk that machines share, others may see later what it has written.
        if on_rank0(path.exists):
            return
        with self.elapsed("checkpoint"):
            # All that makes a resumed run the same, bit for bit, besides weights and moments.
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
                self.log.flush()  # resuming from a checkpoint needs the lines before it
            engine = self.updater.engine
            content_hash = save_checkpoint(path, engine.module, engine.optimizer, state=state, parent=self.parent_hash)
            on_rank0(lambda: self._log_checkpoint(path, content_hash))

    def _log_checkpoint(self, path: Path, content_hash: str) -> None:
        """Remove old checkpoints; clock.jsonl keeps name, hash and elapsed seconds of every checkpoint."""
        protect = {step_name(update) for update in self.config.branch_updates}
        remove_old_checkpoints_(self.checkpoints, keep=self.config.keep, protect=protect)
        line = {"checkpoint": path.name, "hash": content_hash, "elapsed": self.elapsed.state_dict()}
        append_line(self.folder / "clock.jsonl", line)

    def report_path(self, update: int) -> Path:
        return self.folder / "reports" / f"update-{update}" / "report.json"

    # --- events, as `Training` in events.py describes them

    @contextmanager
    def editing(self) -> Iterator[None]:
        with self.elapsed("freeze"), self.updater.parallel.whole(moments=True):
            yield
            self.updater.compile_()  # still inside `whole`: the new engine takes the gathered weights over

    def record_event(self, kind: str, line: dict[str, Any], change: Change) -> int:
        with self.elapsed("freeze"):
            # Memory and times from before the heads changed say nothing about the updates to come.
            self.last_change, self.peak_memory = self.update, None
            self.recent.clear()
            values, tensors = (change.report.to_dict(), change.report.tensors()) if change.report else ({}, {})
            number = on_rank0(lambda: append_event(self.folder, kind, line | values, tensors).number)
        self.say(f"{change.summary}; took {sum(change.seconds.values()):.1f} s")
        return number


# --- time

PARTS: tuple[str, ...] = (
    "load",  # opening data, building or restoring the model, reading logs
    "train",  # updates, and the time between them
    "compile",  # updates that compile
    "freeze",  # events: calibration, scores, selection, fits, installation, and recording them
    "evaluate",  # losses on the controller's windows, those around events and after the last update included
    "checkpoint",  # writing checkpoints, but for the last one
)
"""The parts of a run's elapsed time. Reports and the last checkpoint are in none."""


class Elapsed:
    """Count the seconds of a run by part; a resumed run goes on counting. Those of its parents are in `parent`."""

    def __init__(self):
        self._part: str | None = "load"
        self._since = time.perf_counter()
        self._own = dict.fromkeys(PARTS, 0.0)
        self.parent: dict[str, float] | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of this run until now, without its parents'."""
        self.enter(self._part)
        return dict(self._own)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def enter(self, part: str | None) -> None:
        """Count the seconds from now on under `part`; under None they do not count."""
        now = time.perf_counter()
        if self._part is not None:
            self._own[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def __call__(self, part: str | None) -> Iterator[None]:
        """Count a block under `part`, unless nothing counts at the moment; then go on with the part before."""
        outer = self._part
        self.enter(None if outer is None else part)
        try:
            yield
        finally:
            self.enter(outer)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "parent": self.parent}

    def load_state_dict(self, state: Mapping[str, Any], *, branch: bool) -> None:
        """Take over the seconds in a checkpoint: as this run's own, or those of the parents of a branch."""
        if branch:
            self.parent = _sum(state["parts"], state["parent"] or {})
        else:
            self._own, self.parent = _sum(self._own, state["parts"]), state["parent"]

    def record(self) -> dict[str, Any]:
        """Return the entries of result.json: both totals, with the parents' seconds, and the parts."""
        parts = self.parts
        both = _sum(parts, self.parent or {})
        everything = sum(both.values())
        # Loading and compiling take the same seconds in a run of minutes and of days.
        warm = everything - both["load"] - both["compile"]
        return {
            "everything": {"seconds": everything},
            "warm": {"seconds": warm},
            "parts": parts,
            "parent_parts": self.parent,
        }


def _sum(*records: Mapping[str, float]) -> dict[str, float]:
    return {part: sum(each.get(part, 0.0) for each in records) for part in PARTS}


# --- logs


class RunLog:
    """Write metrics.jsonl, evaluations.jsonl and TensorBoard events, and show progress on standard error.

    Progress is a bar on a terminal, and elsewhere a line every `config.log_every` updates.
    """

    def __init__(self, run: Run):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        config, execution = run.config, run.execution
        self._run, self._tokens = run, run.task.targets_per_update
        self._metrics, self._evaluations = run.folder / "metrics.jsonl", run.folder / "evaluations.jsonl"
        # Seconds of an update in which all ranks' devices reach their rated FLOP/s.
        rated = rated_flops(device_name(execution.device), execution.precision)
        flops = self._tokens * run.model.config.flops_per_token(run.task.length)
        self._rated_seconds = flops / (rated * run.updater.parallel.processes) if rated else None
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=config.quiet)
        self._bar = self._tensorboard = None
        if self._console.is_terminal and not config.quiet:
            counts = TextColumn("{task.completed:.0f}/{task.total:.0f}")
            self._bar = Bar(counts, BarColumn(), TextColumn("{task.fields[text]}"), console=self._console)
            self._task = self._bar.add_task("training", total=run.last_update, completed=run.update, text="")
            self._bar.start()
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes 0.15 s to import

            # TensorBoard drops what a killed run logged after its checkpoint: this run repeats those updates.
            self._tensorboard = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.update + 1)

    def updated(self, result: UpdateResult, learning_rate: float) -> None:
        update, last, seconds = self._run.update, self._run.last_update, result.seconds
        line = {
            "update": update,
            "tokens": self._run.tokens,
            "loss": result.loss,
            "lr": learning_rate,
            "grad_norm": result.grad_norm,
            "update_seconds": seconds,
        }
        append_line(self._metrics, line, wait=False)
        values = {f"train/{name}": line[name] for name in ("loss", "lr", "grad_norm")}
        values["speed/tokens_per_second"] = speed = self._tokens / seconds
        words = [f"loss {result.loss:.4f}", f"lr {learning_rate:.2e}", f"{speed:,.0f} tokens/s"]
        if self._rated_seconds:
            values["speed/model_flop_utilisation"] = utilisation = self._rated_seconds / seconds
            words.append(f"MFU {utilisation:.1%}")
        recent, budget = self._run.recent, self._run.config.time_budget_seconds
        if budget is not None:
            words.append(f"{in_words(budget - self._run.elapsed.total)} left")
        elif recent:
            words.append(f"{in_words(median(recent) * (last - update))} left")
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, update)
        if self._bar:
            self._bar.update(self._task, completed=update, text="  ".join(words))
        elif update % self._run.config.log_every == 0 or update == last:
            self._console.print(f"update {update}/{last}  " + "  ".join(words))

    def evaluated(self, loss: float, when: str) -> None:
        update = self._run.update
        line = {"update": update, "partition": "controller", "loss": loss, "when": when}
        append_line(self._evaluations, line, wait=False)
        if self._tensorboard and when == "periodic":
            self._tensorboard.add_scalar("controller/loss", loss, update)
        self.say(f"controller loss {loss:.4f} ({when.replace('_', ' ')})")

    def say(self, text: str) -> None:
        self._console.print(plain(f"update {self._run.update}: {text}"))

    def flush(self) -> None:
        for path in filter(Path.exists, (self._metrics, self._evaluations)):
            fsync(path)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
        if self._bar:
            self._bar.stop()


# --- result.json


def write_result(run: Run, final: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write result.json with the task's report of the checkpoint `final`, and return it.

    `train_loss` averages the last twentieth of the updates (at most 100). `missing` has a sentence for each setting
    that the run did not keep, such as a time budget that it exceeded; it is empty for a run that did all.
    """
    config, metrics, events = run.config, read_lines(run.folder / "metrics.jsonl"), run.events
    # The checkpoint that a comparison looks for: that from which a frozen arm and its ordinary arm went on.
    branch = None if config.freeze_update is None else run.checkpoints / step_name(config.freeze_update)
    branch_hash = checkpoint_hash(branch) if branch and (branch / MANIFEST).is_file() else None
    checkpoints = {"parent": run.parent_hash, "branch": branch_hash, "final": checkpoint_hash(final)}
    # One for both: the fingerprint of a task covers all its data, for training and measuring.
    data = {"train": run.task.fingerprint, "report": run.task.fingerprint}
    settings, device = config.to_dict(), device_name(run.execution.device)
    header = result_header("run", settings, device=device, checkpoints=checkpoints, data=data)
    frozen, pruned = (adapter_for(run.model).heads(kind).to_list() for kind in EDITED)
    header["provenance"] |= {"heads": frozen, "pruned": pruned, "seed": config.seed}
    last = [line["loss"] for line in metrics[-max(1, min(100, config.updates // 20)) :]]
    paths = {update: run.report_path(update) for update in sorted(config.report_at)}
    reports = {str(update): read_json(path) for update, path in paths.items() if path.is_file()}
    reports |= {str(run.update): report} if run.update in paths else {}
    missing = list(_missing(run, events, reports))
    for difference in missing:
        warnings.warn(difference, SafWarning, stacklevel=4)
    result = {
        **header,
        "arm": arm_of(frozen=frozen, pruned=pruned, events=events),
        "updates": run.update,
        "tokens": run.tokens,
        "trainable_pattern_parameters": sum(logits.numel() for logits in pattern_parameters(run.model)),
        "train_loss": fmean(last) if last else None,
        **report,
        "reports": reports,
        "update_seconds": _update_seconds(metrics, run.timed_from),
        "peak_memory_bytes": run.peak_memory,
        "time": run.elapsed.record(),
        "missing": missing,
        "intervention": _intervention(events) if events else None,
        "checkpoint": str(final),
    }
    write_json(run.folder / "result.json", result)
    return result


def _missing(run: Run, events: list[EventRecord], reports: Mapping[str, Any]) -> Iterator[str]:
    budget, used = run.config.time_budget_seconds or math.inf, run.elapsed.total
    if used > 1.001 * budget:  # updates of the same work differ by a thousandth
        yield f"time: the budget was {budget:.2f} s, and the run used {used:.2f} s"
    if run.just_changed and run.budget_share() is not None:
        yield f"events: no training followed the event after update {run.update}"
    if run.config.freeze is not None and not events:
        yield f"events: none is recorded until update {run.update}, and the settings freeze heads"
    # Where the loss decides when events come, there is no `freeze_update`, and no event is due.
    if run.proposer and not run.proposer.finished and run.config.freeze_update is not None:
        yield f"events: the run ended after update {run.update}, before all events of its schedule"
    yield from (f"reports: none after update {update}" for update in run.config.report_at if str(update) not in reports)


def _update_seconds(metrics: list[dict[str, Any]], timed_from: int) -> dict[str, Any] | None:
    """Return the median seconds of updates from `timed_from` on, or of all."""
    timed = [line for line in metrics if line["update"] >= timed_from] or metrics
    if not timed:
        return None
    seconds = median(line["update_seconds"] for line in timed)
    return {"median": seconds, "first_update": timed[0]["update"], "last_update": timed[-1]["update"]}


def _intervention(events: list[EventRecord]) -> dict[str, Any]:
    """Return the summary of a run's events, at least one: first update, edited heads, seconds by part, losses.

    `loss_rise` adds up the immediate rises of the controller loss at each event; None unless every event has one.
    """
    seconds: dict[str, float] = {}
    for event in events:
        for part, cost in event.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + cost
    around = [(event.values.get("loss_before"), event.values.get("loss_after")) for event in events]
    rises = [after - before for before, after in around if before is not None and after is not None]
    return {
        "update": events[0].update,
        "events": len(events),
        "heads": heads_edited_by(events),
        "seconds": seconds,
        "loss_before": around[0][0],
        "loss_after": around[-1][1],
        "loss_rise": math.fsum(rises) if len(rises) == len(events) else None,
    }
