"""One table of arms: a terminal, a page and a document write the same numbers."""

import pytest

from saf.evaluate.compare import speed_caveat
from saf.evaluate.side_by_side import arm_names, arms_table, compare_all
from saf.records.run import RecordedRun
from tests.report.synthetic import Shape, write_pair


@pytest.mark.parametrize(("spread", "caveat"), [([0.5, 0.9], ""), ([0.5, 1.5], "overlap")])
def test_a_ratio_whose_spreads_overlap_is_not_clear(spread, caveat):
    record = {"update_time_ratio": 1.35, "update_seconds_spread_ordinary": [1.0, 2.0], "heads": 6, "num_heads": 12}
    assert speed_caveat({**record, "update_seconds_spread_frozen": spread}).endswith(caveat)
    assert bool(speed_caveat({**record, "update_seconds_spread_frozen": spread})) == bool(caveat)


@pytest.mark.parametrize(("heads", "busy"), [(3, True), (4, False), (9, False)])
def test_more_than_free_heads_would_save_is_a_busy_machine(tmp_path, heads, busy):
    """Of 12 heads 3 make an update at most 4/3 times as fast, 4 make it 3/2, 9 make it 4."""
    runs = [RecordedRun.open(folder) for folder in write_pair(tmp_path, Shape(rate=heads / 12), speedup=1.4)]
    comparisons = compare_all(runs, arm_names(runs))
    assert comparisons[0].record["heads"] == heads
    assert comparisons[0].record["update_time_bound"] == pytest.approx(12 / (12 - heads))
    assert ("machine was busy" in comparisons[0].record["update_time_caveat"]) == busy
    table = arms_table(runs, arm_names(runs), comparisons)
    for column in ("median update", "whole run", "whole run, warm"):
        assert table.rows[1][table.columns.index(column)].endswith("(unclear)") == busy, column
    brief = arms_table(runs, arm_names(runs), comparisons, brief=True)
    assert ("(unclear); without loading" in brief.notes[0]) == busy


def test_too_few_updates_have_no_ratio_and_say_so():
    assert speed_caveat({"update_time_ratio": None}) == "too few updates to tell which arm is faster"


def test_the_brief_table_has_fewer_columns_and_the_same_numbers(tmp_path):
    runs = [RecordedRun.open(folder) for folder in write_pair(tmp_path)]
    names = arm_names(runs)
    comparisons = compare_all(runs, names)
    brief, whole = (arms_table(runs, names, comparisons, brief=brief) for brief in (True, False))
    assert set(brief.columns) < set(whole.columns)
    for short, long in zip(brief.rows, whole.rows, strict=True):
        cells = dict(zip(whole.columns, long, strict=True))
        assert dict(zip(brief.columns, short, strict=True)).items() <= cells.items()
    record = comparisons[0].record
    assert record is not None
    assert f"({record['update_time_ratio']:.3f}×)" in str(brief.rows[1][brief.columns.index("median update")])
    assert whole.rows[1][-2:] == ("42 s (+5.00%)", "32 s (−5.88%)")
    assert "frozen: the whole run 42 s against 40 s (+5.00%); without loading and compilation 32 s" in brief.notes[0]
    assert str(brief.rows[1][brief.columns.index("heads frozen")]) == "3 of 12"
