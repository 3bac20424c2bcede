"""Damaged files: each kind of file that the product reads, damaged in every way, then read.

What comes of it is right when a SafError names the file (`refused`), when what was read is bit for bit what it was
(`harmless`: the damage is of what is not read, or says the same), or when a warning or the list of what a run lacks
names the file (`told`). Anything else is a fault: `silent`, a `traceback`, or `nameless`.
"""

import os
import random
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import SafError
from saf.records.files import tensors_hash
from tools.trials.damage import Damage, damages
from tools.trials.folders import Subject, make_world, subjects

NOBODY = 65534
"""As whom an unreadable file is met: the superuser reads every file."""
FAULTS = ("silent", "traceback", "nameless")


@dataclass(frozen=True)
class Case:
    """Hold one damaged file."""

    subject: Subject
    file: Path
    """Its path within the folder."""
    damage: Damage

    @property
    def words(self) -> str:
        """Return what was damaged and how."""
        return f"{self.subject.name}, {self.file}, {self.damage.name}"


class World:
    """Keep whole folders of every kind, and try damaged copies in their place."""

    def __init__(self, root: Path, *, only: Collection[str] = ()):
        """Make the folders below `root`; of subjects `only`, if any are named."""
        self.root, self._kept = root / "world", root / "kept"
        make_world(self.root, 0)
        make_world(root / "twin", 1)
        self._twin = root / "twin"
        shutil.copytree(self.root, self._kept, symlinks=True)
        self.subjects = [each for each in subjects(self.root) if not only or each.name in only]
        self._whole: dict[str, Any] = {}

    def subject(self, name: str) -> Subject:
        """Return a kind of folder by its name."""
        return next(each for each in self.subjects if each.name == name)

    def cases(self, draw: random.Random, count: int | None = None) -> list[Case]:
        """Return every case in a drawn order, or `count` of them, each file as often as any other."""
        by_file = []
        for subject in self.subjects:
            folder = self._kept / subject.folder
            for file in subject.files(folder):
                path = folder / file
                twin = None if subject.alone else self._twin / subject.folder / file
                found = [Case(subject, file, damage) for damage in damages(path, twin, draw)]
                draw.shuffle(found)
                by_file.append(found)
        draw.shuffle(by_file)
        turns = max(map(len, by_file))
        return [found[turn] for turn in range(turns) for found in by_file if turn < len(found)][:count]

    def try_(self, case: Case) -> str:
        """Damage a file, read its folder, put the folder back, and return what came of it."""
        subject = case.subject
        if subject.name not in self._whole:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what an earlier version wrote
                self._whole[subject.name] = _facts(subject.read, self.root / subject.folder)
            self._restore_(subject)
        try:
            folder = self.root / subject.folder
            case.damage.apply(folder / case.file)
            with _without_privileges(folder, case.damage.name == "unreadable"):
                names = self._names(case)
                return _outcome(subject.read, folder, names, self._whole[subject.name])
        finally:
            self._restore_(subject)

    def _names(self, case: Case) -> list[str]:
        """Return the names of which a message must have one: of a file from elsewhere, also of those it contradicts."""
        file = self._kept / case.subject.folder / case.file
        if case.damage.name in ("removed", "a link to nothing", "a folder in its place"):
            # A folder that lacks it may be none of its kind.
            lacking = self.root / case.subject.folder / case.file.parent
            names = [case.file.name, f"{lacking} ", f"{lacking}: "]
        elif case.damage.name != "swapped" and not case.subject.by_pairs:
            return [case.file.name]
        else:
            names = [path.name for path in file.parent.iterdir()]
        return [*names, "freeze.safetensors", "events.jsonl"] if case.subject.by_pairs else names

    def _restore_(self, subject: Subject) -> None:
        shutil.rmtree(self.root / subject.folder)
        shutil.copytree(self._kept / subject.folder, self.root / subject.folder, symlinks=True)


def _outcome(read: Callable[[Path], Any], folder: Path, names: Collection[str], whole: Any) -> str:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = _facts(read, folder)
        except SafError as error:
            return "refused" if any(name in str(error) for name in names) else f"nameless: {error}"
        except BaseException as error:  # whatever comes is what is counted
            return f"traceback: {type(error).__name__}: {error}"
    if found == whole:
        return "harmless"
    told = [str(each.message) for each in heard] + list(found.get("lacks", ()) if isinstance(found, dict) else ())
    if any(name in text for name in names for text in told):
        return "told"
    return f"silent: differs in {_differing(found, whole)}"


def _facts(read: Callable[[Path], Any], folder: Path) -> Any:
    return _plain(read(folder))


def _plain(value: Any) -> Any:
    """Return a value as what compares exactly: tensors as their hash."""
    if isinstance(value, Tensor):
        return tensors_hash({"": value})
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | int | str | bool | None | Path):
        return repr(value)
    return [repr(type(value)), _plain(vars(value))] if hasattr(value, "__dict__") else repr(value)


def _differing(found: Any, whole: Any) -> str:
    if isinstance(found, dict) and isinstance(whole, dict):
        names = [name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)]
        return ", ".join(f"{name} ({_differing(found.get(name), whole.get(name))})" for name in sorted(names)[:3])
    if isinstance(found, list) and isinstance(whole, list) and len(found) == len(whole):
        return "; ".join(_differing(a, b) for a, b in zip(found, whole, strict=True) if a != b)[:200]
    return f"{str(found)[:60]} for {str(whole)[:60]}"


@contextmanager
def _without_privileges(folder: Path, wanted: bool) -> Iterator[None]:
    if not wanted or os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def try_files(root: Path, *, count: int | None, seed: int, only: Collection[str] = ()) -> Iterator[tuple[Case, str]]:
    """Yield cases and what came of each; the same for the same seed."""
    torch.set_num_threads(1)
    world = World(root, only=only)
    for case in world.cases(random.Random(seed), count):
        yield case, world.try_(case)
