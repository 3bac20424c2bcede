"""Comparing two finished runs, an ordinary and a frozen arm: what freezing cost and what it saved."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from saf.errors import CompareError, InputError
from saf.evaluate.evaluated import check_pair
from saf.evaluate.paired import RESAMPLES, delta_of_windows
from saf.evaluate.perplexity import read_evaluation
from saf.evaluate.tokens import TokenLosses
from saf.machine import untimed_updates
from saf.records.files import read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import RecordedRun

_SAME_LOSS = 1e-6
"""Relative difference of two losses beyond which they are of another model, text or precision."""
_MINIMUM_TIMED_UPDATES = 5
"""The median of fewer says nothing about updates whose times spread by some percent."""
# The same data may lie elsewhere: their fingerprint, which covers the tokenizer, is compared.
_IRRELEVANT = frozenset({"data.folder", "data.tokenizer"})
_BUDGETS = ("update_budget", "time_budget_seconds")
"""By these, arms of one parent do as many updates as their speeds allow: they are matched in time."""


def compare_runs(
    ordinary: RecordedRun | Path | str,
    frozen: RecordedRun | Path | str,
    *,
    out: Path | str | None = None,
    allow_differences: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Return delta-PPL with its interval, update times, memory and intervention cost of two finished runs.

    `update_time_ratio` is ordinary / frozen, of separate processes: above 1 the frozen arm is faster.
    `update_time_bound` is its limit if heads cost nothing, `update_time_caveat` why it says little, "" where it is
    clear. Written to `out`/compare.json if given.

    Raises:
        CompareError: The arms differ in more than the freezing (`allow_differences` passes all but other held-out
            windows), or two ordinary arms.
        InputError: A run that has not ended or was not evaluated, or whose evaluation is not that of its end.
    """
    arms = [run if isinstance(run, RecordedRun) else RecordedRun.open(run) for run in (ordinary, frozen)]
    results = [run.finished_result() for run in arms]
    if arms[1].arm == "ordinary":
        raise CompareError(f"{arms[1].folder} froze or pruned no heads; name the ordinary arm first, the other second")
    lines = differences(*arms)
    if lines and not allow_differences:
        listed = "\n  ".join(lines)
        raise CompareError(
            f"these runs differ in more than the freezing:\n  {listed}\n"
            "Run both arms with the same settings, or allow the differences explicitly (--allow-differences)"
        )
    (record, losses), (other, frozen_losses) = map(_final_evaluation, arms)
    if record["windows_hash"] != other["windows_hash"]:
        raise CompareError(
            f"the two arms were evaluated on different windows ({record['windows_hash'][:12]} and "
            f"{other['windows_hash'][:12]}); evaluate both with the same data, partition, length and limit"
        )
    finals = (result["provenance"]["checkpoints"].get("final") for result in results)
    heads, num_heads = len(arms[1].edited_heads), arms[1].num_heads
    comparison = {
        **result_header(
            "comparison",
            {"allow_differences": allow_differences, "resamples": resamples, "seed": seed},
            checkpoints=dict(zip(("ordinary", "frozen"), finals, strict=True)),
            data={record["partition"]: record["data_fingerprint"]},
        ),
        "ordinary": str(arms[0].folder),
        "frozen": str(arms[1].folder),
        **delta_of_windows(losses.windows, frozen_losses.windows, resamples=resamples, seed=seed),
        **compare_update_times(*arms),
        "peak_memory_ordinary": results[0].get("peak_memory_bytes"),
        "peak_memory_frozen": results[1].get("peak_memory_bytes"),
        "heads": heads,
        "num_heads": num_heads,
        "intervention_seconds": (results[1].get("intervention") or {}).get("seconds"),
        "run_seconds_ordinary": {clock: arms[0].seconds(clock) for clock in ("everything", "warm")},
        "run_seconds_frozen": {clock: arms[1].seconds(clock) for clock in ("everything", "warm")},
        "lacks": {name: run.lacks for name, run in zip(("ordinary", "frozen"), arms, strict=True) if run.lacks},
        "differences": lines,
        "update_time_bound": free_heads_bound(heads, num_heads),
    }
    comparison["update_time_caveat"] = speed_caveat(comparison)
    if out is not None:
        write_json(Path(out) / "compare.json", comparison)
    return comparison


