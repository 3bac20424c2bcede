"""A call with wrong input: what is called, with which values, and what may not come of it."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

import saf
from saf.arguments import shown
from saf.errors import SafError
from saf.patterns import CompactPattern

LENGTH = 12
SHAPE = saf.GPTConfig(vocab_size=16, num_layers=2, num_heads=2, hidden_size=8, max_length=LENGTH)

NAN, INF = math.nan, math.inf
STRANGE = (object(), b"bytes", 1j)
"""What nothing takes."""
NUMBER = (*STRANGE, None, "0.5", NAN, INF, -INF, True, [0.5], torch.tensor([0.5, 0.5]))
WHOLE = (*STRANGE, None, "3", 1.5, NAN, INF, True, [3], -1)
TRUTH = (*STRANGE, None, "no", 1, 0.0, [])
TEXT = (*STRANGE, None, 3, 1.5, True, ["mean"])
NAME = (*TEXT, "nope", "")
TENSOR = (*STRANGE, None, "abc", 3, 1.5, True, [1.0, 2.0], {})
PATH = (object(), 1j, 3, 1.5, True, ["a"])
MODEL = (*STRANGE, None, "abc", 3, [], nn.Linear(2, 2))
PAIRS = (
    *STRANGE,
    *("abc", 3, [(1.7, 0)], [(0,)], [(-1, 0)], [("a", 0)], [(0, 0), (0, 0)], [None], [(True, 0)], [(NAN, 0)], [0, 1]),
)
HEADS = (*PAIRS, [(0, 99)], [(99, 0)])
MAPPING = (*STRANGE, "abc", 3, 1.5, True, ["a"])
FUNCTION = (*STRANGE, "abc", 3, True, [])
DTYPE = (*STRANGE, None, "float32", 3, torch.int64)
DEVICE = (object(), 1j, 1.5, "gpu", [])
OPTIMIZER = (*STRANGE, "adam", 3, nn.Linear(2, 2), [])
BATCHES = (
    *STRANGE,
    *(None, "abc", 3, [], torch.zeros(2, LENGTH).long(), [torch.zeros(2, LENGTH)], [torch.zeros(LENGTH).long()]),
    *([None], ["abc"], [torch.full((2, LENGTH), -1)], [torch.full((2, LENGTH), 16)], [torch.zeros(0, LENGTH).long()]),
)
ONE_LENGTH = (*BATCHES, [torch.zeros(2, LENGTH).long(), torch.zeros(2, LENGTH - 1).long()])


@dataclass(frozen=True)
class Row:
    """Say what is called, with arguments that are right, and for each argument what is not."""

    name: str
    call: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    """Makes arguments that are right, anew for every call."""
    bad: Mapping[str, tuple[Any, ...]]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By argument, what else is given where that one is wrong."""
    also: Mapping[str, str] = field(default_factory=dict)
    """By argument, another word that names it."""


class Attempt(NamedTuple):
    """Hold one call: its name, the argument, the value, the words that name the argument, and the call itself."""

    name: str
    argument: str
    value: Any
    words: tuple[str, ...]
    call: Callable[[], Any]

    @property
    def shown(self) -> str:
        """Return the value in one short line."""
        return shown(self.value)


def outcome(attempt: Attempt) -> str | None:
    """Return what is wrong with what a call comes to; None when a SafError names the argument."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            attempt.call()
    except SafError as error:
        return None if any(word in str(error) for word in attempt.words) else f"nameless: {error}"
    except SystemExit as stop:
        return None if stop.code == 2 else f"silent: exit code {stop.code}"
    except BaseException as error:  # whatever comes is what is counted
        return f"traceback: {type(error).__name__}: {error}"
    return "silent"


def attempts_of(rows: Iterable[Row]) -> Iterator[Attempt]:
    """Yield every call of a table that must be refused."""
    for row in rows:
        for argument, values in row.bad.items():
            words = (argument, *((row.also[argument],) if argument in row.also else ()))
            for value in values:
                yield Attempt(row.name, argument, value, words, _calling(row, argument, value))


def _calling(row: Row, argument: str, value: Any) -> Callable[[], Any]:
    def call() -> Any:
        return row.call(**{**row.good(), **row.beside.get(argument, {}), argument: value})

    return call


def model() -> saf.GPT:
    """Return a model with a different head each."""
    made = saf.GPT(SHAPE)
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


def batches() -> list[torch.Tensor]:
    """Return calibration sequences."""
    return [torch.randint(0, 16, (4, LENGTH), generator=torch.Generator().manual_seed(1))]


def pattern(*shape: int) -> CompactPattern:
    """Return a flat pattern, `[*shape, T]`."""
    return CompactPattern.from_parameters(torch.zeros(*shape, LENGTH), torch.zeros(*shape, LENGTH))
