"""Damaged files are refused by name: a share of the trial in tools/trials, and the faults that it once found."""

import os
import random
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tools.trials.damage import Damage
from tools.trials.files import FAULTS, Case, World
from tools.trials.repeated import try_disk

FOUND = [
    ("run", "metrics.jsonl", "swapped"),
    ("run", "config.json", "swapped"),
    ("run", "clock.jsonl", "emptied"),
    ("run", "event-1.safetensors", "unreadable"),
    ("run", "checkpoints/step-8/manifest.json", "removed"),
    ("stopped run", "metrics.jsonl", "swapped"),
    ("stopped run", "metrics.jsonl", "lines the other way"),
    ("stopped run", "evaluations.jsonl", "emptied"),
    ("stopped run", "evaluations.jsonl", "line 1 again"),
    ("stopped run", "evaluations.jsonl", "line 2 is gone"),
    ("stopped run", "event-1.safetensors", "removed"),
    ("stopped run", "config.json", "{} in its place"),
    ("saved model", "config.json", "{} in its place"),
    ("saved model", "saf.json", "{} in its place"),
    ("saved model", "saf.safetensors", "unreadable"),
    ("calibration", "layer-000/layer.json", "{} in its place"),
    ("calibration", "calibration.json", "{} in its place"),
    ("data folder", "report.digests", "removed"),
    ("store of runs", "store.json", "{} in its place"),
    ("event of an earlier version", "freeze.json", "a folder in its place"),
    ("event of an earlier version", "result.json", "provenance twice"),
]


@pytest.fixture(scope="module")
def world():
    root = Path(tempfile.mkdtemp(prefix="saf-damaged-"))
    # Where the superuser runs tests, an unreadable file is met as someone else, who must reach it.
    os.chmod(root, 0o755)
    yield World(root)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def cases(world) -> dict[tuple[str, str, str], Case]:
    return {(case.subject.name, str(case.file), case.damage.name): case for case in world.cases(random.Random(0))}


def edited(*order: int):
    """Return what puts the first lines of a file in another order, before the rest."""

    def edit(path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*(lines[number] for number in order), *lines[2:]]))

    return edit


def provenance_twice(path: Path) -> None:
    path.write_text(path.read_text().rstrip().removesuffix("}") + ', "provenance": "twice"}')


EDITS = {"line 1 again": edited(0, 0, 1), "line 2 is gone": edited(0), "provenance twice": provenance_twice}


@pytest.mark.parametrize("found", FOUND, ids=" ".join)
def test_what_a_trial_once_found_is_refused_or_told(world, cases, found):
    case = cases.get(found) or Case(world.subject(found[0]), Path(found[1]), Damage(found[2], EDITS[found[2]]))
    if found[2] == "unreadable" and not all(folder.stat().st_mode & stat.S_IXOTH for folder in world.root.parents):
        pytest.skip("the temporary folder lies in one that others than its owner cannot enter")
    assert world.try_(case) in ("refused", "told")


def test_damaged_files_of_every_kind(world, cases):
    """Resuming a run takes a second and showing one a hundredth: they are left to the whole trial."""
    quick = [case for case in cases.values() if case.subject.name not in ("stopped run", "run")]
    outcomes = {case.words: world.try_(case) for case in quick}
    assert {words: what for words, what in outcomes.items() if what.split(":")[0] in FAULTS} == {}
    assert list(outcomes.values()).count("refused") > 700


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path):
    """Three of some hundred writes: the whole trial takes every one."""
    found = {words: what for _, words, what in try_disk(tmp_path, 3, 0)}
    assert set(found.values()) <= {"same bits", "refused, then same bits"}
    assert len(found) == 3
