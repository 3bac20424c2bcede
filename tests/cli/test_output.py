"""Tables on narrow terminals: numbers stay whole."""

import pytest

from saf.cli.bench_errors import tables
from saf.cli.output import columns, show

NUMBERS = ["1.03e-06", "0.136\N{EN DASH}0.205", "-12.5%", "123,456"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_narrow_terminal_splits_no_number(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    head = ["name of each", "relative error", "range", "change", "tokens"]
    show({}, columns("title", head, [["50% toeplitz", *NUMBERS], ["ordinary", *NUMBERS]]), as_json=False)
    printed = capsys.readouterr().out
    assert all(printed.count(number) == 2 for number in NUMBERS)
    assert all(word in printed for word in ("relative", "error", "toeplitz", "ordinary"))
    if width >= 60:
        assert max(map(len, printed.splitlines())) <= width


def test_a_long_word_is_folded_and_nothing_of_it_is_lost(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    digest = "0123456789abcdef" * 4
    show({}, columns("files", ["file", "size", "sum"], [["a.json", "1.0 MB", digest]]), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    assert "".join(line.split("│")[3].strip() for line in lines if line.startswith("│")) == digest


def test_the_errors_of_a_layer_fit_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pair = {"max_abs": 1.03e-06, "relative_l2": 3.59e-07}
    about = {"part": "layer", "backend": "toeplitz", "precision": "fp32", "tensor": "query projection"}
    row = {**about, **pair, "limit": 1e-6, "within": False, "beside": pair, "eager": pair}
    machine = {"versions": {}, "device": "cpu", "driver": None}
    show({}, *tables({"provenance": machine, "rows": [row], "left_out": []}), as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("1.03e-06") == printed.count("3.59e-07") == 3
    assert "against eager attention" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80
