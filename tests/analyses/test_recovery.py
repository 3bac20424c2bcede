"""The gap of the training loss after an intervention, on written metrics."""

import math

import pytest

from experiments.analyses import analysis_figure
from experiments.analyses.recovery import Recovery
from saf.errors import InputError
from saf.records.files import write_lines
from saf.records.run import append_event

TOTAL = 20


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes the metrics of a run, with an event where it begins after one."""

    def make(name, loss, begin=0, tokens=8):
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"update": at, "tokens": at * tokens, "loss": loss(at)} for at in range(begin + 1, TOTAL + 1)]
        write_lines(folder / "metrics.jsonl", lines)
        if begin:
            append_event(folder, "freeze", {"update": begin, "heads": [[0, 0]], "loss_before": 3.0, "loss_after": 3.02})
        return folder

    return make


def test_the_gap_is_smoothed_and_shown_after_so_many_updates_and_at_the_end(make_run):
    ordinary = make_run("ordinary", lambda at: 4 - at / 10)
    frozen = make_run("frozen", lambda at: 4 - at / 10 + (20 - at) / 100, begin=10)
    last = make_run("last", lambda at: 1.0, begin=TOTAL)
    record = Recovery(ordinary=ordinary, runs=(frozen, last), window=3, after=4).measure()
    run, after_training = record["runs"]
    assert (run["update"], run["share"], run["heads"]) == (10, 0.5, 1)
    assert run["updates"] == list(range(11, 21))
    assert run["gap_after"] == pytest.approx((20 - 14) / 100), "a centred mean leaves a straight line as it is"
    assert run["gap_at_end"] == pytest.approx((0.01 + 0.0) / 2), "of the two updates that there are"
    assert run["at_once"] == pytest.approx(100 * math.expm1(0.02))
    assert (after_training["share"], after_training["gap_after"], after_training["updates"]) == (1.0, None, [])
    _, table = Recovery.tables(record)
    assert table.rows[0] == ("50%", "+2.02%", "–", "+0.0600", "–", "+0.0050", "–")
    assert "after 50%" in analysis_figure([record])


def test_runs_that_cannot_be_compared_are_named(make_run, tmp_path):
    ordinary = make_run("ordinary", lambda at: 1.0)
    other = make_run("other", lambda at: 1.0, begin=10, tokens=9)
    for first, second, message in (
        (ordinary, ordinary, "no intervention in force"),
        (ordinary, other, "differ in tokens"),
        (tmp_path, other, "has no updates"),
    ):
        with pytest.raises(InputError, match=message):
            Recovery(ordinary=first, runs=(second,)).measure()
