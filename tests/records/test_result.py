"""The header of every result."""

import json
import sys
from pathlib import Path

import pytest

from saf.errors import InputError
from saf.records.provenance import command, invocation
from saf.records.result import read_result, result_header

RESULTS = Path(__file__).parents[2] / "results"
HEADER = ("schema", "kind", "settings", "provenance")
PROVENANCE = {"commit", "source_hash", "command", "versions", "device", "date", "checkpoints", "data"}


def test_a_header_says_what_was_asked_for_and_where_the_result_comes_from():
    header = result_header(
        "evaluation",
        {"out": Path("a/b"), "limit": None},
        device="cpu (x86_64)",
        checkpoints={"model": "c" * 64, "parent": None},
        data={"report": "d" * 64},
    )
    assert tuple(header) == HEADER
    assert header["settings"] == {"out": "a/b", "limit": None}
    found = header["provenance"]
    assert found.keys() == PROVENANCE
    assert (found["device"], found["checkpoints"], found["data"]) == (
        "cpu (x86_64)", {"model": "c" * 64}, {"report": "d" * 64},
    )  # fmt: skip
    assert found["versions"]["torch"]
    assert len(found["source_hash"]) == 64
    assert json.loads(json.dumps(header)) == header


@pytest.mark.parametrize("schema", ["saf.result/3", "saf.analysis/one-head/2", "saf.bench/2", "saf.run/1", None])
def test_anything_else_is_no_result(tmp_path, schema):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": schema}))
    with pytest.raises(InputError, match=r"x\.json is not a result: its schema is .*expected 'saf\.result/2'; give"):
        read_result(path)


def test_every_result_of_the_repository_is_read():
    found = [read_result(path) for path in sorted(RESULTS.rglob("*.json")) if path.name != "config.json"]
    assert {"update", "prefill", "run", "evaluation", "comparison"} <= {record["kind"] for record in found}


@pytest.mark.parametrize(("world", "nodes"), [("2", ""), ("4", "--nnodes 2 ")])
def test_the_command_of_a_group_begins_with_what_started_it(monkeypatch, world, nodes):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, value)
    token = invocation.set(("pretrain", "--data", "data"))
    try:
        assert command() == f"torchrun {nodes}--nproc-per-node 2 -m saf pretrain --data data"
    finally:
        invocation.reset(token)


@pytest.mark.parametrize(("out", "told"), [("/scratch/new/op.json", "op.json"), ("new/op.json", "new/op.json")])
def test_the_command_does_not_tell_where_one_machine_keeps_its_results(out, told):
    token = invocation.set(("pretrain", "--data", "/scratch/data", f"--parent={out}", "--out", out, "--updates", "4"))
    try:
        assert command() == f"saf pretrain --data data --parent={told} --out {told} --updates 4"
    finally:
        invocation.reset(token)


def test_the_command_of_a_script_does_not_tell_it_either(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/parity.py", "--out", "/scratch/new/event.json"])
    assert command() == "python tools/parity.py --out event.json"
