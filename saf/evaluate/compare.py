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
from saf.machine.stopwatch import untimed_updates
from saf.records.files import read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import RecordedRun

# A loss that JSON keeps whole is the same number again; what is told apart is another model, text or precision.
_SAME_LOSS = 1e-6
# The median of fewer says nothing about updates whose times spread by some percent.
_MINIMUM_TIMED_UPDATES = 5
_TIMING = (
    "update_seconds_ordinary",
    "update_seconds_frozen",
    "update_time_ratio",
    "update_seconds_spread_ordinary",
    "update_seconds_spread_frozen",
    "timed_updates",
)
# The same data may lie elsewhere: their fingerprint, which covers the tokenizer, is compared.
_IRRELEVANT = frozenset({"data.folder", "data.tokenizer"})
# Arms that were given the time of one reference each have their own speed.
_MATCHED = frozenset({"train.match_speed", "train.match_speed_source", "train.match_charge_seconds"})


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

    `update_time_ratio` is ordinary / frozen, of separate processes: above 1 the frozen arm is faster. Beside it stand
    `update_time_bound`, what it would be at most if heads cost nothing, and `update_time_caveat`, why it says little,
    "" where it is clear. Written to `out`/compare.json if given.

    Raises:
        CompareError: The arms differ in more than the freezing (`allow_differences` passes all but other held-out
            windows), or two ordinary arms.
        InputError: A run that has not ended or was not evaluated, or whose evaluation is not that of its end.
    """
    arms = _opened(ordinary), _opened(frozen)
    results = [run.finished_result() for run in arms]
    if arms[1].arm == "ordinary":
        raise CompareError(
            f"{arms[1].folder} froze or pruned no heads; expected the ordinary arm first and the other one second"
        )
    found = differences(*arms)
    if found and not allow_differences:
        listed = "\n  ".join(found)
        raise CompareError(
            f"these runs differ in more than the freezing:\n  {listed}\n"
            "Run both arms with the same settings, or allow the differences explicitly (--allow-differences)"
        )
    (record_o, losses_o), (record_f, losses_f) = map(_final_evaluation, arms)
    hashes = record_o["windows_hash"], record_f["windows_hash"]
    if hashes[0] != hashes[1]:
        raise CompareError(
            f"the two arms were evaluated on different windows ({hashes[0][:12]} and {hashes[1][:12]}); "
            "evaluate both with the same data, partition, length and limit"
        )
    delta = delta_of_windows(losses_o.windows, losses_f.windows, resamples=resamples, seed=seed)
    intervention = results[1].get("intervention") or {}
    settings = {"allow_differences": allow_differences, "resamples": resamples, "seed": seed}
    finals = (result["provenance"]["checkpoints"].get("final") for result in results)
    head = result_header(
        "comparison",
        settings,
        checkpoints=dict(zip(("ordinary", "frozen"), finals, strict=True)),
        data={record_o["partition"]: record_o["data_fingerprint"]},
    )
    comparison = {
        **head,
        "ordinary": str(arms[0].folder),
        "frozen": str(arms[1].folder),
        **delta,
        **compare_update_times(*arms),
        "peak_memory_ordinary": results[0].get("peak_memory_bytes"),
        "peak_memory_frozen": results[1].get("peak_memory_bytes"),
        "heads": len(arms[1].edited_heads),
        "num_heads": arms[1].num_heads,
        "intervention_seconds": intervention.get("seconds"),
        "run_seconds_ordinary": _run_seconds(arms[0]),
        "run_seconds_frozen": _run_seconds(arms[1]),
        "lacks": {name: run.lacks for name, run in zip(("ordinary", "frozen"), arms, strict=True) if run.lacks},
        "differences": found,
    }
    comparison["update_time_bound"] = free_heads_bound(comparison["heads"], comparison["num_heads"])
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
    """Return delta-PPL with its interval of two folders that `saf evaluate --out` wrote, of models as they are.

    Raises:
        CompareError: They are of other windows, or computed in another precision; the models differ in more than the
            freezing (`allow_differences` passes that alone), or the second one has no frozen or pruned heads.
        InputError: A file is missing or damaged.
    """
    (record_o, losses_o), (record_f, losses_f) = read_evaluation(ordinary), read_evaluation(frozen)
    for name in ("length", "data_fingerprint", "bos", "windows_hash", "precision"):
        if record_o.get(name) != record_f.get(name):
            raise CompareError(
                f"the evaluations differ in {name}: {record_o.get(name)} in {ordinary}, {record_f.get(name)} in "
                f"{frozen}; evaluate both models on the same data, partition, length and limit, in one precision, with "
                "the token that begins a text (bos) or without it"
            )
    pair = check_pair((record_o, record_f), (ordinary, frozen), allow_differences=allow_differences)
    models = (record["provenance"]["checkpoints"].get("model") for record in (record_o, record_f))
    head = result_header(
        "comparison",
        {"allow_differences": allow_differences, "resamples": resamples, "seed": seed},
        checkpoints=dict(zip(("ordinary", "frozen"), models, strict=True)),
        data={record_o["partition"]: record_o["data_fingerprint"]},
    )
    delta = delta_of_windows(losses_o.windows, losses_f.windows, resamples=resamples, seed=seed)
    shared = {name: record_f[name] for name in ("length", "precision")}
    return {**head, "ordinary": str(ordinary), "frozen": str(frozen), **shared, **delta, **pair}


def _opened(run: RecordedRun | Path | str) -> RecordedRun:
    return run if isinstance(run, RecordedRun) else RecordedRun.open(run)


def _run_seconds(run: RecordedRun) -> dict[str, float | None]:
    """Return what the whole run took on both clocks, its parent's part included."""
    return {clock: run.seconds(clock) for clock in ("everything", "warm")}


