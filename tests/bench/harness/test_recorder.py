"""The file of a benchmark, the record that its caller shows, and errors in few words."""

import io
import json

import pytest
import torch

from saf.bench.harness.recorder import MOST, first_sentence, in_short
from saf.bench.model import worker
from saf.errors import InputError
from saf.records.files import read_json

MEMORY = (
    "CUDA out of memory. Tried to allocate 24.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.06 GiB is "
    "free. Process 17 has 20.25 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(MEMORY), "OutOfMemoryError: CUDA out of memory"),
        (InputError("rates must be shares in [0, 1]; got 1.5"), "InputError: rates must be shares in [0, 1]; got 1.5"),
        (TypeError("it raised:\nImportError: no ptxas\nmore"), "TypeError: it raised: ImportError: no ptxas"),
        (ValueError("no such thing\nsecond line"), "ValueError: no such thing"),
        (KeyError(), "KeyError: no reason given"),
    ],
)
def test_the_type_and_the_first_sentence(error, words):
    assert in_short(error) == words


def test_a_long_sentence_is_cut():
    assert first_sentence("a" * MOST) == "a" * MOST
    assert first_sentence("a" * (MOST + 1)) == "a" * (MOST - 1) + "…"


def test_a_process_replies_with_its_error(monkeypatch, capsys):
    def fails(specification: dict):
        raise torch.OutOfMemoryError(f"{specification['arm']}: {MEMORY}")

    monkeypatch.setattr(worker, "measure", fails)
    monkeypatch.setattr(worker, "end_with", lambda parent: None)  # it would watch this process for as long as it lives
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"arm": "one"})))
    worker.main()
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": "OutOfMemoryError: one: CUDA out of memory"}
    assert "Traceback" in printed.err


def test_the_seconds_are_those_of_the_file_however_late_they_are_read(make_recorder, tmp_path, monkeypatch):
    with make_recorder(tmp_path / "bench.json") as recorder:
        pass
    monkeypatch.setattr(type(recorder.budget), "spent", 99.0)
    assert recorder.record == read_json(tmp_path / "bench.json")
