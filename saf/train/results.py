"""result.json: the final numbers of a run, from its files and its last model."""

import hashlib
import json
import warnings
from math import fsum
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from saf.adapters import adapter_for
from saf.errors import InputError, SafWarning
from saf.heads import EDITED
from saf.machine.processes import done_once
from saf.records.events import EVENTS, EventRecord, arm, heads_in_force
from saf.records.files import file_hash, read_json, read_lines, write_json
from saf.records.folders import MANIFEST
from saf.records.result import result_header
from saf.records.run import RECORDS
from saf.schedules import setting_of_moment
from saf.surgery import pattern_parameters
from saf.train.checkpoint import checkpoint_hash, latest, step_name
from saf.train.clock import AFTERWARDS, lost_seconds
from saf.train.config import TrainConfig
from saf.train.run import Run

REPORTS = "reports"
"""Folder in a run's own of what the model was judged by before the end: a folder an update, with the task's files."""
REPORT = "report.json"
"""What such a folder says, as result.json does at the end."""
TOLD = 1e-3
"""Share of a run's time that it may exceed by unsaid: updates of the same work differ by more."""
REFUSED = 1e-2
"""Share of a run's time beyond which it has no result: arms at matched time are told apart by a few percent."""


def report_between(run: Run) -> None:
    """Judge the model where the settings ask for it before the end, unless it was done before the run was resumed."""
    folder = run.folder / REPORTS / f"update-{run.update}"
    if run.update not in run.config.report_at or run.finished() or done_once((folder / REPORT).is_file):
        return
    with run.clock(AFTERWARDS), run.updater.parallel.whole():
        report = run.task.report(run.model, run.execution, folder=folder, checkpoints={"parent": run.parent_hash})
        done_once(lambda: write_json(folder / REPORT, report))


def finish(run: Run) -> dict[str, Any]:
    """Evaluate the reporting partition, write result.json and return it; every process of a group calls this.

    `train_loss` averages the last twentieth of the updates (at most 100). `time` has both clocks, each with what it
    includes, and the parts. `lacks` says in words what of the run is not known. A run whose budget was over before its
    freezing point is an ordinary one; a warning says so.

    Raises:
        InputError: The time was over before the first update, or the run used more of it than `REFUSED`; at matched
            time by its own clock, it was over before the freezing point, or right behind the first event.
    """
    folder = run.folder
    final = done_once(lambda: latest(run.checkpoints))
    _check_time(run, final)
    assert final is not None
    with run.updater.parallel.whole():
        checkpoints: dict[str, str | None] = {"final": done_once(lambda: checkpoint_hash(final))}
        report = run.task.report(run.model, run.execution, folder=folder, checkpoints=checkpoints)
    return done_once(lambda: _written(run, final, report))


