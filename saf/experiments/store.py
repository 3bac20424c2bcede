"""The store: a folder for each run of the plans, and one small JSON record of each that ended.

    STORE/runs/KEY/              what `saf pretrain` wrote; of the checkpoints all those that others may go on from
    STORE/records/KEY.json       the run's numbers, and its loss in each held-out window
    STORE/records/KEY-HASH.json  the same of a run that was trained again for its checkpoints, which were lost
    STORE/measurements/KEY.json  the record of a benchmark or an analysis
    STORE/speeds/NAME.json       measured speeds that arms at matched time got

Tables are made of the records alone, so that these can be committed and the folders removed. No record is ever
overwritten: an arm is compared with the training that it shares a checkpoint with.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from saf.errors import CheckpointError, InputError
from saf.evaluate.answers import has_answers, read_answers
from saf.evaluate.perplexity import read_evaluation
from saf.experiments.planned_run import SCHEMA, PlannedRun
from saf.experiments.speeds import Speeds
from saf.records.files import read_json, write_json
from saf.records.folders import lock_folder, remove_folder_, verify
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.train.allowance import went_through
from saf.train.checkpoint import checkpoint_hash, checkpoints, latest, step_name

KIND = "experiment"
"""Of a record's header."""
ADVICE = "restore it, or remove it: `saf run` makes it again, and trains the run again where its folder is gone"
"""What to do about a run's record that cannot be used."""
MEASURED = "restore it, or remove it to measure again"
"""What to do about a measurement's."""


