"""The results of a folder: runs and records, and which of the records' measurements are the newest of their kind."""

import re
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import read_json
from saf.records.run import RecordedRun
from saf.records.text import natural_order
from saf.report.benchmarks import KINDS
from saf.report.benchmarks.speed import OTHER_DEVICE, compares_arms, model_of

LISTS = ("rows", "memory")
"""Entries of a benchmark that hold measurements."""

_Order = tuple[bool, str, int]
"""Of measurements of the same thing: accepted ones after refused ones, then by date, then by the files' order."""


@dataclass(frozen=True)
class File:
    """Hold one JSON record, and its name in the document."""

    path: Path
    record: Mapping[str, Any]
    name: str
    is_analysis: bool = False

    @property
    def section(self) -> str:
        """Return its section: the kind of a benchmark, with " memory" when it timed nothing, "analysis", "other"."""
        if self.is_analysis:
            return "analysis"
        if compares_arms(self.record) and not self.record["rows"]:
            return f"{self.record['kind']} memory"
        return str(self.record.get("kind", "other"))

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Return where the record comes from, as far as it says."""
        return self.record.get("provenance") or {}


def find(results: Path, analyses: Container[str] = ()) -> tuple[dict[Path, list[RecordedRun]], list[File]]:
    """Return the runs by the folder that holds them, and every other JSON record, in order.

    Records of experiments, which say so, are left out: they are read as tables of arms.

    `analyses` are the kinds of records of analyses.

    Raises InputError when `results` is no folder, or holds a JSON file that cannot be read.
    """
    if not results.is_dir():
        raise InputError(
            f"{results} is not a folder of results; expected one with runs or what `--out` of commands wrote"
        )
    found = list(results.rglob("*.json"))
    folders = sorted({path.parent for path in found if path.name == "config.json"}, key=_by_name)
    trainings: dict[Path, list[RecordedRun]] = {}
    for folder in folders:
        trainings.setdefault(folder.parent, []).append(RecordedRun.open(folder))
    paths = [path for path in found if not any(folder in path.parents for folder in folders)]
    stems = [path.stem for path in paths]
    files = []
    for path in sorted(paths, key=_by_name):
        if "experiment" in (record := read_json(path)):
            continue
        name = path.stem if stems.count(path.stem) == 1 else path.relative_to(results).with_suffix("").as_posix()
        files.append(File(path, record, name, str(record.get("kind")) in analyses))
    return trainings, _telling_devices(files)


def _telling_devices(files: Sequence[File]) -> list[File]:
    """Return the files, with a benchmark's device told beside its rows where most benchmarks ran on another one."""
    devices = Counter(file.provenance.get("device") for file in files if file.record.get("kind") in KINDS)
    usual = max(devices, key=lambda device: devices[device], default=None)
    return [
        replace(file, record={**file.record, "provenance": {**file.provenance, OTHER_DEVICE: short_name(str(device))}})
        if (device := file.provenance.get("device")) in devices.keys() - {usual, None}
        and file.record.get("kind") in KINDS
        else file
        for file in files
    ]


def short_name(device: str) -> str:
    """Return a GPU's name without its maker's and its memory.

    >>> [short_name(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "cpu (x86_64, 2 threads)")]
    ['H100', 'GeForce RTX 4090', 'cpu (x86_64, 2 threads)']
    """
    return re.sub(r"[\s-]\d+\s?GB\b.*", "", device.removeprefix("NVIDIA "))


def newest(files: Sequence[File]) -> list[File]:
    """Return the files with those measurements that no other file has newer; a file without any is left out.

    Two measurements are of the same thing when kind, device, point, baseline and arm are, and what is unusual in their
    settings; a kernel by name is another arm than PyTorch's choice where layers go another way with it. A refused one
    never takes the place of one that was accepted. Controls and free bounds stay with what they were measured beside.
    """
    standing: dict[Hashable, _Order] = {}
    for place, file in enumerate(files):
        for key, order in _measurements(file, place):
            standing[key] = max(order, standing.get(key, order))
    found = []
    for place, file in enumerate(files):
        measured = [key for key, _ in _measurements(file, place)]
        mine = {key for key in measured if standing[key][-1] == place}
        if mine:
            found.append(_only(file, mine))
        elif not measured:
            found.append(file)
    return found


def superseded(files: Sequence[File]) -> list[File]:
    """Return the files of whose measurements each stands newer in another file."""
    standing = {file.path for file in newest(files)}
    return [file for file in files if file.path not in standing]


def _measurements(file: File, place: int) -> Iterator[tuple[Hashable, _Order]]:
    """Yield what a file measured: a key for each thing, and how it ranks among measurements of the same thing."""
    date = str(file.provenance.get("date"))
    if file.section == "analysis":
        # A folder holds the analyses of one checkpoint.
        yield (file.record["kind"], file.path.parent), (True, date, place)
    for name in LISTS if file.record.get("kind") in KINDS else ():
        for entry in file.record.get(name) or []:
            key = _key(file, name, entry)
            if key is not None:
                yield key, (not entry.get("refused", False), date, place)


def _key(file: File, name: str, entry: Mapping[str, Any]) -> Hashable | None:
    """Return what one entry of a benchmark measures; None for one that only serves others."""
    kind, device = file.record["kind"], file.provenance.get("device")
    unusual = KINDS[kind].unusual(file.record)
    if name == "memory":
        point = tuple(entry["point"].items())
        return kind, device, name, unusual, model_of(file.record), point, entry["arm"]
    measured = KINDS[kind].measured(entry)
    return None if measured is None else (kind, device, name, unusual, measured)


def _only(file: File, standing: set[Hashable]) -> File:
    """Return a file with the entries whose measurements stand, and those that serve them."""
    lists = {}
    for name in LISTS if file.section != "analysis" else ():
        entries = file.record.get(name) or []
        keys = [_key(file, name, entry) for entry in entries]
        stand = [entry for entry, key in zip(entries, keys, strict=True) if key is None or key in standing]
        lists[name] = stand if standing & set(keys) else []
    return replace(file, record={**file.record, **{name: lists[name] for name in lists if name in file.record}})


def _by_name(path: Path) -> list[tuple[int, Any]]:
    return natural_order(path.as_posix())