def compare_evaluations(
    ordinary: Path | str,
    frozen: Path | str,
    *,
    allow_differences: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Return delta-PPL with its interval of two folders that `saf evaluate --out` wrote.

    Raises:
        CompareError: They are of other windows, or computed in another precision; the models differ in more than the
            freezing (`allow_differences` passes that alone), or the second one has no frozen or pruned heads.
        InputError: A file is missing or damaged.
    """
    (record, losses), (other, frozen_losses) = read_evaluation(ordinary), read_evaluation(frozen)
    for name in ("length", "data_fingerprint", "bos", "windows_hash", "precision"):
        if record.get(name) != other.get(name):
            raise CompareError(
                f"the evaluations differ in {name}: {record.get(name)} in {ordinary}, {other.get(name)} in {frozen}; "
                "evaluate both on the same data, partition, length and limit, in one precision, with or without bos"
            )
    pair = check_pair((record, other), (ordinary, frozen), allow_differences=allow_differences)
    models = (each["provenance"]["checkpoints"].get("model") for each in (record, other))
    return {
        **result_header(
            "comparison",
            {"allow_differences": allow_differences, "resamples": resamples, "seed": seed},
            checkpoints=dict(zip(("ordinary", "frozen"), models, strict=True)),
            data={record["partition"]: record["data_fingerprint"]},
        ),
        "ordinary": str(ordinary),
        "frozen": str(frozen),
        "length": record["length"],
        "precision": record["precision"],
        **delta_of_windows(losses.windows, frozen_losses.windows, resamples=resamples, seed=seed),
        **pair,
    }


def _final_evaluation(run: RecordedRun) -> tuple[dict[str, Any], TokenLosses]:
    """Return a run's evaluation; raise InputError unless its loss is that of result.json."""
    expected = run.finished_result()["report_loss"]
    record, losses = read_evaluation(run.folder)
    if not math.isclose(record["loss"], expected, rel_tol=_SAME_LOSS):
        raise InputError(
            f"{run.folder}/evaluation.json is of another model or text than the run's end: its loss is "
            f"{record['loss']:.6f}, that of result.json {expected:.6f}. `saf evaluate` the run's last checkpoint "
            "into another folder, and copy both files here"
        )
    return record, losses


# --- speed


def compare_update_times(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any]:
    """Return median update seconds of both arms over the same updates after the last event, and ordinary / frozen.

    A spread is the 20th and 80th percentile. The first updates after the event or a resumption (compilation, allocator
    growth) are left out; with fewer than five common ones the ratio is None.
    """
    for run in (ordinary, frozen):
        if not run.metrics:
            raise InputError(f"{run.folder}/metrics.jsonl is missing or empty; update times cannot be compared")
    begin = max(frozen.last_change or 0, *(run.metrics[0]["update"] - 1 for run in (ordinary, frozen)))
    last = min(run.metrics[-1]["update"] for run in (ordinary, frozen))
    start = begin + untimed_updates(last - begin)
    own, other = (
        {line["update"]: line["update_seconds"] for line in run.metrics if line["update"] > start}
        for run in (ordinary, frozen)
    )
    common = sorted(own.keys() & other.keys())
    spreads = [quantiles([arm[update] for update in common]) if common else None for arm in (own, other)]
    medians = [spread and spread[1] for spread in spreads]
    enough = len(common) >= _MINIMUM_TIMED_UPDATES
    return {
        "update_seconds_ordinary": medians[0],
        "update_seconds_frozen": medians[1],
        "update_time_ratio": medians[0] / medians[1] if enough and medians[0] and medians[1] else None,
        "update_seconds_spread_ordinary": spreads[0] and [spreads[0][0], spreads[0][2]],
        "update_seconds_spread_frozen": spreads[1] and [spreads[1][0], spreads[1][2]],
        "timed_updates": [common[0], common[-1]] if common else None,
    }


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, median and 80th percentile."""
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(seconds, dtype=torch.float64).quantile(shares).tolist()
    return low, middle, high


def speed_caveat(record: Mapping[str, Any]) -> str:
    """Return why a record's ratio of update times says little; "" where it is clear."""
    if not record["update_time_ratio"]:
        return "too few updates to tell which arm is faster"
    if was_busy(record):
        return "timing unclear: the machine was busy (free heads would save less)"
    spreads = sorted([record["update_seconds_spread_ordinary"], record["update_seconds_spread_frozen"]])
    return "" if spreads[0][1] < spreads[1][0] else "timing unclear: the spreads of both arms overlap"


def was_busy(record: Mapping[str, Any]) -> bool:
    """Return whether the machine had other work during one of the runs: their ratio is beyond the free bound."""
    bound = free_heads_bound(record["heads"], record["num_heads"])
    return bool(record["update_time_ratio"]) and bound is not None and record["update_time_ratio"] > bound


def free_heads_bound(heads: int, num_heads: int) -> float | None:
    """Return the speedup that no update reaches by freezing or pruning `heads` heads; None where all of them are.

    An update that did nothing but the work of heads would be 1 / (1 - r) times as fast with a share r of them gone. A
    closer bound depends on the attention kernel: at one shape 1.37x is left with one and 1.64x with another.
    """
    return None if heads >= num_heads else num_heads / (num_heads - heads)


# --- what else differs


def differences(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Return every difference of two runs that is not the freezing, a line each; empty when they are comparable."""
    parents = {(run.config.get("parent") or {}).get("hash") for run in (ordinary, frozen)}
    budgets = [any(run.config["train"].get(name) for name in _BUDGETS) for run in (ordinary, frozen)]
    matched = len(parents) == 1 and None not in parents and all(budgets)
    without = [f"train.{name}" for name in _BUDGETS] if matched else ()
    left, right = (_settings(run.config, without=without) for run in (ordinary, frozen))
    pairs = {key: (left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())}
    for key in () if matched else ("updates", "tokens"):
        pairs[key] = (ordinary.finished_result().get(key), frozen.finished_result().get(key))
    for key in ("partition", "length", "precision", "data_fingerprint"):
        pairs[f"evaluation {key}"] = ((ordinary.evaluation or {}).get(key), (frozen.evaluation or {}).get(key))
    lines = [
        f"{key}: {one!r} in the ordinary arm, {other!r} in the frozen arm"
        for key, (one, other) in pairs.items()
        if one != other
    ]
    return [*lines, *_parent_difference(ordinary, frozen)]


def _settings(config: Mapping[str, Any], *, without: Collection[str]) -> dict[str, Any]:
    """Return the settings that both arms must share, by dotted name."""
    flat = {
        f"{section}.{key}": value
        for section in ("model", "train", "data")
        for key, value in (config.get(section) or {}).items()
    }
    return {key: value for key, value in flat.items() if key not in _IRRELEVANT and key not in without} | {
        "device": config.get("device")
    }


def _parent_difference(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Return a line unless both arms start from the same weights, or the frozen one from a checkpoint of the other."""
    parents = [run.config.get("parent") or {} for run in (ordinary, frozen)]
    hashes = [parent.get("hash") for parent in parents]
    origins = {hashes[1], parents[1].get("frozen_from")} - {None}
    if hashes[0] == hashes[1] or origins & (_checkpoint_hashes(ordinary) | {hashes[0]}):
        return []
    shown = [f"checkpoint {value[:12]}" if value else "no checkpoint" for value in hashes]
    return [f"parent: the ordinary arm starts from {shown[0]}, the frozen arm from {shown[1]}"]


def _checkpoint_hashes(run: RecordedRun) -> set[str]:
    """Return the hashes of a run's checkpoints, removed ones too as far as they were recorded."""
    manifests = (run.folder / "checkpoints").glob("*/manifest.json")
    logged = {str(line.get("hash")) for line in read_lines(run.folder / "clock.jsonl")}
    branch = run.result["provenance"]["checkpoints"].get("branch") if run.result else None
    return {str(read_json(manifest).get("hash")) for manifest in manifests} | logged | ({branch} if branch else set())
