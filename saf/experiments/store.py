"""The store: a folder for each run of the plans, and one small JSON record of each that ended.

    STORE/runs/KEY/          what `saf pretrain` wrote, checkpoints included
    STORE/records/KEY.json   the run's numbers, and its loss in each held-out window
    STORE/measurements/KEY.json   the record of a benchmark or an analysis

Tables are made of the records alone, so that these can be committed and the folders removed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.errors import CheckpointError, InputError
from saf.evaluate.perplexity import read_evaluation
from saf.experiments.plan import SCHEMA, PlannedRun
from saf.records.files import read_json, write_json
from saf.records.folders import remove_folder_, verify
from saf.records.result import read_result, with_header
from saf.train.checkpoint import step_name

KIND = "experiment"
"""Of a record's header."""


@dataclass(frozen=True)
class Store:
    """Answer for the folder of a plan's runs."""

    folder: Path

    def open(self, *, write: bool) -> "Store":
        """Return the store; raise InputError when another version wrote it. With `write` a new one is begun."""
        mark = self.folder / "store.json"
        if mark.exists():
            schema = read_json(mark).get("schema")
            if schema != SCHEMA:
                raise InputError(
                    f"{self.folder} is a store of version {schema!r}; this one writes {SCHEMA!r}: name another folder"
                )
        elif write:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise InputError(f"{self.folder} holds something else than runs of recipes; name another folder")
            write_json(mark, {"schema": SCHEMA})
        return self

    def run_folder(self, key: str) -> Path:
        """Return the folder of a run, whether it is there or not."""
        return self.folder / "runs" / key

    def record_file(self, key: str) -> Path:
        """Return the file of a run's record, whether it is there or not."""
        return self.folder / "records" / f"{key}.json"

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the record of a run that ended; None before that. Raises InputError when it is of another run."""
        path = self.record_file(key)
        if not path.exists():
            return None
        record = read_result(path)
        if record["kind"] != KIND or record.get("key") != key:
            raise InputError(f"{path} is the record of {record.get('key')!r}, a {record['kind']}; remove it")
        return record

    def measurement_file(self, key: str) -> Path:
        """Return the file of a measurement's record, whether it is there or not."""
        return self.folder / "measurements" / f"{key}.json"

    def measurement(self, key: str) -> dict[str, Any] | None:
        """Return the record of a measurement; None before it. Raises InputError when it is of another one."""
        path = self.measurement_file(key)
        if not path.exists():
            return None
        record = read_result(path)
        if record.get("key") != key:
            raise InputError(f"{path} is the record of {record.get('key')!r}, a {record['kind']}; remove it")
        return record

    def fingerprint(self) -> str:
        """Return the fingerprint of the data that the recorded runs were trained on.

        Raises:
            InputError: There are no records, or they are of several data: which ones are meant must be said.
        """
        found = {
            read_result(path)["provenance"]["data"].get("train") for path in self.folder.glob("records/*.json")
        } - {None}
        if len(found) != 1:
            shown = "of several data; name theirs with --data" if found else "there are none"
            raise InputError(f"the records in {self.folder / 'records'}: {shown}")
        return str(found.pop())

    def checkpoint(self, run: PlannedRun) -> Path | None:
        """Return the checkpoint that a run goes on from; None when it starts from initialisation."""
        if run.parent is None or run.step is None:
            return None
        return self.run_folder(run.parent) / "checkpoints" / step_name(run.step)

    def lacks_parent(self, run: PlannedRun) -> str | None:
        """Return why the checkpoint that a run goes on from cannot be used; None when it can, or is not needed."""
        path = self.checkpoint(run)
        if path is None:
            return None
        if not path.is_dir():
            return f"{path} is missing"
        try:
            verify(path)
        except CheckpointError as error:
            return str(error)
        return None

    def lacks_match(self, run: PlannedRun) -> str | None:
        """Return why the run whose time a run gets cannot be used; None when it can, or there is none."""
        folder = run.match and self.run_folder(run.match)
        return f"{folder} has no result" if folder and not (folder / "result.json").is_file() else None

    def heads(self, key: str) -> list[list[int]] | None:
        """Return the heads that are frozen or pruned in a run that ended; None before that."""
        record = self.record(key)
        return None if record is None else (record.get("intervention") or {}).get("heads") or []

    def lacks_heads(self, run: PlannedRun) -> str | None:
        """Return why the heads of the run whose heads a run has are not known; None when they are, or are its own."""
        if run.heads is None or self.heads(run.heads):
            return None
        return f"{self.record_file(run.heads)} tells of no heads frozen or pruned"

    def begun(self, key: str) -> bool:
        """Return whether there is a run to resume."""
        return (self.run_folder(key) / "config.json").is_file()

    def forget_(self, key: str) -> None:
        """Remove a run's folder, to train it again; its record stays until the new one takes its place."""
        if self.run_folder(key).is_dir():
            remove_folder_(self.run_folder(key))

    def collect(self, run: PlannedRun) -> dict[str, Any]:
        """Write and return the record of a run that ended.

        Raises:
            InputError: It has not ended, or its evaluation is not that of its end.
        """
        folder = self.run_folder(run.key)
        result = read_result(folder / "result.json")
        evaluation, losses = read_evaluation(folder)
        entries = {name: value for name, value in result.items() if name not in ("schema", "kind", "settings")}
        record = {
            "schema": result["schema"],
            "kind": KIND,
            "settings": {"scale": run.scale, "seed": run.seed, **run.flags},
            **entries,
            "key": run.key,
            "parent": run.parent,
            "step": run.step,
            "windows_hash": evaluation["windows_hash"],
            "window_losses": losses.windows.tolist(),
        }
        write_json(self.record_file(run.key), record)
        return with_header(record)
