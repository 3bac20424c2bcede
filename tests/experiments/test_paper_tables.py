"""Numbers of the paper stand beside the arms and measurements that they are of, each where its text has it."""

import re
from dataclasses import replace

import pytest

from experiments.recipe import names, recipe
from experiments.tables import METRICS
from tests.experiments.paper_arms import ARMS
from tests.experiments.paper_measurements import MEASUREMENTS
from tests.paper_source import NUMBER, cells, quoted_in, read, table

RECIPES = {name: recipe(name) for name in names()}
PLOTTED = "plotted"
"""What stands for a number of a figure, which is not written anywhere."""
MEASURED = {"qwen_zeroshot": 59, "qwen_prefill": 60, "implementation": 35, "pruning_costs": 36, "training_systems": 21}
MEASURED |= {"one_head": 24, "downstream": 21, "rates_and_patterns": 20, "prefill_systems": 24, "scale_up_systems": 10}
MEASURED |= {"recovery": 6, "stability": 5, "joint_cost": 3, "distributions": 3, "representation": 2}
"""How many numbers of the paper stand beside a recipe's measurements."""
BASELINES = ("1.000", "0.00")
"""What tables say of ordinary attention beside itself."""
CHECKPOINTS_ALONE = ("tab:pruning-prefill", "Pruning + gate-Taylor")
"""Rows of checkpoints whose heads were chosen by gates: benchmarks of random weights have no such heads."""
MEANS = {"heads in both, at 25% and at 50%"}
"""Counts whose mean over seeds we give, to a digit that the paper's range has not."""


@pytest.fixture(scope="module")
def text(shared) -> str:
    (paper,) = (shared / "seeds").glob("*.txt")
    return paper.read_text()


def arms_of(name):
    return {(row.label, metric): quoted for row in RECIPES[name].rows for metric, quoted in row.paper.items()}


def measured_of(name):
    return [
        (each, number)
        for each in RECIPES[name].measurements
        for number in each.numbers
        if number.paper is not None and number.paper != PLOTTED
    ]


def test_every_number_has_a_place():
    for name in RECIPES:
        assert set(arms_of(name)) == set(ARMS[name]() if name in ARMS else {}), name
        assert len(measured_of(name)) == MEASURED.get(name, 0), name
    assert MEASURED.keys() == MEASUREMENTS.keys()


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_has_the_numbers_of_its_row(name, text):
    places = ARMS[name]()
    for key, quoted in arms_of(name).items():
        assert quoted_in(quoted) == read(places[key], text), key


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_has_the_numbers_of_what_it_reads(name, text):
    for each, number in measured_of(name):
        assert quoted_in(number.paper) == read(MEASUREMENTS[name](each, number), text), (each.name, number.title)


def test_a_column_is_quoted_in_all_its_rows(text):
    placed = cells(
        [
            *(place for places in ARMS.values() for place in places().values()),
            *(MEASUREMENTS[name](each, number) for name in MEASUREMENTS for each, number in measured_of(name)),
        ]
    )
    quoted = {replace(cell, thousand=False).read(text).partition(" ")[0] for cell in placed}
    for label, column in {(cell.label, cell.column) for cell in placed}:
        for row in table(text, label):
            if len(row) <= column or "multicolumn" in " ".join(row) or (label, row[0]) == CHECKPOINTS_ALONE:
                continue
            for number in NUMBER.findall(row[column]):
                number = number.partition(" ")[0].removeprefix("+")
                assert "." not in number or number in (*quoted, *BASELINES), f"no recipe has {number} of {label}"


@pytest.mark.parametrize("name", ARMS)
def test_the_papers_changes_have_a_sign_and_nothing_else_has(name):
    for (arm, column), quoted in arms_of(name).items():
        assert METRICS[column].signed == (quoted[0] in "+\u2212"), (arm, column, quoted)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_ours_are_written_with_the_sign_and_the_digits_of_the_papers(name):
    """Speedups have three digits throughout, where the paper has two to four."""
    for _, number in measured_of(name):
        if number.scientific:
            continue  # three digits of any size
        assert number.signed or number.paper[0] not in "+-\u2212", number.title
        digits = max(len(decimals) for decimals in re.findall(r"\d(?:\.(\d+))?(?!\d)", number.paper))
        expected = 3 if number.path[-1] == "ratio" else digits + (number.title in MEANS)
        assert number.places == expected, number.title
