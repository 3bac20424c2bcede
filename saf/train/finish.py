"""A run's reports, and `finish`: the last one, and result.json."""

import hashlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from saf.checkpoint import checkpoint_hash, latest, step_name
from saf.distributed import on_rank0
from saf.errors import InputError, SafWarning
from saf.heads import EDITED
from saf.machine import device_name
from saf.models.adapter import adapter_for
from saf.records.files import file_hash, read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import MANIFEST, EventRecord, arm, heads_in_force
from saf.surgery import pattern_parameters
from saf.train.run import Run


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
    branch = None if config.freeze_update is None else run.checkpoints / step_name(config.freeze_update)
    branched = checkpoint_hash(branch) if branch and (branch / MANIFEST).is_file() else None
    saved = {"parent": run.parent_hash, "branch": branched, "final": checkpoint_hash(final)}
    # One for both: the fingerprint of a task covers all its data, for training and measuring.
    data = {"train": run.task.fingerprint, "report": run.task.fingerprint}
    settings, device = config.to_dict(), device_name(run.execution.device)
    header = result_header("run", settings, device=device, checkpoints=saved, data=data)
    frozen, pruned = (adapter_for(run.model).heads(kind).to_list() for kind in EDITED)
    names = {"patterns_hash": _patterns_hash(events), "heads": frozen, "pruned": pruned, "seed": config.seed}
    header["provenance"] |= names
    last = [line["loss"] for line in metrics[-max(1, min(100, config.updates // 20)) :]]
    paths = {update: _report_path(run, update) for update in config.report_at}
    reports = {update: read_json(path) if path.is_file() else None for update, path in paths.items()}
    reports |= {run.update: report} if run.update in paths else {}
    missing = list(_missing(run, events, reports))
    for difference in missing:
        warnings.warn(difference, SafWarning, stacklevel=4)
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
        "missing": missing,
        "intervention": _intervention(events) if events else None,
        "checkpoint": str(final),
    }
    write_json(run.folder / "result.json", result)
    return result


def _missing(run: Run, events: list[EventRecord], reports: dict[int, Any]) -> Iterator[str]:
    """Yield differences from the settings: time beyond the budget, events without effect, reports not made."""
    budget, used = run.config.time_budget_seconds or math.inf, run.elapsed.total
    if used > 1.001 * budget:  # updates of the same work differ by a thousandth
        yield f"time: the budget was {budget:.2f} s, and the run used {used:.2f} s"
    if run.changed and run.budget_share() is not None:
        yield f"events: no training followed the event after update {run.update}"
    if run.config.freeze is not None and not events:
        yield f"events: none is recorded until update {run.update}, and the settings freeze heads"
    # Schedules whose events come when the loss decides have none that must come.
    if run.proposer and not run.proposer.finished and run.config.freeze_update is not None:
        yield f"events: the run ended after update {run.update}, before all events of its schedule"
    yield from (f"reports: none after update {update}" for update, each in reports.items() if each is None)


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
