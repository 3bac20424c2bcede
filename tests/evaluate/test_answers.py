"""Paired answers to the same questions, and their interval."""

import pytest

from saf.evaluate.answers import paired_answers


def answered(rights: list[int]) -> list[dict]:
    return [{"id": str(place), "answer": 0, "right": bool(right)} for place, right in enumerate(rights)]


def test_questions_that_no_model_answers_otherwise_leave_an_interval():
    ordinary = answered([1] * 70 + [0] * 30)
    found = paired_answers(ordinary, ordinary)
    low, high = found["ci95"]
    assert (found["difference"], found["standard_error"], found["p_value"]) == (0.0, 0.0, 1.0)
    assert low == -high
    assert high == pytest.approx(1.96 / 102), "half a question changed either way, of two more"


def test_the_interval_of_many_changes_is_that_of_their_standard_error():
    ordinary, frozen = answered([0, 1] * 4_000 + [1] * 2_000), answered([1, 0] * 3_000 + [0, 1] * 1_000 + [1] * 2_000)
    found = paired_answers(ordinary, frozen)
    assert (found["gained"], found["lost"]) == (3_000, 3_000)
    ends = [found["difference"] + sign * 1.96 * found["standard_error"] for sign in (-1, 1)]
    assert found["ci95"] == pytest.approx(ends, rel=1e-3)
