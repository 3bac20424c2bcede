"""result.json: the final numbers of a run, from its files and its last model."""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from saf.checkpoint import checkpoint_hash, latest, step_name
from saf.distributed import on_rank0
from saf.errors import InputError, SafWarning
from saf.heads import EDITED
from saf.models.adapter import adapter_for
from saf.records.events import EVENTS, EventRecord, arm, heads_in_force
from saf.records.files import file_hash, read_json, read_lines, write_json
from saf.records.folders import MANIFEST
from saf.records.result import result_header
from saf.records.run import RECORDS
from saf.surgery import pattern_parameters
from saf.train.run import Run

REPORTS, REPORT = "reports", "report.json"
"""Folder in a run's own with a folder for each update after which the model was judged, and its file of numbers."""


def report_between(run: Run) -> None:
    """Judge the model where the settings ask for it before the end, unless it was done before the run was resumed."""
    folder = run.folder / REPORTS / f"update-{run.update}"
    if run.update not in run.config.report_at or run.finished() or on_rank0((folder / REPORT).is_file):
        return
    with run.elapsed(None), run.updater.parallel.whole():
        report = run.task.report(run.model, run.execution, folder=folder, checkpoints={"parent": run.parent_hash})
        on_rank0(lambda: write_json(folder / REPORT, report))


def finish(run: Run) -> dict[str, Any]:
    """Evaluate the reporting partition, write result.json and return it; every rank calls this.

    `train_loss` averages the last twentieth of the updates (at most 100). `time` has both totals, with and without
    loading and compilation, and the parts. `lacks` says in words what of the run is not known.

    Raises:
        InputError: The run's time was over before the first update.
    """
    final = on_rank0(lambda: latest(run.checkpoints))
    if final is None or (run.config.time_budget_seconds is not None and run.update == run.start):
        raise InputError(
            f"time_budget_seconds={run.config.time_budget_seconds:g} must allow an update, and {run.elapsed.total:.1f} "
            "s passed before the first one; allow more time, in another folder"
        )
    with run.updater.parallel.whole():
        checkpoints: dict[str, str | None] = {"final": on_rank0(lambda: checkpoint_hash(final))}
        report = run.task.report(run.model, run.execution, folder=run.folder, checkpoints=checkpoints)
    return on_rank0(lambda: _write(run, final, report))


