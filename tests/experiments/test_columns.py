import math

import pytest
import torch

from saf.experiments.columns import AGAINST, COLUMNS, OWN, REFERENCE, Row, of
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.rows import Rows
from saf.records.paper import MAIN


def test_a_time_ratio_is_of_whole_runs_and_none_where_one_was_not_timed():
    def record(seconds):
        return {"key": str(seconds), "time": {"everything": {"seconds": seconds}} if seconds else None}

    ratio = COLUMNS["time_ratio"].value
    assert ratio(Row({OWN: record(66.0), AGAINST: record(60.0)}, {})) == pytest.approx(1.1)
    assert ratio(Row({OWN: record(66.0), AGAINST: record(None)}, {})) is None


def test_a_relative_difference_is_of_the_perplexities_themselves():
    """Of changes of 1 and 3% the points differ by 2, and the perplexities by 1.98%."""
    changes = {REFERENCE: 0.0, AGAINST: 0.01, OWN: 0.03}
    runs = {role: {"key": role, "report_perplexity": 20 * (1 + change)} for role, change in changes.items()}
    losses = {role: torch.tensor(math.log(run["report_perplexity"])) for role, run in runs.items()}
    both = {of(AGAINST): runs[REFERENCE]}, {of(AGAINST): losses[REFERENCE]}
    row = Row({**runs, **both[0]}, {**losses, **both[1]})
    assert float(COLUMNS["relative"].value(row)) == pytest.approx(100 * 0.02 / 1.01, rel=1e-4)
    assert float(COLUMNS["difference"].value(row)) == pytest.approx(2.0, rel=1e-4)
    assert "reference" not in COLUMNS["relative"].needs


def test_times_of_whole_runs_and_of_what_came_after_the_parent():
    own = {"loading": 30.0, "training": 90.0, "afterwards": 500.0}

    def record(seconds, parent):
        return {"key": str(seconds), "time": {"everything": {"seconds": seconds}, "parts": own, "parent_parts": parent}}

    row = Row({OWN: record(66.0, {"training": 5.0}), AGAINST: record(60.0, None)}, {})
    assert COLUMNS["time_difference"].value(row) == pytest.approx(6.0)
    assert COLUMNS["continuation"].value(row) == pytest.approx(2.0)
    first = Row({OWN: record(60.0, None)}, {})
    assert COLUMNS["continuation"].value(first) is None, "from initialisation nothing was continued"


def test_updates_after_freezing_are_those_since_its_event():
    remaining = COLUMNS["remaining"].value
    record = {"key": "x", "updates": 5_000, "intervention": {"update": 1_250}}
    assert remaining(Row({OWN: record}, {})) == 3_750
    assert remaining(Row({OWN: {**record, "intervention": None}}, {})) is None


def test_what_the_context_tells_is_the_loss_after_few_tokens_less_the_last():
    context = COLUMNS["context"].value
    losses = [[16, 6.0], [64, 5.0], [256, 4.5], [300, 4.2]]
    assert context(Row({OWN: {"key": "x", "by_position": losses}}, {})) == pytest.approx(0.8)
    assert context(Row({OWN: {"key": "x", "by_position": losses[:2]}}, {})) is None, "a window of 64 has no later ones"
    assert context(Row({OWN: {"key": "x"}}, {})) is None, "records of earlier versions do not say"


@pytest.mark.parametrize(("seconds", "shown"), [(0.8, 1.25), (0.7, None)])
def test_a_speedup_beyond_what_free_heads_save_is_left_out_and_named(seconds, shown):
    """Of 12 heads 3 make an update at most 4/3 times as fast: 1.25 may be, 1.43 is a busy machine."""

    def record(key, median, frozen):
        provenance = {"heads": [[0, head] for head in range(frozen)], "checkpoints": {}}
        told = {"key": key, "parent": None, "went_through": [], "num_heads": 12, "report_loss": 1.0}
        return told | {"update_seconds": {"median": median}, "provenance": provenance}

    arms = (Arm(name="ordinary"), Arm(name="frozen", reference="ordinary"))
    recipe = Recipe(title="made up", source=MAIN, arms=arms, columns=("speedup",))
    rows = Rows(recipe, {"ordinary": {1: [record("a", 1.0, 0)]}, "frozen": {1: [record("b", seconds, 3)]}})
    value = rows.values(arms[1])["speedup"]
    assert (value and value.mean) == shown
    assert bool(rows.notes()) == (shown is None)
    assert shown or rows.notes()[0].endswith("busy: frozen.")
    older = Row({OWN: record("b", seconds, 3) | {"num_heads": None}, REFERENCE: record("a", 1.0, 0)}, {})
    assert not COLUMNS["speedup"].impossible(older)
