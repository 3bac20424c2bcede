"""`saf freeze` leaves a checkpoint with the record of its event, or nothing."""

import pytest

from saf.checkpoint import verify
from saf.records import run as records
from saf.records.run import read_events
from tests.train.helpers import Killed, die_at


def words(arms, out):
    return ("freeze", arms[0], "--out", out, "--sequences", 4, "--device", "cpu")


def test_killed_before_its_line_is_written_it_leaves_no_checkpoint(saf, arms, tmp_path, monkeypatch):
    out = tmp_path / "frozen"
    with monkeypatch.context() as patch:
        die_at(patch, records, "append_line", 1)
        with pytest.raises(Killed):
            saf(*words(arms, out))
    assert not out.exists()
    assert saf(*words(arms, out))[0] == 0
    (event,) = read_events(out)
    assert event.tensors().keys() > {"alpha", "rho"}
    assert verify(out)["files"].keys() > {"events.jsonl", "event-1.safetensors"}
