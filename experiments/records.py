"""Records of runs: what the runner adds to result.json, and the numbers of all records as one table.

`complete_record` writes a record when its run ends, `read_records` reads those of a scale, and `numbers` returns every
number of theirs: scale, arm, seed, metric, value. All tables and figures of runs begin there.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch

from saf.checkpoint import latest, open_checkpoint
from saf.machine import pick_device
from saf.models.adapter import adapter_for, find_rows
from saf.records.files import write_json
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.tasks.base import answers_of_run
from saf.tasks.text import read_evaluation

Record = Mapping[str, Any]
CHECKS = {"heads": True, "executed": True, "query_key_rows": 0, "query_key_gradients": 0}
"""The right outcome of `check_heads`; earlier records lack the last."""
RECALL = ((512, 8), (512, 16), (512, 24), (512, 32), (512, 48), (512, 64), (2_048, 8), (4_096, 8))
"""Tokens and pairs of the paper's tests of associative recall."""
SMOKE_RECALL = ((32, 2), (32, 4))


def recall_metric(length: int, pairs: int) -> str:
    """Return the name of the metric of one test of recall."""
    return f"recall {length} {pairs}"


RECALL_METRICS = tuple(recall_metric(*test) for test in (*RECALL, *SMOKE_RECALL))

# --- the end of a run


