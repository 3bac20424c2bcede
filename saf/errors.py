"""The errors `saf` raises on purpose; every message says what was expected, what came and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class SafError(Exception):
    """Stand at the base of every error raised on purpose by `saf`."""

    heard: bool = False
    """Whether other processes of the group raise it too, and one of them tells people of it."""


class SafWarning(UserWarning):
    """Warn that a call did less than asked, or has a consequence to know of; commands tell it as a plain line."""


class InputError(SafError, ValueError):
    """Say that an argument, shape or setting cannot be used."""


class OutOfRangeError(InputError, IndexError):
    """Say that an index lies outside of what it selects among; it ends a loop over what is indexed."""


class DataError(SafError, ValueError):
    """Say that text, token shards or a tokenizer cannot be used."""


class CheckpointError(SafError):
    """Say that a checkpoint or sidecar is missing, damaged or belongs to something else."""


class SelectionError(SafError, ValueError):
    """Say that a replacement rate cannot be attained."""


class UnsupportedError(SafError):
    """Say that a model, backend or device cannot do what was asked."""


class DivergenceError(SafError):
    """Say that a loss or gradient is no longer finite."""


class AccuracyError(SafError):
    """Say that a result is further from the float64 answer than its budget allows."""


class CompareError(SafError, ValueError):
    """Say that two arms cannot be compared."""


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the one of `names` that a misspelt name is nearest to, whatever its case; None when none is near."""
    by_lower = {one.lower(): one for one in names}
    near = get_close_matches(str(name).lower(), list(by_lower), n=1)
    return by_lower[near[0]] if near else None


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for the end of a message about an unknown name; nothing when none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""
