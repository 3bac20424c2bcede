"""What events and forms of compilation cost, by the tool that measures it, uncompiled here."""

import json
from types import SimpleNamespace

import pytest

from saf.bench.kinds import KINDS
from saf.records.files import read_json
from saf.report.results import render_results
from tools import compare_compile

SMALL = ["--device", "cpu", "--model", "tiny", "--points", "16x1x1", "--repeats", "1", "--pairs", "2"]


@pytest.fixture
def uncompiled(monkeypatch):
    """Make updates of both forms without the compiler, and processes of their own in this one."""
    monkeypatch.setattr(compare_compile, "FORMS", {"whole": "off", "layers": "off"})

    def run(line, **_):
        asked = compare_compile.parser_of_words().parse_args(line[2:])
        asked.kernel = "auto"
        reply = json.dumps(compare_compile.events(asked)) if asked.form == "layers" else ""
        return SimpleNamespace(returncode=0 if reply else 3, stdout=f"{reply}\n")

    stand_in = SimpleNamespace(run=run, PIPE=None, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(compare_compile, "subprocess", stand_in)


def test_events_and_pairs_are_a_record_that_documents_show(uncompiled, tmp_path, capsys):
    out = tmp_path / "bench" / "event.json"
    assert compare_compile.main([*SMALL, "--tolerance", "100", "--out", str(out)]) == 1
    record = read_json(out)
    assert record["finished"]
    assert record["left_out"] == [{"what": "events, whole, caches empty", "why": "its process ended with code 3"}]
    events = [row for row in record["rows"] if row["part"] == "event"]
    assert [(row["event"], row["form"]) for row in events] == [
        (name, "layers") for name in ("start", "first event", "second event")
    ]
    assert [row["frozen"] for row in events] == sorted(row["frozen"] for row in events)
    pairs = [row for row in record["rows"] if row["part"] == "pair"]
    assert [(row["rate"], row["control"], row["pairs"]) for row in pairs] == [
        (rate, control, 2) for rate in (0.0, 0.25) for control in (True, False)
    ]
    for row in pairs:
        assert row["busy"]["whole"]["kernels"] == row["busy"]["layers"]["kernels"] > 100
        assert 0 < row["busy"]["layers"]["ms"] < 10 * row["arm_ms"]
    assert {"commit", "command", "versions", "device", "date"} <= set(record["provenance"])
    page = render_results(tmp_path, tmp_path)["results.md"]
    assert "## Compilation after an event" in page
    assert "| tiny | 16x1x1 | by decoder layers | empty | first event |" in page
    assert "each timed block the mean of 1 updates in a row, as in training. Control: the whole model" in page
    assert "| kernels whole | kernels by layers |" in page
    assert "its process ended with code 3" in page


def test_a_disturbed_pair_is_refused_and_caches_are_told(uncompiled, tmp_path):
    out = tmp_path / "pairs.json"
    compare_compile.main([*SMALL, "--tolerance", "1e-12", "--only", "pairs", "--out", str(out)])
    assert "refused" in render_results(tmp_path, tmp_path)["results.md"]
    asked = compare_compile.parser_of_words().parse_args(SMALL)
    lost = {"lost_s": 1.0, "first_s": 1.0, "update_s": 0.1, "frozen": 0}
    found = {"start": lost, "ahead": {"seconds": 9.0, "layouts": 12, "bytes": 2**31}, "first event": lost}
    rows = compare_compile.event_rows(asked, "layers", "empty", found)
    assert [(row["part"], row.get("caches")) for row in rows] == [
        ("event", "empty"),
        ("event", "ahead"),
        ("ahead", None),
    ]
    record = read_json(out) | {"rows": rows}
    text = [str(part) for part in KINDS["compile"].tables(record)]
    assert "Lost is what the updates after an event took" in text[0]
    assert len({KINDS["compile"].measured(row) for row in rows}) == len(rows)