def complete_record(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Add to a run's result.json what tables compare: losses of windows or answers, fits, checks of heads.

    `experiment` has its scale, arm, seed and settings.
    """
    run = RecordedRun.open(folder)
    result = run.finished_result()
    extra: dict[str, Any] = {"num_heads": run.num_heads}
    if fits := _fits(run):
        extra["fits"] = fits
    if run.edited_heads:
        extra["checks"] = check_heads(run)
    if "questions" in result:
        ((_, answers),) = answers_of_run(run).values()
        questions = json.dumps([(each["id"], each["answer"]) for each in answers])
        extra["questions_hash"] = hashlib.sha256(questions.encode()).hexdigest()
        extra["right"] = [int(each["right"]) for each in answers]
        extra["trained_on"] = run.config["data"].get("test_examples_trained_on", 0)
    elif "recall" not in result:  # which has accuracies alone
        evaluation, losses = read_evaluation(folder)
        extra |= {name: evaluation[name] for name in ("windows_hash", "by_position")}
        extra["window_losses"] = losses.tolist()
    if "examples" in (data := run.config["data"]):
        examples = result["updates"] * math.prod(run.config["train"][name] for name in ("batch_size", "accumulation"))
        extra["epochs"] = round(examples / data["examples"]["train"])
        extra["example_tokens"] = result["tokens"] / examples
    # As the paper times its pattern controls (tab:pattern-controls).
    if last := [line["update_seconds"] for line in run.metrics[-100:] if line.get("update_seconds")]:
        extra["last_updates_seconds"] = sum(last) / len(last)
    write_json(folder / "result.json", {**result, **extra, "experiment": experiment})


def check_heads(run: RecordedRun) -> dict[str, Any]:
    """Check the final model as the paper checks each replacement: mask, dispatch, gradients of queries and keys.

    `heads`: the model has the recorded frozen and pruned heads alone. `executed`: each layer executes its frozen heads.
    `query_key_rows` and `query_key_gradients` count rows beyond those of live heads, and those that get a gradient.
    """
    checkpoint = open_checkpoint(latest(run.folder / "checkpoints") or run.folder, optimizer=False)
    adapter = adapter_for(checkpoint.model(pick_device("auto")))
    sites = adapter.sites()
    ids = torch.arange(16, device=adapter.device)[None]
    # Any text will do: a gradient of a removed row would mean that it is still executed.
    adapter.next_token_loss(ids, ids).backward()
    rows = gradients = 0
    for site, of_role in ((site, find_rows(site, role)) for site in sites for role in ("query", "key")):
        if of_role is not None and of_role.parameter.grad is not None:
            live = len(site.layout.live) * site.head_dim
            rows += len(of_role.parameter) - live
            gradients += int(of_role.parameter.grad.any(1).sum()) - live
    # A head marked as frozen whose layer still computes its scores would pass the first check.
    executed = [(site.frozen.num_frozen if site.frozen else 0) == len(site.layout.frozen) for site in sites]
    own = [adapter.heads(kind).to_list() for kind in ("frozen", "pruned")]
    heads = own == [sorted(run.frozen_heads), sorted(run.pruned_heads)]
    return {"heads": heads, "executed": all(executed), "query_key_rows": rows, "query_key_gradients": gradients}


def _fits(run: RecordedRun) -> dict[str, float]:
    # An event that was undone left no pattern in the model.
    events = [event.values for event in run.events if event.kind == "freeze" and event.undone_by is None]
    kls = [kl for event in events for *_, kl in event.get("fit_kl", ())]
    if not kls:
        return {}
    skipped = sum(len(event["rejected"]) for event in events)
    fits: dict[str, float] = {"largest_kl": max(kls), "median_kl": median(kls), "skipped": skipped}
    if any("exponential" in event for event in events):
        heads = [each for event in events for each in event.get("exponential", ()) if each["kind"] == "exponential"]
        fits["exponential"] = len(heads)
        fits["largest_extra_kl"] = max((each["extra_kl"] for each in heads), default=0.0)
    return fits


# --- records as one table


def read_records(folder: Path, scale: str) -> list[Record]:
    """Return the records of a scale's runs: result.json of their folders, or committed files ARM/seed-SEED.json."""
    paths = [path for path in sorted((folder / scale).glob("*/seed-*")) if path.parent.parent.name != "measurements"]
    files = [path / "result.json" if path.is_dir() else path for path in paths]
    records = [read_result(file) for file in files if file.suffix == ".json" and file.is_file()]
    return [record for record in records if "experiment" in record]


def numbers(records: Iterable[Record]) -> pd.DataFrame:
    """Return every number of the records, a line each: scale, arm, seed, metric, value.

    Reports before the end of a run are arms of their own; NAME@0 is the first.
    """
    lines = []
    for record in records:
        scale, arm, seed = (record["experiment"][name] for name in ("scale", "arm", "seed"))
        # Of models that are tested before, and some updates after, their heads are replaced.
        reports = record.get("reports") or {}
        states = {arm: record}
        for place, update in enumerate(sorted(reports, key=int)):
            states[f"{arm}@{place}"] = {**record, **reports[update]}
        for name, state in states.items():
            lines += [(scale, name, int(seed), metric, value) for metric, value in numbers_of(state).items()]
    return pd.DataFrame(lines, columns=["scale", "arm", "seed", "metric", "value"])


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of one record by metric; those that it does not have are left out."""
    at = partial(_number_at, record)
    losses, heads = dict(record.get("by_position") or ()), record["provenance"].get("heads")
    values = {
        "loss": at("report_loss") if "report_perplexity" in record else math.nan,
        "perplexity": at("report_perplexity"),
        "accuracy": 100 * at("accuracy"),
        "epochs": at("epochs"),
        "example_tokens": at("example_tokens"),
        "gate": 100 * at("recall", "development", "accuracy"),
        "loss_increase": at("intervention", "loss_rise"),
        # By how many nats the loss of a window's last targets is below that of targets 17 to 64.
        "context_gain": losses[64] - losses[max(losses)] if 64 in losses and len(losses) > 2 else math.nan,
        "window": max(losses, default=math.nan),
        "perplexity_to_4k": _perplexity_to(4_096, losses),
        "heads": math.nan if heads is None else len(heads) + len(record["provenance"].get("pruned") or ()),
        "updates": at("updates"),
        "remaining": at("updates") - at("intervention", "update"),
        "peak": (at("peak_memory_bytes") or math.nan) / 2**30,
        "fit_kl": at("fits", "largest_kl"),
        "median_kl": at("fits", "median_kl"),
        "skipped": at("fits", "skipped"),
        "exponential": at("fits", "exponential"),
        "extra_kl": at("fits", "largest_extra_kl"),
    }
    for test in (record.get("recall") or {}).get("tests", ()):
        values[recall_metric(test["length"], test["pairs"])] = 100 * test["accuracy"]
    if not record.get("shared"):  # times of a run that shared its device mean nothing
        values |= _times(record)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _number_at(record: Record, *path: str) -> float:
    value: Any = record
    for name in path:
        value = (value or {}).get(name)
    return math.nan if value is None else float(value)


def _times(record: Record) -> dict[str, float]:
    """Return minutes of a run, seconds of its event, and milliseconds of its updates."""
    time, event = record.get("time") or {}, (record.get("intervention") or {}).get("seconds")
    parts = time.get("parts") or {}
    times = {
        "minutes": _number_at(record, "time", "everything", "seconds") / 60,
        "compilation": parts.get("compile", parts.get("compilation", math.nan)),  # the latter in earlier records
        "update": 1e3 * _number_at(record, "update_seconds", "median"),
        "last_updates": 1e3 * _number_at(record, "last_updates_seconds"),
    }
    if time.get("parent_parts") is not None:
        # Earlier records also have parts that neither total counted.
        times["continuation"] = sum(parts[name] for name in parts if name not in ("afterwards", "lost")) / 60
    if event is not None:
        for name, of in (("intervention", event), ("capture", ("capture", "statistics")), ("fit", ("fit",))):
            times[name] = math.fsum(event.get(part, 0.0) for part in of)
    return times


def _perplexity_to(last: int, losses: Mapping[int, float]) -> float:
    """Return the perplexity of a window's first targets, from mean losses by the last target of each group."""
    groups = {end: loss for end, loss in losses.items() if end <= last}
    if last not in groups:
        return math.nan
    return math.exp(np.average(list(groups.values()), weights=np.diff([0, *groups])))
