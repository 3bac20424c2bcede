"""The file of a benchmark and the record that its caller shows."""

from saf.records.files import read_json


def test_the_seconds_are_those_of_the_file_however_late_they_are_read(make_recorder, tmp_path, monkeypatch):
    with make_recorder(tmp_path / "bench.json") as recorder:
        pass
    monkeypatch.setattr(type(recorder.budget), "spent", 99.0)
    assert recorder.record == read_json(tmp_path / "bench.json")
