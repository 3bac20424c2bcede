"""What a run's folder holds when its training starts or goes on."""

from pathlib import Path
from typing import Any

from saf.records.events import inherit_events, keep_events_
from saf.records.files import keep_lines_, write_json
from saf.train.config import TrainConfig


def write_start(folder: Path, config: TrainConfig, record: dict[str, Any], *, update: int, own: Path | None) -> None:
    """Write config.json, cut the logs back, and take over the record of the event that `saf freeze` carried out."""
    write_json(folder / "config.json", record)
    _cut_logs(folder, config, update, after_event=own is not None and own.name.endswith("-frozen"))
    parent = record["parent"] or {}
    if own is None and config.freeze is None and "frozen_from" in parent:
        inherit_events(Path(parent["path"]), folder)


def _cut_logs(folder: Path, config: TrainConfig, update: int, *, after_event: bool) -> None:
    """Drop what was logged after the checkpoint; its update's event will be met again, unless it is over."""

    def keep(line: dict[str, Any]) -> bool:
        return line["update"] < update or (line["update"] == update and (after_event or line["when"] == "periodic"))

    keep_lines_(folder / "metrics.jsonl", lambda line: line["update"] <= update)
    keep_lines_(folder / "evaluations.jsonl", keep)
    (folder / "result.json").unlink(missing_ok=True)
    keep_events_(
        folder,
        lambda event: (
            event.values.get("inherited", config.freeze is None)
            or (event.update or 0) < update
            or (event.update == update and after_event)
        ),
    )
