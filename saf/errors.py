"""The errors `saf` raises on purpose; every message says what was expected, what came and what to do."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any


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


class LossError(SafError, ValueError):
    """Say that an edit raises the held-out loss by more than was accepted."""


class UnsupportedError(SafError):
    """Say that a model, backend or device cannot do what was asked."""


class DivergenceError(SafError):
    """Say that a loss or gradient is no longer finite."""


class AccuracyError(SafError):
    """Say that a result is further from the float64 answer than its budget allows."""


class CompareError(SafError, ValueError):
    """Say that two arms cannot be compared."""


SHORTEST = 3
"""Letters of a name that says which longer one it is a part of."""


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the one of `names` that a misspelt name is nearest to, or that a short one is a part of; None without any.

    Case does not matter.
    """
    by_lower, given = {one.lower(): one for one in names}, str(name).lower()
    near = get_close_matches(given, list(by_lower), n=1)
    near = near or [one for one in by_lower if len(given) >= SHORTEST and given in one]
    return by_lower[near[0]] if near else None


def check_name(setting: str, value: object, names: Iterable[str]) -> None:
    """Raise InputError unless the value of a setting is one of `names`."""
    if value not in (known := list(names)):
        raise InputError(f"{setting} must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")


def check_keywords(owner: str, options: Iterable[str], function: Callable[..., Any]) -> list[str]:
    """Return the keyword-only arguments of a function; raise InputError for `options` that are none of them."""
    known = [each.name for each in signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    if unknown := [name for name in options if name not in known]:
        raise InputError(f"{owner} takes {', '.join(known) or 'no options'}; got {', '.join(unknown)}")
    return known


def shown(value: Any) -> str:
    """Return a value as a message shows it, in one short line; of a tensor its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for the end of a message about an unknown name; nothing when none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""