def _written(run: Run, final: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write result.json with what the task reported of the checkpoint `final`, and return it."""
    folder = run.folder
    metrics = read_lines(folder / "metrics.jsonl")
    events, reports = run.events, _reports(run, report)
    intervention = intervention_record(events) if events else None
    if run.config.freeze is not None and intervention is None:
        warnings.warn(_why_nothing_froze(run), SafWarning, stacklevel=6)
    last = metrics[-max(1, min(100, run.config.updates // 20)) :]
    frozen, pruned = (_heads(run, kind) for kind in EDITED)
    head = result_header(
        "run",
        run.config.to_dict(),
        device=run.execution.device_name,
        checkpoints={
            "parent": run.parent_hash,
            "branch": _branch_hash(run),
            "final": checkpoint_hash(final),
        },
        data={"train": run.task.fingerprint, "report": run.task.fingerprint},
    )
    head["provenance"] |= {
        "config_hash": config_hash(read_json(folder / "config.json")),
        "patterns_hash": _patterns_hash(events),
        "heads": frozen,
        "pruned": pruned,
        "seed": run.config.seed,
        "files": {name: file_hash(folder / name) for name in RECORDS if (folder / name).is_file()},
    }
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
        "graphs": graphed_micro_batches(metrics, run.config.accumulation),
        "peak_memory_bytes": run.peak_memory,
        "time": run.clock.record(lost=lost_seconds(folder)),
        "lacks": [
            *_time_told(run, metrics),
            *_events_told(run),
            *(f"reports: none after update {each}" for each in run.config.report_at if str(each) not in reports),
            *missing_updates(metrics, run.start, run.update),
            *missing_evaluations(read_lines(folder / "evaluations.jsonl"), run.config, run.start, run.update),
        ],
        "intervention": intervention,
        "checkpoint": str(final),
    }
    write_json(folder / "result.json", result)
    return result


def _check_time(run: Run, final: Path | None) -> None:
    """Raise InputError for a run of a given time that is not what it was to be; every process of a group calls this.

    It did no update, had more time than it may, or ended at matched time before the event that makes it another arm.
    """
    budget, allowance = run.config.time_budget_seconds, run.allowance
    if allowance is None:
        return
    given = f"what {run.config.match_time} had left" if budget is None else f"time_budget_seconds={budget:g}"
    less = "or match by a measured speed (match_speed), whose updates are known before"
    advice = "allow more time" if budget is not None else f"start from an earlier checkpoint, {less}"
    # An event alone leaves a checkpoint, too.
    if final is None or run.update == run.start:
        raise InputError(
            f"{given} was over before the first update ({sum(run.clock.parts.values()):.1f} s went into setting the "
            f"run up and into freezing); {advice}, in another folder"
        )
    if allowance.seconds is None:
        return
    kept = f"There is no result; the run's last checkpoint, {final}, is kept"
    used = run.updater.parallel.first(allowance.spent(run.clock.parts))  # clocks differ, and all must agree
    if used > (1 + REFUSED) * allowance.seconds:
        took = sorted(allowance.weighted(run.clock.parts).items(), key=lambda part: -part[1])
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in took if seconds > 0)
        raise InputError(
            f"{given} allowed {allowance.seconds:.2f} s, and the run used {used:.2f} s: "
            f"{parts}. An update, an event or compiling took longer than was left. {kept}: {advice}, in another folder"
        )
    first = done_once(lambda: min((event.update or 0 for event in run.events), default=None))
    never = run.heads_changed is None and bool(_events_to_come(run))
    last = first == run.update and run.config.freeze_update is not None
    if budget is None and (never or last):
        what = _ended_before_freezing(run) if never else f"{_ended_with_event(run)}, its first one"
        raise InputError(
            f"{what}. Beside {run.config.match_time} it is no arm of its own. {kept}: freeze earlier "
            f"({_moment(run)} counts shares of updates={run.config.updates}, not of the time), {less}, in another "
            "folder"
        )


def _time_told(run: Run, metrics: list[dict[str, Any]]) -> list[str]:
    """Say by how much a run exceeded its time, or left it unused, where that is more than updates vary by.

    Less than one update is always left.
    """
    if run.allowance is None or run.allowance.seconds is None:
        return []
    seconds, left = run.allowance.seconds, run.allowance.seconds - run.allowance.spent(run.clock.parts)
    one = (update_seconds(metrics, run.timed_from) or {"median": 0.0})["median"]
    if -left > TOLD * seconds:
        return [
            f"time: {seconds:.2f} s were allowed, and {-left:.2f} s more were used: what its last update or event took "
            "was not foreseen"
        ]
    if left > REFUSED * seconds + one:
        return [
            f"time: {seconds:.2f} s were allowed, and {left:.2f} s of them were not used: losses, checkpoints or "
            "loading after the last update left no room for another, or a longer one was expected"
        ]
    return []


def _events_told(run: Run) -> list[str]:
    """Say which events of a run were without effect on its training.

    Some had not come when it ended, which is not said of those that come when the loss decides; or it had no time left
    behind the last one.
    """
    behind = [f"events: {_ended_with_event(run)}"] if run.allowance is not None and run.changed else []
    return behind + _events_to_come(run)


def _events_to_come(run: Run) -> list[str]:
    """Say that a run ended before all events of its schedule; not of one whose events come when the loss decides."""
    if run.proposer is None or run.proposer.finished or run.config.freeze_update is None:
        return []
    assert run.config.schedule is not None
    return [
        f"events: the run ended after update {run.update}, before all events of its {run.config.schedule.name} "
        "schedule had come, whose moments are counted in updates"
    ]


def _reports(run: Run, last: dict[str, Any]) -> dict[str, Any]:
    """Return the reports that the settings ask for, by update; `last` is that of the end."""
    found = {}
    for update in sorted(run.config.report_at):
        path = run.folder / REPORTS / f"update-{update}" / REPORT
        if update == run.update or path.is_file():
            found[str(update)] = last if update == run.update else read_json(path)
    return found


def warn_of_gaps(run: Run) -> None:
    """Warn of what a run lost of its record of the updates before the one that it goes on from."""
    lost = missing_updates(read_lines(run.folder / "metrics.jsonl"), run.start, run.update)
    for what in [*lost, *(words for event in run.events for words in event.lacks)]:
        warnings.warn(f"{run.folder} lost a part of its record: {what}", SafWarning, stacklevel=3)


def _why_nothing_froze(run: Run) -> str:
    """Say why a run that was to freeze heads had no event."""
    if any(_heads(run, kind) for kind in EDITED):
        return (
            f"{run.folder} has lost {EVENTS}: heads are frozen or pruned, but what was measured and chosen is not known"
        )
    if run.config.freeze_update is None:
        return (
            f"the run ended after update {run.update} without an event: its schedule found no moment for one, and no "
            "heads were frozen"
        )
    return f"{_ended_before_freezing(run)}. Allow more time, or freeze earlier ({_moment(run)})"


def _moment(run: Run) -> str:
    """Name the setting that says when the first event comes."""
    assert run.config.schedule is not None
    return setting_of_moment(run.config.schedule)


def _ended_before_freezing(run: Run) -> str:
    return (
        f"the run ended after update {run.update}, before its freezing point at update {run.config.freeze_update}: no "
        "heads were frozen"
    )


def _ended_with_event(run: Run) -> str:
    return f"the run ended after update {run.update}, and nothing trained on behind the event that came there"


def missing_updates(metrics: list[dict[str, Any]], start: int, end: int) -> list[str]:
    """Return in words which updates after `start`, up to `end`, have no line in metrics.jsonl; empty when all have.

    >>> missing_updates([{"update": 1}, {"update": 4}], 0, 5)
    ['metrics: metrics.jsonl has no line of updates 2 to 3, 5']
    """
    found, spans = {line["update"] for line in metrics}, []
    for update in range(start + 1, end + 1):
        if update in found:
            continue
        if spans and spans[-1][1] == update - 1:
            spans[-1][1] = update
        else:
            spans.append([update, update])
    words = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
    return [f"metrics: metrics.jsonl has no line of updates {words}"] if spans else []


def missing_evaluations(evaluations: list[dict[str, Any]], config: TrainConfig, start: int, end: int) -> list[str]:
    """Return in words which periodic evaluations after `start`, up to `end`, have no line; empty when all have."""
    found = {line["update"] for line in evaluations if line["when"] == "periodic"}
    due = range(start + 1, end + 1) if config.eval_every else ()
    lost = [str(update) for update in due if update % config.eval_every == 0 and update not in found]
    return [f"evaluations: evaluations.jsonl has no line of updates {', '.join(lost)}"] if lost else []


def update_seconds(metrics: list[dict[str, Any]], timed_from: int) -> dict[str, Any] | None:
    """Return median, 20th and 80th percentile of the seconds of updates from `timed_from` on, and which they are."""
    timed = [line for line in metrics if line["update"] >= timed_from] or metrics
    if not timed:
        return None
    seconds = [line["update_seconds"] for line in timed]
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    return {
        "median": cuts[4],
        "p20": cuts[1],
        "p80": cuts[7],
        "first_update": timed[0]["update"],
        "last_update": timed[-1]["update"],
    }


def graphed_micro_batches(metrics: list[dict[str, Any]], accumulation: int) -> dict[str, int] | None:
    """Return how many micro-batches of updates with CUDA graphs there were, and how many ran without one.

    None for a run that replayed nothing.

    >>> graphed_micro_batches([{"update": 1}, {"update": 2, "uncaptured": 0}, {"update": 3, "uncaptured": 3}], 4)
    {'micro_batches': 8, 'uncaptured': 3}
    """
    found = [line["uncaptured"] for line in metrics if "uncaptured" in line]
    return {"micro_batches": len(found) * accumulation, "uncaptured": sum(found)} if found else None


def intervention_record(events: list[EventRecord]) -> dict[str, Any]:
    """Return what a run's events did together, at least one of them.

    That is after which update the first one came, how many there were, which heads they left frozen or pruned, what
    their parts cost in seconds, the controller losses before the first and after the last one, and by how much each
    raised it at once, added up (None where no run measured them).
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
        "loss_rise": fsum(rises) if len(rises) == len(events) else None,
    }


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 of what decides a run's outcome: model, training, freezing, data and parent."""
    kept = {name: config[name] for name in ("model", "train", "freeze")}
    kept["data"] = config["data"]["fingerprint"]
    kept["parent"] = config["parent"]["hash"] if config["parent"] else None
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _patterns_hash(events: list[EventRecord]) -> str | None:
    """Return the SHA-256 of the tensors of the freezes that were kept: of the file of one, of the hashes of several."""
    hashes = [event.tensors_hash() for event in events if event.undone_by is None]
    found = [each for each in hashes if each is not None]
    return hashlib.sha256("".join(found).encode()).hexdigest() if len(found) > 1 else next(iter(found), None)


def _branch_hash(run: Run) -> str | None:
    """Return the hash of the checkpoint at the freezing point: it stays known when the folder is thinned out."""
    update = run.config.freeze_update
    path = None if update is None else run.checkpoints / step_name(update)
    return checkpoint_hash(path) if path is not None and (path / MANIFEST).is_file() else None


def _heads(run: Run, kind: str) -> list[list[int]]:
    """Return the model's frozen or pruned heads."""
    return adapter_for(run.model).heads(kind).to_list()
