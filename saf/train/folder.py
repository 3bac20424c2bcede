"""The folder of a run: locked against others, and what stands in it when a run begins or goes on."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from saf.data.loader import INDEX_FILE
from saf.errors import InputError, SafWarning
from saf.machine.processes import is_first
from saf.records.events import EVENTS, EventRecord, inherit_events, keep_events_, read_events
from saf.records.files import lines_hash, read_lines, remove_unfinished_, write_json, write_lines
from saf.records.folders import lock_folder, remove_leftovers_
from saf.train.clock import log_lost_
from saf.train.config import TrainConfig
from saf.train.run_config import check_same_run, read_run_config

_OWN_FILES = ("config.json", "result.json", "*.jsonl", "event-*.safetensors")
"""Files, or patterns of their names, that nothing but the run itself writes into its folder."""


def lock_run(folder: Path, config: TrainConfig, *, resume: bool) -> IO[str] | None:
    """Lock a folder that holds a run, which must be the one to resume; None when it holds none."""
    if (folder / INDEX_FILE).exists():
        raise InputError(f"{folder} is a data folder ({INDEX_FILE} is there); choose another for the run")
    if not (folder / "config.json").exists():
        if resume:
            raise InputError(f"{folder} holds no run to resume; check out, or leave resume out")
        return None
    lock = lock_folder(folder) if is_first() else None
    if not resume:
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    check_same_run(config, read_run_config(folder)["settings"])
    return lock


def lock_new(folder: Path) -> IO[str]:
    """Lock a folder that held no run when this process began; raise InputError when it holds one by now."""
    lock = lock_folder(folder)
    if (folder / "config.json").exists():
        lock.close()
        raise InputError(
            f"{folder} holds a run by now, which another process began meanwhile; resume it, or choose another folder"
        )
    return lock


def own_events(config: TrainConfig) -> list[EventRecord]:
    """Return the events that the run itself carried out so far; not those of the parent."""
    events = read_events(config.out) if Path(config.out).is_dir() else []
    return [event for event in events if not _inherited(event, config)]


def _inherited(event: EventRecord, config: TrainConfig) -> bool:
    """Return whether an event is a parent's; a run that freezes nothing has no other, marked as such or not."""
    return event.values.get("inherited", config.freeze is None)


def write_start_(
    folder: Path,
    config: TrainConfig,
    record: dict[str, Any],
    *,
    update: int,
    own: Path | None,
    records: Mapping[str, tuple[int, str]] | None,
) -> None:
    """Write config.json, cut the logs back to `update`, and take over the event that `saf freeze` carried out.

    The clock's log tells what updates that are cut took. `own` is the run's checkpoint that training goes on from; its
    update's events will be met again, unless it is the state after them. `records` is what it tells of the logs. Raises
    InputError when they are of another run.
    """
    after_event = own is not None and own.name.endswith("-frozen")

    def keep_line(line: dict[str, Any]) -> bool:
        return line["update"] < update or (line["update"] == update and (after_event or line["when"] == "periodic"))

    def keep_event(event: EventRecord) -> bool:
        if _inherited(event, config):
            return True
        return (event.update or 0) < update or (event.update == update and after_event)

    logs = {"metrics.jsonl": lambda line: line["update"] <= update, "evaluations.jsonl": keep_line}
    found = {name: read_lines(folder / name) for name in logs}
    kept = {name: list(filter(logs[name], lines)) for name, lines in found.items()}
    events = sum(map(keep_event, read_events(folder)))
    _check_logs(folder, kept, records or {}, own, events=events)
    remove_leftovers_(folder / "checkpoints")
    remove_unfinished_(folder, _OWN_FILES)
    log_lost_(folder, [line for line in found["metrics.jsonl"] if line["update"] > update])
    write_json(folder / "config.json", record)
    for name, lines in kept.items():
        if (folder / name).exists():
            write_lines(folder / name, lines)
    keep_events_(folder, keep_event)
    (folder / "result.json").unlink(missing_ok=True)
    parent = record["parent"] or {}
    if own is None and config.freeze is None and "frozen_from" in parent:
        inherit_events(Path(parent["path"]), folder)


def _check_logs(
    folder: Path,
    kept: Mapping[str, list[dict[str, Any]]],
    records: Mapping[str, tuple[int, str]],
    own: Path | None,
    *,
    events: int,
) -> None:
    """Raise InputError for lines that are not those beside which `own` was written, and tell of lost ones.

    `kept` are the lines up to there by the name of their file, `events` is how many events there are.
    """
    for name, lines in kept.items():
        count, expected = records.get(name, (0, None))
        if expected is not None and len(lines) >= count and lines_hash(lines) != expected:
            raise InputError(
                f"{folder / name} is not the file beside which {own} was written: its lines up to there are others; "
                "restore it, or move it away to go on without"
            )
    # The gaps of metrics.jsonl are told once all is set up.
    for name, found in {"evaluations.jsonl": len(kept["evaluations.jsonl"]), EVENTS: events}.items():
        count, _ = records.get(name, (0, ""))
        if found < count:
            lost = f"{folder / name} has lost {count - found} of the {count} lines beside which {own} was written"
            warnings.warn(lost, SafWarning, stacklevel=5)