def speed_caveat(record: Mapping[str, Any]) -> str:
    """Return why a record's ratio of update times says little; "" where it is clear."""
    if not record["update_time_ratio"]:
        return "too few updates to tell which arm is faster"
    if was_busy(record):
        return "timing unclear: the machine was busy, as heads that cost nothing would not save so much"
    spreads = sorted([record["update_seconds_spread_ordinary"], record["update_seconds_spread_frozen"]])
    return "" if spreads[0][1] < spreads[1][0] else "which is faster is not clear: spreads overlap"


def was_busy(record: Mapping[str, Any]) -> bool:
    """Return whether the machine had other work during one of the runs: their ratio is beyond the free bound."""
    bound = free_heads_bound(record["heads"], record["num_heads"])
    return bool(record["update_time_ratio"]) and bound is not None and record["update_time_ratio"] > bound


def free_heads_bound(heads: int, num_heads: int) -> float | None:
    """Return the speedup that no update reaches by freezing or pruning `heads` heads; None where all of them are.

    An update that did nothing but the work of heads would be 1 / (1 - r) times as fast with a share r of them gone and
    free; no update is so much faster. A closer bound would need to know what an operation costs in attention: at the
    same shape one kernel leaves 1.37x to gain and another 1.64x (docs/log.md).
    """
    return None if heads >= num_heads else num_heads / (num_heads - heads)


def differences(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Return every difference of two runs that is not the freezing, a line each; empty when they are comparable."""
    lines = []
    matched = _matched_alike(ordinary, frozen)
    left, right = (_settings(run.config, without=_MATCHED if matched else ()) for run in (ordinary, frozen))
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            lines.append(f"{key}: {left.get(key)!r} in the ordinary arm, {right.get(key)!r} in the frozen arm")
    lines += _parent_difference(ordinary, frozen)
    for key in () if matched else ("updates", "tokens"):
        pair = [run.finished_result().get(key) for run in (ordinary, frozen)]
        if pair[0] != pair[1]:
            lines.append(f"{key}: {pair[0]} in the ordinary arm, {pair[1]} in the frozen arm")
    for key in ("partition", "length", "precision", "data_fingerprint"):
        pair = [(run.evaluation or {}).get(key) for run in (ordinary, frozen)]
        if pair[0] != pair[1]:
            lines.append(f"evaluation {key}: {pair[0]!r} in the ordinary arm, {pair[1]!r} in the frozen arm")
    return lines


def compare_update_times(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any]:
    """Return median update seconds of both arms over the same updates after the last event, and ordinary / frozen.

    A spread is the 20th and 80th percentile; where the two overlap, the ratio says little. The first updates after
    the event or a resumption (compilation, allocator growth) are left out; with fewer than five common ones the
    ratio is None. Arms are separate processes: a controlled measurement interleaves them.
    """
    begin = max(frozen.last_change or 0, *(_ends(run)[0] - 1 for run in (ordinary, frozen)))
    last = min(_ends(run)[1] for run in (ordinary, frozen))
    start = begin + untimed_updates(last - begin)
    seconds = [
        {m["update"]: m["update_seconds"] for m in run.metrics if m["update"] > start} for run in (ordinary, frozen)
    ]
    common = sorted(seconds[0].keys() & seconds[1].keys())
    if not common:
        return dict.fromkeys(_TIMING)
    (low_o, median_o, high_o), (low_f, median_f, high_f) = (quantiles([arm[u] for u in common]) for arm in seconds)
    ratio = median_o / median_f if len(common) >= _MINIMUM_TIMED_UPDATES else None
    spans = [low_o, high_o], [low_f, high_f], [common[0], common[-1]]
    return dict(zip(_TIMING, (median_o, median_f, ratio, *spans), strict=True))


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, median and 80th percentile."""
    low, middle, high = (
        torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    )
    return low, middle, high


def _final_evaluation(run: RecordedRun) -> tuple[dict[str, Any], TokenLosses]:
    """Return what `read_evaluation` does; raise InputError unless its loss is that of result.json."""
    expected = run.finished_result()["report_loss"]
    record, losses = read_evaluation(run.folder)
    if not math.isclose(record["loss"], expected, rel_tol=_SAME_LOSS):
        raise InputError(
            f"{run.folder}/evaluation.json tells of another model or text than the run's end: its loss is "
            f"{record['loss']:.6f}, that of result.json {expected:.6f}. `saf evaluate` the run's last checkpoint "
            "into another folder, and copy both files here"
        )
    return record, losses


def _ends(run: RecordedRun) -> tuple[int, int]:
    """Return a run's first and last recorded update; raise InputError when it recorded none."""
    if not run.metrics:
        raise InputError(f"{run.folder}/metrics.jsonl is missing or empty; update times cannot be compared")
    return int(run.metrics[0]["update"]), int(run.metrics[-1]["update"])


def _matched_alike(ordinary: RecordedRun, frozen: RecordedRun) -> bool:
    """Return whether both arms were given the same time of one reference: they differ in their updates then."""
    pair = [run.config.get("matched") or {} for run in (ordinary, frozen)]
    return bool(pair[0]) and pair[0].get("reference_hash") == pair[1].get("reference_hash")


def _settings(config: dict[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that both arms must share, by dotted name."""
    flat: dict[str, Any] = {}
    for section in ("model", "train", "data"):
        for key, value in (config.get(section) or {}).items():
            flat[f"{section}.{key}"] = value
    flat["device"] = config.get("device")
    return {key: value for key, value in flat.items() if key not in _IRRELEVANT and key not in without}


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
