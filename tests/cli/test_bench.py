"""`saf bench` prints the tables of its record, writes it, and says what it refused or left out."""

import json

import pytest

from saf.cli.bench import parse_words
from saf.errors import InputError, UnsupportedError
from saf.records.files import read_json

SMALL = ["--device=cpu", "--pairs=2", "--tolerance=1e9", "--warmup=1", "--repeats=1", "--no-profile", "--rates", "0.5"]


def run(name: str, *words: object) -> dict:
    return parse_words([name, *map(str, (*SMALL, *words))]).run()


def test_update_prints_a_table_and_writes_its_record(tmp_path, capsys):
    path = tmp_path / "new" / "update.json"
    record = run("update", "--out", path, "--model", "tiny", "--points", "16x1x1", "--pruned", "--json")
    assert {row["role"] for row in record["rows"]} == {"control", "frozen", "free", "pruned"}
    assert json.loads(capsys.readouterr().out) == read_json(path) == record
    with pytest.raises(InputError, match="exists already"):
        run("op", "--out", path)


def test_a_refused_measurement_shows_no_ratio(tmp_path, capsys):
    with pytest.raises(UnsupportedError, match="more --pairs, or accept more with --tolerance"):
        run("op", "--out", tmp_path / "op.json", "--model", "tiny", "--points", "32x1", "--tolerance", "1e-9")
    out = capsys.readouterr().out
    assert "whole layer, forward" in out
    assert max(len(line) for line in out.splitlines() if line.startswith("│")) <= 80


def test_nothing_measured_is_an_error(tmp_path):
    path = tmp_path / "bench.json"
    with pytest.raises(UnsupportedError, match="nothing could be measured"):
        run("update", "--out", path, "--model", "tiny", "--points", "16x1x1", "--seconds", "1e-3")
    assert read_json(path)["left_out"]
