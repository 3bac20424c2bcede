import pytest

from saf.experiments.columns import AGAINST, COLUMNS, OWN, Row


def test_a_time_ratio_is_of_whole_runs_and_none_where_one_was_not_timed():
    def record(seconds):
        return {"key": str(seconds), "time": {"everything": {"seconds": seconds}} if seconds else None}

    ratio = COLUMNS["time_ratio"].value
    assert ratio(Row({OWN: record(66.0), AGAINST: record(60.0)}, {})) == pytest.approx(1.1)
    assert ratio(Row({OWN: record(66.0), AGAINST: record(None)}, {})) is None


def test_times_of_whole_runs_and_of_what_came_after_the_parent():
    own = {"loading": 30.0, "training": 90.0, "afterwards": 500.0}

    def record(seconds, parent):
        return {"key": str(seconds), "time": {"everything": {"seconds": seconds}, "parts": own, "parent_parts": parent}}

    row = Row({OWN: record(66.0, {"training": 5.0}), AGAINST: record(60.0, None)}, {})
    assert COLUMNS["time_difference"].value(row) == pytest.approx(6.0)
    assert COLUMNS["continuation"].value(row) == pytest.approx(2.0)
    first = Row({OWN: record(60.0, None)}, {})
    assert COLUMNS["continuation"].value(first) is None, "from initialisation nothing was continued"
