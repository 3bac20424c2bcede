import json

import pytest

from saf.cli.bench import Command
from saf.cli.parsing import parse
from saf.errors import InputError, UnsupportedError
from saf.records.files import read_json

SMALL = ["--device=cpu", "--pairs=2", "--tolerance=1e9", "--warmup=1", "--repeats=1", "--no-profile", "--rates", "0.5"]


def run(name: str, *words: object) -> dict:
    return parse(Command, [name, *map(str, (*SMALL, *words))], prog="saf bench").run()


def test_update_prints_a_table_and_writes_its_record(tmp_path, capsys):
    path = tmp_path / "new" / "update.json"
    record = run("update", "--out", path, "--model", "tiny", "--points", "16x1x1", "--pruned")
    printed = capsys.readouterr()
    assert "Baseline: the same model with ordinary attention" in printed.out
    assert "16x1x1" in printed.out
    assert "50%" in printed.out
    assert "pruned" in printed.out
    assert {row["role"] for row in record["rows"]} == {"control", "frozen", "free", "pruned"}
    assert "toeplitz" in printed.out
    assert "2 pairs)" in printed.err
    assert read_json(path) == record


def test_json_alone_on_standard_output(tmp_path, capsys):
    path = tmp_path / "prefill.json"
    run("prefill", "--out", path, "--model", "tiny", "--points", "16x1", "--json")
    assert json.loads(capsys.readouterr().out) == read_json(path)


def test_op_says_what_it_left_out(tmp_path, capsys):
    shape = ("--num-heads", 4, "--num-kv-heads", 2, "--head-dim", 8, "--points", "32x1", "--others", "auto")
    run("op", "--out", tmp_path / "op.json", *shape, "--backends", "toeplitz")
    printed = capsys.readouterr().out
    assert "whole layer, 4 heads of 8, 2 of keys, forward and backward, called" in printed
    assert "with grouped queries frozen heads share values" in printed


def test_a_refused_measurement_shows_no_ratio(tmp_path, capsys):
    words = ("--out", tmp_path / "op.json", "--num-heads", 2, "--head-dim", 8, "--points", "32x1", "--no-free")
    run("op", *words, "--parts", "frozen", "--backends", "toeplitz", "--tolerance", "1e-9")
    printed = capsys.readouterr().out
    assert "Refused: 1 head alone, 2 heads of 8, 2 of keys, forward, called, 32x1: two times" in printed
    assert "the same ordinary heads differ by" in printed
    assert "more --pairs, or accept more with --tolerance" in printed
    assert "1 head alone" in printed


def test_a_refused_measurement_of_models_says_so(tmp_path, capsys):
    run("prefill", "--out", tmp_path / "p.json", "--model", "tiny", "--points", "16x1", "--tolerance", "1e-9")
    assert "two ordinary models differ by" in capsys.readouterr().out


def test_nothing_measured_is_an_error(tmp_path):
    path = tmp_path / "bench.json"
    with pytest.raises(UnsupportedError, match="nothing could be measured"):
        run("update", "--out", path, "--model", "tiny", "--points", "16x1x1", "--seconds", "1e-3")
    assert read_json(path)["left_out"]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="exists already"):
        run("op", "--out", path)


def test_operators_take_no_settings_of_models(tmp_path, capsys):
    """What would do nothing is no option: operators are never compiled in advance nor run in fresh processes."""
    for option in ("--precompile", "--fresh", "--memory", "--settle-ms=5"):
        with pytest.raises(SystemExit):
            run("op", "--out", tmp_path / "op.json", option)
        assert option.split("=")[0] in capsys.readouterr().err
