"""Annotations say what an argument may be, and a call that does not fit them is refused by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from saf.arguments import at_least, checked, described, fits
from saf.errors import InputError
from saf.settings import OneOf


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
