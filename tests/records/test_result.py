"""The header of every result, and the commit and the command that it is of."""

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import saf
from saf.errors import InputError
from saf.records.result import command, commit, read_result, result_header

RESULTS = Path(__file__).parents[2] / "results"


def test_a_header_has_the_settings_and_the_origin_of_a_result():
    hashes = {"checkpoints": {"model": "c" * 64, "parent": None}, "data": {"report": "d" * 64}}
    header = result_header("evaluation", {"out": Path("a/b"), "limit": None}, device="cpu", **hashes)
    assert tuple(header) == ("schema", "kind", "settings", "provenance")
    assert header["settings"] == {"out": "a/b", "limit": None}
    origin = header["provenance"]
    assert origin.keys() == {"commit", "source_hash", "command", "versions", "device", "date", *hashes}
    assert (origin["checkpoints"], origin["data"]) == ({"model": "c" * 64}, {"report": "d" * 64})
    assert json.loads(json.dumps(header)) == header


def test_anything_else_is_no_result(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": "saf.result/3"}))
    with pytest.raises(InputError, match=r"x\.json must have schema 'saf\.result/2', got .*; give"):
        read_result(path)


def test_every_result_of_the_repository_is_read():
    paths = [path for path in RESULTS.rglob("*.json") if path.name != "config.json"]
    kinds = {read_result(path)["kind"] for path in paths}
    assert {"update", "prefill", "run", "evaluation", "comparison"} <= kinds


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (None, "/env/bin/saf pretrain --parent=/scratch/new/a --out new/b", "saf pretrain --parent=a --out new/b"),
        ("saf.__main__", "/env/saf/__main__.py pretrain", "python -m saf pretrain"),
        (None, "tools/parity.py --out /scratch/new/event.json", "python tools/parity.py --out event.json"),
    ],
)
def test_the_command_names_no_folder_of_one_machine(monkeypatch, module, words, expected):
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and ModuleSpec(module, None))
    assert command() == expected


def test_a_commit_is_marked_where_the_package_or_its_recipes_were_edited(tmp_path, monkeypatch):
    for name in ("saf/__init__.py", "experiments/recipes/timing.py", "docs/log.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("# first\n")
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(saf, "__file__", str(tmp_path / "saf" / "__init__.py"))
    for edited, marked in (("docs/log.md", False), ("experiments/recipes/new.py", True)):
        (tmp_path / edited).write_text("# second\n")
        recorded = commit.__wrapped__() or ""
        assert (len(recorded.removesuffix("+")), recorded.endswith("+")) == (40, marked)
