import pytest

from saf.experiments.columns import AGAINST, COLUMNS, OWN, Row


def test_a_time_ratio_is_of_whole_runs_and_none_where_one_was_not_timed():
    def record(seconds):
        return {"key": str(seconds), "time": {"everything": {"seconds": seconds}} if seconds else None}

    ratio = COLUMNS["time_ratio"].value
    assert ratio(Row({OWN: record(66.0), AGAINST: record(60.0)}, {})) == pytest.approx(1.1)
    assert ratio(Row({OWN: record(66.0), AGAINST: record(None)}, {})) is None
