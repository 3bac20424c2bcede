"""How much a run may train where that is not a number of updates: seconds on a clock, or what a reference had left.

At matched time every arm, the ordinary one too, starts from one checkpoint of a reference run and gets what the
reference still had from there on (paper, app:equal-time-controls). The learning rate follows what is used of it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from saf.errors import CheckpointError, InputError
from saf.records.files import read_lines
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.schedules import setting_of_moment
from saf.train.checkpoint import Checkpoint
from saf.train.clock import LOG, OFF_CLOCK, PARTS, seconds_until
from saf.train.config import TrainConfig

PAPER_SECONDS = 187.65 * 60
"""What the paper's ordinary arm took at matched time (tab:equal-time-controls)."""
SPEED_DIGITS = 0.0005
"""How far a speed may be from its file's: it may be rounded to three digits."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Hold what a run may use: seconds, each part of the clock weighted, or updates of its own."""

    seconds: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """What a second of each part counts; 1 where it is not named."""
    updates: int | None = None

    def used(self, *, parts: Mapping[str, float], expected: Mapping[str, float], updates: int) -> float:
        """Return the share that is used once the next update is done.

        Args:
            parts: Seconds of each part of the run's clock until now, its parent's left out.
            expected: Seconds of each part that the next update is expected to take, its compiling included.
            updates: Updates of its own that the run has done.
        """
        if self.updates is not None:
            spent, allowed = updates + 1.0, float(self.updates)
        else:
            assert self.seconds is not None
            spent, allowed = self.spent(parts) + self.spent(expected), self.seconds
        return spent / allowed if allowed > 0 else math.inf

    def seconds_left(self, parts: Mapping[str, float]) -> float | None:
        """Return the seconds that are not used yet; None for an allowance of updates."""
        return None if self.seconds is None else self.seconds - self.spent(parts)

    def spent(self, parts: Mapping[str, float]) -> float:
        """Return the seconds that a clock's parts count."""
        return sum(self.weighted(parts).values())

    def weighted(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of a clock's parts, each counted by its weight; what is on no clock is left out."""
        return {part: n * self.weights.get(part, 1.0) for part, n in parts.items() if part not in OFF_CLOCK}


def allowance_of(config: TrainConfig, matched: Mapping[str, Any] | None) -> Allowance | None:
    """Return what a run may use: what `match` recorded, or `time_budget_seconds`; None for a number of updates."""
    if matched is not None:
        return Allowance(**matched["allowance"])
    if config.time_budget_seconds is not None:
        return Allowance(seconds=config.time_budget_seconds)
    return None


def match(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a run at matched time gets, and by what, for its config.json.

    Raises:
        InputError: The reference has not ended, is no ordinary run, has other updates, did not go through the run's
            parent, or its seconds are not known; at a measured speed what it had left buys no update, or none that
            follows the first event.
    """
    reference = RecordedRun.open(str(config.match_time))
    result = reference.finished_result()
    _check_reference(reference, config)
    if checkpoint.hash not in went_through(reference):
        raise InputError(
            f"the run in {reference.folder} did not go through {checkpoint.path}; at matched time an arm starts from a "
            "checkpoint of its reference, or from the one that the reference started from"
        )
    record: dict[str, Any] = {"reference": str(reference.folder), "reference_hash": _final(result)}
    if config.match_speed is not None:
        _check_source(Path(config.match_speed_source), config.match_speed)
        left = result["updates"] - checkpoint.update
        charged = result["updates"] * config.match_charge_seconds / PAPER_SECONDS
        updates = int(config.match_speed * (left - charged))
        if updates < 1:
            cost = (
                f", and match_charge_seconds={config.match_charge_seconds:g} of the paper's 187.65 minutes cost "
                f"{charged:,.1f} of them; charge less, or start"
                if charged
                else "; start"
            )
            raise InputError(
                f"what {reference.folder} had left buys no update at a speed of {config.match_speed:g}: it had "
                f"{left:,} left{cost} from an earlier checkpoint"
            )
        _check_moment(config, start=checkpoint.update, updates=updates)
        allowance = Allowance(updates=updates)
        told = {name: getattr(config, name) for name in ("match_speed", "match_speed_source", "match_charge_seconds")}
        return {**record, **told, "reference_updates": result["updates"], "allowance": asdict(allowance)}
    whole, until = _whole(reference, result), _until(checkpoint)
    weights = _weights(config.match_clock, sum(whole.values()))
    counts = Allowance(weights=weights)
    allowance = replace(counts, seconds=counts.spent(whole) - counts.spent(until))
    return {**record, "clock": config.match_clock, "allowance": asdict(allowance)}


def accepted_pairs(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of `saf bench update` that tell the speed of frozen or pruned heads, not refused.

    Raises InputError for a file that is none.
    """
    record = read_result(path, advice="name the file that `saf bench update --out` wrote")
    if record["kind"] != "update":
        raise InputError(f"{path} is a result of {record['kind']!r}; expected one of `saf bench update`")
    rows = [row for row in record["rows"] if row["role"] in ("frozen", "pruned") and not row["refused"]]
    return [{**row, "model": row.get("model") or record["settings"].get("model")} for row in rows]


def _check_source(path: Path, speed: float) -> None:
    """Raise InputError for a speed's file that holds no accepted pair of updates of this speed, to its third digit.

    Other words than a file say where the speed is from.
    """
    if path.suffix != ".json":
        return
    pairs = accepted_pairs(path)
    if not any(abs(row["ratio"] - speed) <= SPEED_DIGITS for row in pairs):
        held = ", ".join(f"{row['ratio']:.4f} ({row['rate']:.0%} {row['backend']})" for row in pairs) or "none accepted"
        raise InputError(
            f"match_speed={speed:g} was not measured in {path}, whose pairs have {held}: give one of them, or say in "
            "words where the speed is from"
        )


def _check_reference(reference: RecordedRun, config: TrainConfig) -> None:
    """Raise InputError for a reference whose time is not what an ordinary run of the arm's updates takes."""
    if reference.arm != "ordinary":
        raise InputError(
            f"the reference of an arm at matched time is an ordinary run, whose time the arm gets; the run in "
            f"{reference.folder} is {reference.arm}: name the ordinary one"
        )
    updates = TrainConfig.from_dict(reference.config["settings"]).updates
    if updates != config.updates:
        raise InputError(
            f"an arm at matched time has the schedule of its reference: {reference.folder} has updates={updates}, and "
            f"the arm asks for updates={config.updates}; leave updates as they are, or name a reference of as many"
        )


def _check_moment(config: TrainConfig, *, start: int, updates: int) -> None:
    """Raise InputError where so many `updates` from `start` on end before the first event, or with it."""
    moment, last = config.freeze_update, start + updates
    if config.freeze is None or config.schedule is None or moment is None:
        return
    if moment >= last:
        raise InputError(
            f"with match_speed={config.match_speed:g} the arm does {updates} updates from {start} on and ends after "
            f"update {last}, and its first event would come after update {moment}, since moments are shares of "
            f"updates={config.updates}: nothing would train on behind it. Choose one before update {last} "
            f"({setting_of_moment(config.schedule)})"
        )


def _weights(clock: str, reference_seconds: float) -> dict[str, float]:
    """Return the weights of a clock.

    The scaled one charges what does not grow with the updates (compilation, events, the losses around them, and
    checkpoints) as if the reference took as long as the paper's, where these cost the same seconds; loading it leaves
    out.
    """
    share = reference_seconds / PAPER_SECONDS
    fixed = {part: share for part in PARTS if part != "training"}
    return {
        "everything": {},
        "warm": {"loading": 0.0, "compilation": 0.0},
        "scaled": {**fixed, "loading": 0.0},
    }[clock]


def _whole(reference: RecordedRun, result: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each part of a finished run, its parents' included."""
    time = result.get("time")
    if time is None:
        raise InputError(f"{reference.folder} is of a version that kept no clocks; train the reference again")
    return _added(time["parts"], time["parent_parts"] or {})


def _until(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the seconds of each part until a checkpoint, those of its run's parents included."""
    told = seconds_until(checkpoint)
    return _added(told["parts"], told["parent"] or {})


def _added(parts: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    names = (set(parts) | set(more)) - OFF_CLOCK
    return {name: parts.get(name, 0.0) + more.get(name, 0.0) for name in sorted(names)}


def went_through(run: RecordedRun) -> set[str]:
    """Return the hashes of the checkpoints that a run went through, its parent's included."""
    hashes = {line.get("hash") for line in read_lines(run.folder / LOG)}
    return {str(value) for value in (*hashes, (run.config.get("parent") or {}).get("hash")) if value}


def _final(result: Mapping[str, Any]) -> str:
    found = result["provenance"]["checkpoints"].get("final")
    if found is None:
        raise CheckpointError("the reference's result names no final checkpoint; train it again")
    return str(found)
