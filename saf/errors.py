"""The errors that `saf` raises on purpose; a message says what was expected, what came and what to do."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any


class SafError(Exception):
    """The base of all errors that `saf` raises on purpose."""


class SafWarning(UserWarning):
    """A call did less than requested, or has a consequence worth knowing; commands print it as a plain line."""


class LengthWarning(SafWarning):
    """Calibration sequences are shorter than the model's longest input, which frozen heads will then refuse."""


class InputError(SafError, ValueError):
    """An argument, shape or setting cannot be used."""


class DataError(SafError, ValueError):
    """Text, a folder of tokens or a tokenizer cannot be used."""


class CheckpointError(SafError):
    """A checkpoint, or saved frozen heads (saf.json, saf.safetensors), are missing, damaged or of another model."""


class SelectionError(SafError, ValueError):
    """Fewer heads than requested can be frozen or pruned."""


class LossError(SafError, ValueError):
    """An edit raises the held-out loss by more than is accepted."""


class UnsupportedError(SafError):
    """A model, backend or device does not support a request."""


class DivergenceError(SafError):
    """A loss or gradient is no longer finite."""


class AccuracyError(SafError):
    """A result is further from float64 than its error budget."""


class CompareError(SafError, ValueError):
    """Two arms cannot be compared."""


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the nearest of `names` to a misspelt one, whatever its case; None without any."""
    by_lower = {one.lower(): one for one in names}  # difflib takes another case for another letter
    near = get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def check_name(setting: str, value: object, names: Iterable[str]) -> None:
    """Raise InputError unless the value of a setting is one of `names`."""
    if value not in (known := list(names)):
        raise InputError(f"{setting} must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")


def check_keywords(owner: str, options: Iterable[str], function: Callable[..., Any]) -> list[str]:
    """Return the options of a function; raise InputError for `options` that are not among them.

    They are its keyword-only arguments with a default.
    """
    keywords = [each for each in signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    known = [each.name for each in keywords if each.default is not each.empty]
    if unknown := [name for name in options if name not in known]:
        raise InputError(f"{owner} takes {', '.join(known) or 'no options'}; got {', '.join(unknown)}")
    return known


def shown(value: Any) -> str:
    """Return a value for a message, in one short line; of a tensor its dtype and shape."""
    # Not repr: it prints a tensor's values, over many lines, and waits for a device.
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for a message about an unknown name; empty when no name is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""
