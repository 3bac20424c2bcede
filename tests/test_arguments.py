"""Wrong input to everything public is a SafError that names the argument: the table is tools/trials."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import saf
from saf.arguments import at_least, checked, described, fits
from saf.errors import InputError
from saf.settings import OneOf
from tools.trials.attempt import outcome
from tools.trials.commands import command_attempts
from tools.trials.inputs import attempts, rows

BY_NAME = {name: list(calls) for name, calls in groupby(attempts(), key=lambda attempt: attempt.name)}
ON_THE_COMMAND_LINE = ("--freeze.max-fit-kl", "--clip")


@pytest.mark.parametrize("name", BY_NAME)
def test_wrong_input_is_refused_by_name(name):
    wrong = {f"{one.argument}={one.shown}": found for one in BY_NAME[name] if (found := outcome(one))}
    assert not wrong


def test_what_the_table_calls_right_is_accepted():
    """A table whose other arguments were wrong too would pass whatever the value."""
    needs_files = {"load into", "Prefill", "train.continue_from", "save"}
    for row in rows():
        if row.good() and row.name not in needs_files and not row.name.startswith("score by"):
            row.call(**row.good())


def test_wrong_words_on_the_command_line_are_refused():
    tried = [one for one in command_attempts(("pretrain",), ON_THE_COMMAND_LINE) if one.value == "inf"]
    assert len(tried) == len(ON_THE_COMMAND_LINE)
    for one in tried:
        assert outcome(one) is None, (one.argument, one.value)


def test_a_number_out_of_range_is_refused_while_words_are_read():
    """Of the command and of the settings that it is."""
    tried = [
        *command_attempts(("evaluate", "compare", "run"), ("--length", "--limit", "--resamples", "--jobs")),
        *command_attempts(("pretrain",), ("--freeze-at",)),
    ]
    assert len([one for one in tried if one.value in ("-1", "inf")]) == 6
    for one in tried:
        assert outcome(one) is None, (one.argument, one.value)


def test_public_names_are_all_in_the_table():
    tried = " ".join(BY_NAME)
    data = {"FreezeReport", "SafError", "fit", "ops", "head_outputs"}  # results, modules, errors
    assert [name for name in saf.__all__ if name not in tried and name not in data] == []


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, (3, np.int64(3), torch.tensor(3)), (True, np.True_, 3.0, "3", None, torch.tensor(True))),
        (float, (1, 0.5, np.float32(0.5)), (True, "1", float("nan"), float("inf"), 10**400, 1j, torch.tensor(0.5))),
        (bool, (True, np.False_), (0, "no", None)),
        (int | None, (None, 1), ("none", 0.5)),
        (Literal["on", "off"], ("on",), ("auto", True, 1)),
        (Annotated[str, OneOf(("a", "b"))], ("a",), ("c", 1)),
        (Annotated[int | None, at_least(1)], (1, None), (0, "1")),
        (Sequence[str], (["a"], ("a",), ()), ("a", [1], {"a": 1}, 3)),
        (Iterable[tuple[int, int]], ([(0, 1)], [[0, 1]], iter([(0, 1)]), {(0, 1): 2}), ([(0, 1.5)], "ab", [0, 1], 3)),
        (tuple[float, float], ((0.5, 1), [0.5, 1]), ((0.5,), (0.5, float("nan")), "ab")),
        (Mapping[str, int], ({"a": 1}, {}), ({1: 1}, {"a": "b"}, [("a", 1)])),
        (Callable[[int], int], (int, print), ("int", 3)),
        (torch.Tensor | Any, (3, torch.zeros(1)), ()),
    ],
)
def test_annotations_say_what_fits(hint, right, wrong):
    assert all(fits(value, hint) for value in right)
    assert not any(fits(value, hint) for value in wrong), described(hint)


def test_a_call_that_python_would_refuse_is_refused_in_the_same_way():
    @checked
    def double(number: int, *, times: int = 2) -> int:
        """Return a multiple."""
        return number * times

    assert double(3) == 6
    assert double.__doc__ == "Return a multiple."
    with pytest.raises(InputError, match=r"double cannot be called so: .*'number'"):
        double()  # type: ignore[call-arg]
    with pytest.raises(InputError, match="times must be a whole number; got '3'"):
        double(3, times="3")  # type: ignore[arg-type]