def _write(run: Run, final: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write result.json with the task's report of the checkpoint `final`, and return it."""
    folder, config = run.folder, run.config
    metrics, events = read_lines(folder / "metrics.jsonl"), run.events
    if config.freeze is not None and not events:
        warnings.warn(_why_nothing_froze(run), SafWarning, stacklevel=4)
    last = metrics[-max(1, min(100, config.updates // 20)) :]
    heads = adapter_for(run.model).heads
    frozen, pruned = (heads(kind).to_list() for kind in EDITED)
    reports = _reports(run, report)
    branch = None if config.freeze_update is None else run.checkpoints / step_name(config.freeze_update)
    head = result_header(
        "run",
        config.to_dict(),
        device=run.execution.device_name,
        checkpoints={
            "parent": run.parent_hash,
            "branch": checkpoint_hash(branch) if branch and (branch / MANIFEST).is_file() else None,
            "final": checkpoint_hash(final),
        },
        data={"train": run.task.fingerprint, "report": run.task.fingerprint},
    )
    head["provenance"] |= {
        "config_hash": config_hash(read_json(folder / "config.json")),
        "patterns_hash": _patterns_hash(events),
        "heads": frozen,
        "pruned": pruned,
        "seed": config.seed,
        "files": {name: file_hash(folder / name) for name in RECORDS if (folder / name).is_file()},
    }
    own, every = range(run.start + 1, run.update + 1), config.eval_every
    periodic = [line for line in read_lines(folder / "evaluations.jsonl") if line["when"] == "periodic"]
    result = {
        **head,
        "arm": arm(frozen=frozen, pruned=pruned, events=events),
        "updates": run.update,
        "tokens": run.tokens,
        "trainable_pattern_parameters": sum(logits.numel() for logits in pattern_parameters(run.model)),
        "train_loss": fmean(line["loss"] for line in last) if last else None,
        **report,
        "reports": reports,
        "update_seconds": update_seconds(metrics, run.timed_from),
        "peak_memory_bytes": run.peak_memory,
        "time": run.elapsed.record(),
        "lacks": [
            *_time_exceeded(run),
            *_events_without_effect(run),
            *(f"reports: none after update {each}" for each in config.report_at if str(each) not in reports),
            *missing_lines(metrics, own, "metrics.jsonl"),
            *missing_lines(periodic, [each for each in own if every and each % every == 0], "evaluations.jsonl"),
        ],
        "intervention": intervention_record(events) if events else None,
        "checkpoint": str(final),
    }
    write_json(folder / "result.json", result)
    return result


def _reports(run: Run, last: dict[str, Any]) -> dict[str, Any]:
    """Return the reports that the settings ask for, by update; `last` is that of the end."""
    paths = {update: run.folder / REPORTS / f"update-{update}" / REPORT for update in sorted(run.config.report_at)}
    found = {update: read_json(path) for update, path in paths.items() if path.is_file()}
    ending = {run.update: last} if run.update in paths else {}
    return {str(update): report for update, report in sorted({**found, **ending}.items())}


def _why_nothing_froze(run: Run) -> str:
    """Say why a run that was to freeze heads had no event."""
    if adapter_for(run.model).heads(*EDITED):
        return f"{run.folder} has lost {EVENTS}: heads are frozen or pruned, and how they were chosen is not known"
    if run.config.freeze_update is None:
        return f"no heads were frozen: until update {run.update} the schedule found no moment for an event"
    return (
        f"no heads were frozen: the run ended after update {run.update}, before its freezing point at update "
        f"{run.config.freeze_update}; allow more time, or freeze earlier"
    )


def _time_exceeded(run: Run) -> list[str]:
    """Say that a run used more than the seconds of its budget: updates of the same work differ by a thousandth."""
    budget, used = run.config.time_budget_seconds or math.inf, run.elapsed.total
    return [f"time: the budget was {budget:.2f} s, and the run used {used:.2f} s"] if used > 1.001 * budget else []


def _events_without_effect(run: Run) -> list[str]:
    """Say which events had no effect on training: one behind which nothing trained, and those that did not come.

    Schedules whose events come when the loss decides have none that must.
    """
    lines = []
    if run.changed and run.budget_share() is not None:
        lines.append(f"events: nothing trained on behind the event after update {run.update}, the last one")
    if run.proposer and not run.proposer.finished and run.config.freeze_update is not None:
        lines.append(f"events: the run ended after update {run.update}, before all events of its schedule")
    return lines


def warn_of_gaps(run: Run) -> None:
    """Warn of what a run lost of its record of the updates before the one that it goes on from."""
    lost = missing_lines(
        read_lines(run.folder / "metrics.jsonl"), range(run.start + 1, run.update + 1), "metrics.jsonl"
    )
    for what in [*lost, *(words for event in run.events for words in event.lacks)]:
        warnings.warn(f"{run.folder} lost a part of its record: {what}", SafWarning, stacklevel=3)


def missing_lines(lines: list[dict[str, Any]], due: Iterable[int], file: str) -> list[str]:
    """Say which of the updates that are due have no line in a log; empty when all have.

    >>> missing_lines([{"update": 1}, {"update": 4}], range(1, 6), "metrics.jsonl")
    ['metrics.jsonl: no line of 3 updates, the first one 2']
    """
    missing = sorted({*due} - {line["update"] for line in lines})
    return [f"{file}: no line of {len(missing)} updates, the first one {missing[0]}"] if missing else []


def update_seconds(metrics: list[dict[str, Any]], timed_from: int) -> dict[str, Any] | None:
    """Return median, 20th and 80th percentile of the seconds of updates from `timed_from` on, and which they are."""
    timed = [line for line in metrics if line["update"] >= timed_from] or metrics
    if not timed:
        return None
    seconds = [line["update_seconds"] for line in timed]
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    spread = {"median": cuts[4], "p20": cuts[1], "p80": cuts[7]}
    return {**spread, "first_update": timed[0]["update"], "last_update": timed[-1]["update"]}


def intervention_record(events: list[EventRecord]) -> dict[str, Any]:
    """Return the summary of a run's events, at least one: first update, heads in force, seconds by part, losses.

    `loss_rise` adds up by how much each event raised the controller loss at once; None where no run measured them.
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


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 of what decides a run's outcome: model, training, freezing, data and parent."""
    decisive = {name: config[name] for name in ("model", "train", "freeze")}
    decisive["data"] = config["data"]["fingerprint"]
    decisive["parent"] = config["parent"]["hash"] if config["parent"] else None
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _patterns_hash(events: list[EventRecord]) -> str | None:
    """Return the SHA-256 of the tensors of the freezes that were not undone: of one file, or of the files' hashes."""
    hashes = [event.tensors_hash() for event in events if event.undone_by is None]
    found = [each for each in hashes if each is not None]
    return hashlib.sha256("".join(found).encode()).hexdigest() if len(found) > 1 else next(iter(found), None)
