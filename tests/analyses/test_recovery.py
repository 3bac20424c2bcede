import math

import pytest

from experiments.analyses import svg
from experiments.analyses.recovery import Settings, measure, tables
from saf.errors import InputError
from saf.records.events import append_event
from saf.records.files import write_lines

TOTAL = 20


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes the metrics of a run, with an event where it begins after one."""

    def make(name, loss, begin=0, tokens=8):
        folder = tmp_path / name
        folder.mkdir()
        updates = range(begin + 1, TOTAL + 1)
        write_lines(
            folder / "metrics.jsonl", [{"update": at, "tokens": at * tokens, "loss": loss(at)} for at in updates]
        )
        if begin:
            append_event(folder, "freeze", {"update": begin, "heads": [[0, 0]], "loss_before": 3.0, "loss_after": 3.02})
        return folder

    return make


def test_the_gap_is_smoothed_and_told_after_so_many_updates_and_at_the_end(make_run):
    ordinary = make_run("ordinary", lambda at: 4 - at / 10)
    frozen = make_run("frozen", lambda at: 4 - at / 10 + (20 - at) / 100, begin=10)
    record = measure(Settings(ordinary=ordinary, runs=(frozen,), window=3, after=4))
    (run,) = record["runs"]
    assert (run["update"], run["share"], run["heads"]) == (10, 0.5, 1)
    assert run["updates"] == list(range(11, 21))
    assert run["gap_after"] == pytest.approx((20 - 14) / 100), "a centred mean leaves a straight line as it is"
    assert run["gap_at_end"] == pytest.approx((0.01 + 0.0) / 2), "of the two updates that there are"
    assert run["at_once"] == pytest.approx(100 * math.expm1(0.02))
    _, table = tables(record)
    assert table.iloc[0].tolist() == ["50%", "+2.02%", "+0.0600", "+0.0050"]
    assert "after 50%" in svg([record])


def test_an_event_after_training_has_a_cost_at_once_and_no_gap(make_run):
    ordinary, frozen = make_run("ordinary", lambda at: 1.0), make_run("frozen", lambda at: 1.0, begin=10)
    last = make_run("last", lambda at: 1.0, begin=TOTAL)
    record = measure(Settings(ordinary=ordinary, runs=(frozen, last)))
    _, run = record["runs"]
    assert (run["share"], run["gap_after"], run["gap_at_end"], run["updates"]) == (1.0, None, None, [])
    assert run["at_once"] == pytest.approx(100 * math.expm1(0.02))
    _, table = tables(record)
    assert table.iloc[1].tolist()[:2] == ["100%", "+2.02%"]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 50])
def test_centred_means_are_of_the_values_that_there_are(make_run, window):
    ordinary, frozen = make_run("ordinary", lambda at: 0.0), make_run("frozen", lambda at: float(at * at), begin=10)
    (run,) = measure(Settings(ordinary=ordinary, runs=(frozen,), window=window))["runs"]
    for at, found in zip(range(11, 21), run["gap"], strict=True):
        around = [v * v for v in range(11, 21) if -(window // 2) <= v - at <= (window - 1) // 2]
        assert found == pytest.approx(sum(around) / len(around))


def test_what_cannot_be_compared_is_named(make_run, tmp_path):
    ordinary = make_run("ordinary", lambda at: 1.0)
    with pytest.raises(InputError, match="no intervention in force"):
        measure(Settings(ordinary=ordinary, runs=(ordinary,)))
    other = make_run("other", lambda at: 1.0, begin=10, tokens=9)
    with pytest.raises(InputError, match="differ in tokens"):
        measure(Settings(ordinary=ordinary, runs=(other,)))
    short = make_run("short", lambda at: 1.0)
    write_lines(short / "metrics.jsonl", [{"update": 5, "tokens": 40, "loss": 1.0}])
    with pytest.raises(InputError, match="shares no update after its event at 10"):
        measure(Settings(ordinary=short, runs=(other,)))
    with pytest.raises(InputError, match="has no updates"):
        measure(Settings(ordinary=tmp_path, runs=(other,)))
    with pytest.raises(InputError, match="one run at least"):
        measure(Settings(ordinary=ordinary, runs=()))
