import pytest

from saf.bench.harness.pairs import measure_pair, refused, summary


def test_pairs_alternate_abba():
    order = []

    def block(name):
        return lambda: order.append(name) or float(len(order))

    pairs = [measure_pair(block("A"), block("B"), number) for number in range(4)]
    assert "".join(order) == "ABBAABBA"
    # The baseline's time comes first in a pair, whoever ran first.
    assert pairs == [(1, 2), (4, 3), (5, 6), (8, 7)]


def test_ratios_are_taken_within_pairs():
    numbers = summary([(10.0, 5.0), (30.0, 10.0), (8.0, 8.0)])
    assert numbers["ratio"] == 2.0  # not 10 / 8, the ratio of the medians
    assert (numbers["baseline_ms"], numbers["arm_ms"]) == (10.0, 8.0)
    assert (numbers["min"], numbers["max"], numbers["pairs"]) == (1.0, 3.0, 3)
    assert (numbers["q25"], numbers["q75"]) == (1.5, 2.5)
    assert numbers["pair_ms"] == [[10.0, 5.0], [30.0, 10.0], [8.0, 8.0]]


def test_one_pair_has_no_spread():
    numbers = summary([(3.0, 2.0)])
    assert {numbers[name] for name in ("ratio", "q25", "q75", "min", "max")} == {1.5}


@pytest.mark.parametrize(
    ("control", "bad"), [(1.0, False), (1.0099, False), (0.9901, False), (1.011, True), (0.989, True), (None, True)]
)
def test_a_control_beyond_its_tolerance_refuses(control, bad):
    assert refused(control, 0.01) is bad