@dataclass(frozen=True)
class Store:
    """Answer for the folder of a plan's runs."""

    folder: Path

    def open(self, *, write: bool) -> "Store":
        """Return the store; raise InputError when another version wrote it. With `write` a new one is begun."""
        mark = self.folder / "store.json"
        if mark.exists():
            schema = read_json(mark, advice="restore it, or name another folder").get("schema")
            if schema != SCHEMA:
                raise InputError(
                    f"{mark} tells of a store of version {schema!r}; this one writes {SCHEMA!r}: name another folder"
                )
        elif write:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                begun = any((self.folder / name).is_dir() for name in ("runs", "records", "measurements"))
                raise InputError(
                    f"{mark} is missing from a folder of runs of recipes; restore it, or name another folder"
                    if begun
                    else f"{self.folder} holds something else than runs of recipes; name another folder"
                )
            write_json(mark, {"schema": SCHEMA})
        return self

    def hold(self) -> IO[str]:
        """Return an open file that keeps other commands from training and measuring here until it is closed.

        Two at once would train the same runs, remove what the other one reads, and time runs beside one another.
        Runs inherit the file, so that those of a command that was killed hold the store until they end.

        Raises:
            InputError: Another command holds it.
        """
        return lock_folder(
            self.folder,
            InputError(
                f"another `saf run`, or a run that one began before it was killed, works in {self.folder}; wait for it "
                "or stop it, then give the same command; or name another --store"
            ),
        )

    def run_folder(self, key: str) -> Path:
        """Return the folder of a run, whether it is there or not."""
        return self.folder / "runs" / key

    def record_file(self, key: str) -> Path:
        """Return the file of a run's record, whether it is there or not."""
        return self.folder / "records" / f"{key}.json"

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the first record of a run that ended; None before that."""
        return next(iter(self.records(key)), None)

    def records(self, key: str) -> list[dict[str, Any]]:
        """Return the records of a run, one for each training of it, the first one first; none before it ended.

        Raises:
            InputError: A record is damaged, of another version, or of another run.
        """
        first = self.record_file(key)
        again = sorted(path for path in first.parent.glob(f"{key}-*.json"))
        return [self._read(path, key) for path in (*([first] if first.exists() else ()), *again)]

    def recorded(self) -> frozenset[str]:
        """Return the keys of all runs that have a record, which is not read."""
        return frozenset(path.stem.partition("-")[0] for path in self.folder.glob("records/*.json"))

    def _read(self, path: Path, key: str) -> dict[str, Any]:
        """Return one record of a run."""
        record = read_result(path, advice=ADVICE)
        if record["kind"] != KIND or record.get("key") != key:
            raise InputError(f"{path} is the record of {record.get('key')!r}, a {record['kind']}; remove it")
        return {"went_through": [], "shared": False, **record}

    def every_record(self, *, instead: str = "") -> list[dict[str, Any]]:
        """Return the records of all runs, whatever recipes they stand in, by the names of their files.

        Args:
            instead: What spares reading those of other recipes, for the message about one that cannot be read.

        Raises:
            InputError: One is damaged or of another version; it is named.
        """
        advice = f"{ADVICE}; or {instead}" if instead else ADVICE
        return [read_result(path, advice=advice) for path in sorted(self.folder.glob("records/*.json"))]

    def measurement_file(self, key: str) -> Path:
        """Return the file of a measurement's record, whether it is there or not."""
        return self.folder / "measurements" / f"{key}.json"

    def measurement(self, key: str) -> dict[str, Any] | None:
        """Return the record of a measurement; None before it. Raises InputError when it is of another one."""
        path = self.measurement_file(key)
        if not path.exists():
            return None
        record = read_result(path, advice=MEASURED)
        if record.get("key") != key:
            raise InputError(f"{path} is the record of {record.get('key')!r}, a {record['kind']}; remove it")
        return record

    def keep_speeds_(self, speeds: Speeds) -> None:
        """Write down the speeds that arms at matched time got, for tables that are made of records alone."""
        write_json(self.folder / "speeds" / f"{speeds.name}.json", speeds.to_dict())

    def speeds(self, name: str) -> Speeds:
        """Return the speeds of a name; raise InputError where the store has none of it."""
        return Speeds.from_dict(read_json(self.folder / "speeds" / f"{name}.json", advice="restore the store's speeds"))

    def fingerprint(self) -> str:
        """Return the fingerprint of the data that the recorded runs were trained on.

        Raises:
            InputError: There are no records, one is damaged, or they are of several data: which ones are meant must be
                said.
        """
        found = data_of(
            self.every_record(instead="name the data with --data: records of other recipes are then not read")
        )
        if len(found) != 1:
            where = self.folder / "records"
            if found:
                raise InputError(f"the records in {where} are of runs on several data; name theirs with --data")
            raise InputError(f"{where} holds no records; train the runs first (saf run), or name another --store")
        return found[0]

    def examples(self) -> dict[str, str]:
        """Return the fingerprint of the examples that recorded runs were finetuned on or updates timed on, by task.

        Raises:
            InputError: A record is damaged, or they are of several files: which ones are meant must be said.
        """
        found: dict[str, set[str]] = {}
        for record in self.every_record(instead="name the examples with --tasks, if it is of another recipe"):
            if record.get("examples"):
                found.setdefault(record["settings"]["task"], set()).add(record["examples"])
        for path in sorted(self.folder.glob("measurements/*.json")):
            for task, print_ in read_result(path, advice=MEASURED).get("examples", {}).items():
                found.setdefault(task, set()).add(print_)
        if several := sorted(task for task, prints in found.items() if len(prints) > 1):
            where = self.folder / "records"
            raise InputError(f"the records in {where} are of several files of {', '.join(several)}; name --tasks")
        return {task: prints.pop() for task, prints in found.items()}

    def missing(self, runs: Iterable[PlannedRun], lost: Collection[str] = ()) -> list[PlannedRun]:
        """Return the runs that have no record, and those whose keys are in `lost`: their folders are needed again."""
        return [run for run in runs if run.key in lost or self.record(run.key) is None]

    def checkpoint(self, run: PlannedRun) -> Path | None:
        """Return the checkpoint that a run goes on from; None when it starts from initialisation.

        Of a parent whose last one is meant and which has none, the folder that it would be in.
        """
        if run.parent is None:
            return None
        folder = self.run_folder(run.parent) / "checkpoints"
        return folder / step_name(run.step) if run.step is not None else latest(folder) or folder / "the last one"

    def done(self, key: str) -> int | None:
        """Return the update of a begun run's newest checkpoint; None before it has one."""
        found = checkpoints(self.run_folder(key) / "checkpoints")
        return int(found[-1].name.split("-")[1]) if found else None

    def lacks(self, run: PlannedRun) -> dict[str, str]:
        """Return why runs that a run goes on from cannot be used, by their keys; empty when all can, or none is needed.

        A run that has a checkpoint of its own needs no other.
        """
        if self.done(run.key) is not None:
            return {}
        found = [(key, self.lacks_result(key)) for key in (run.match, run.like) if key]
        parent = self.lacks_parent(run)
        # One run may be the parent, the reference and what gives the heads: what lacks of it is told once.
        found += [(run.heads, self.lacks_heads(run, again=parent is not None)), (run.parent, parent)]
        return {key: why for key, why in found if key and why}

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

    def lacks_result(self, key: str) -> str | None:
        """Return why the run whose time or settings another one gets cannot be used; None when it can."""
        folder = self.run_folder(key)
        return None if (folder / "result.json").is_file() else f"{folder} has no result"

    def heads(self, run: PlannedRun, *, again: bool = False) -> list[list[int]]:
        """Return the heads that a run has of the one that it names; none where no such heads are recorded.

        Where both go on from one parent, they are those of a training that began at this run's own checkpoint: another
        training of the parent chooses other heads, so that there are none where it is to be trained `again`.
        """
        if run.heads is None:
            return []
        found = [one for one in self.records(run.heads) if (one.get("intervention") or {}).get("heads")]
        start = self.checkpoint(run)
        if start is not None:
            began = checkpoint_hash(start) if start.is_dir() and not again else None
            beside = {"parent": run.parent, "step": run.step}
            found = [
                one
                for one in found
                if any(one.get(name) != value for name, value in beside.items()) or began in one["went_through"]
            ]
        return found[0]["intervention"]["heads"] if found else []

    def lacks_heads(self, run: PlannedRun, *, again: bool = False) -> str | None:
        """Return why the heads of the run whose heads a run has are not known; None when they are, or are its own.

        Where the parent is to be trained `again`, they are not.
        """
        if run.heads is None or self.heads(run, again=again):
            return None
        if self.heads(replace(run, parent=None)):
            return f"{self.record_file(run.heads)} tells of heads frozen or pruned in another training of their parent"
        return f"{self.record_file(run.heads)} tells of no heads frozen or pruned"

    def budget_left_(self, seconds: float) -> float:
        """Return the seconds left of the budget of this length that a command began, or begin one.

        It is over when its time is, whatever was done in it: the next command then begins another.
        """
        path, now = self.folder / "budget.json", time.time()
        if path.exists():
            kept = read_json(path)
            if kept.get("seconds") == seconds and 0 <= now - kept["began"] < seconds:
                return seconds - (now - kept["began"])
        write_json(path, {"began": now, "seconds": seconds})
        return seconds

    def begun(self, key: str) -> bool:
        """Return whether there is a run to resume."""
        return (self.run_folder(key) / "config.json").is_file()

    def forget_(self, key: str) -> None:
        """Remove a run's folder, to train it again; its record stays, and the new one stands beside it."""
        if self.run_folder(key).is_dir():
            remove_folder_(self.run_folder(key))

    def mark_shared_(self, key: str) -> None:
        """Write down that a run may share its device, before it begins: its times will mean nothing."""
        write_json(self._shared(key), {"shared": True})

    def _shared(self, key: str) -> Path:
        return self.folder / "logs" / f"{key}.shared.json"

    def collect(self, run: PlannedRun) -> dict[str, Any]:
        """Write and return the record of a run that ended, beside those of earlier trainings of it.

        Raises:
            InputError: It has not ended, or what it was judged by is not that of its end.
        """
        folder = self.run_folder(run.key)
        result = read_result(folder / "result.json")
        entries = {name: value for name, value in result.items() if name not in ("schema", "kind", "settings")}
        record = {
            "schema": result["schema"],
            "kind": KIND,
            "settings": {"scale": run.scale, **run.flags, "seed": run.seed},
            **entries,
            "key": run.key,
            "parent": run.parent,
            "step": run.step,
            "shared": self._shared(run.key).is_file(),
            "num_heads": RecordedRun.open(folder).num_heads,
            "went_through": sorted(went_through(RecordedRun.open(folder))),
            **_judged(RecordedRun.open(folder)),
        }
        if run.files is not None:
            record["examples"] = run.files.fingerprint
        final = result["provenance"].get("checkpoints", {}).get("final")
        before = [one["provenance"].get("checkpoints", {}).get("final") for one in self.records(run.key)]
        if final not in before or not before:
            path = self.record_file(run.key)
            write_json(path.with_stem(f"{run.key}-{str(final)[:12]}") if before else path, record)
        return record

    def trim_(self, run: PlannedRun) -> None:
        """Remove the checkpoints but the last of a recorded run that went on from another one, and others from its end.

        What it saved on its way was for the case that it is killed. Runs from initialisation keep theirs: others
        branch off there.
        """
        if run.parent is None:
            return
        for checkpoint in checkpoints(self.run_folder(run.key) / "checkpoints")[:-1]:
            remove_folder_(checkpoint)


def data_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fingerprints of the text that recorded runs were pretrained on, sorted."""
    pretrained = (record for record in records if record["settings"].get("task") is None)
    found = {record["provenance"]["data"].get("train") for record in pretrained} - {None}
    return sorted(map(str, found))


def _judged(run: RecordedRun) -> dict[str, Any]:
    """Return what pairs of runs are compared by: losses of held-out windows, or which questions are answered rightly.

    Associative recall has its accuracies in the result; every model answers the same queries.
    """
    if has_answers(run):
        answers = read_answers(run)
        asked = json.dumps([(each["id"], each["answer"]) for each in answers])
        return {
            "questions_hash": hashlib.sha256(asked.encode()).hexdigest(),
            "right": [int(each["right"]) for each in answers],
            "trained_on": run.config["data"].get("test_examples_trained_on", 0),
        }
    if "recall" in (run.result or {}):
        return {}
    evaluation, losses = read_evaluation(run.folder)
    judged = {"windows_hash": evaluation["windows_hash"], "window_losses": losses.windows.tolist()}
    # Evaluations of earlier versions do not tell it.
    return judged | ({"by_position": evaluation["by_position"]} if "by_position" in evaluation else {})
