"""Checks of what callers give, made from annotations: what cannot be used is an InputError that names it.

`checked` goes above a public function, `check_fields` into a dataclass's `__post_init__`, `check` where one value is
asked for. A whole number is anything that Python can index with and no truth value; a number is finite; text is no
list of texts. `Annotated` adds conditions; what takes several arguments to say stays with the function.
"""

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from saf.errors import InputError, did_you_mean
from saf.settings import OneKindOf, OneOf

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# A message shows no more of a value than this.
_LONGEST = 80
_NAMES = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Mapping: "a mapping",
    dict: "a dictionary",
    Callable: "a function",
}


@dataclass(frozen=True, eq=False, repr=False)
class Where:
    """Mark what a value must be beside its type, as `Annotated[int, at_least(1)]`; None is left alone."""

    words: str
    """The condition, as it ends a sentence."""
    holds: Callable[[Any], bool]
    """Whether a value of the right type meets it."""


def at_least(low: float) -> Where:
    """Return the condition that a number is no smaller than `low`."""
    return Where(f"at least {low:g}", lambda value: value >= low)


def above(low: float) -> Where:
    """Return the condition that a number is larger than `low`."""
    return Where(f"above {low:g}", lambda value: value > low)


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Check every argument of a function against its annotation, in each call; raise InputError that names it.

    Not for what compiled code calls, nor for what is called once a layer: a call costs the host microseconds more.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def check_then_call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Check the call's arguments against the function's annotations, then call it."""
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InputError(f"{name} cannot be called so: {error}") from None
        hints = _hints(function)
        for each, value in given.items():
            if each in hints and signature.parameters[each].kind not in _VARIADIC:
                check(each, value, hints[each])
        return function(*args, **kwargs)

    return check_then_call


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass against its annotation; raise InputError that names one that does not fit.

    Numbers of other libraries become Python's own, which can be written down.
    """
    hints = _hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        check(field.name, value, hints[field.name])
        if (type(value) not in (bool, int, float) and isinstance(value, Real)) or _is_truth(value):
            plain: Any = bool if _is_truth(value) else operator.index if _is_whole(value) else float
            object.__setattr__(settings, field.name, plain(value))


def check(name: str, value: Any, hint: Any) -> None:
    """Raise InputError unless a value is what an annotation says."""
    if not fits(value, hint):
        near = did_you_mean(value, _names(hint)) if isinstance(value, str) else ""
        raise InputError(f"{must_be(name, hint)}; got {shown(value)}{near}")


def must_be(name: str, hint: Any) -> str:
    """Return what messages say of a setting that is not what its annotation asks for."""
    return f"{name} must be {described(hint)}"


def _names(hint: Any) -> list[str]:
    """Return the names that an annotation offers."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return [name for mark in inner[1:] if isinstance(mark, OneOf) for name in mark.choices] or _names(inner[0])
    if origin is Literal:
        return [name for name in inner if isinstance(name, str)]
    return [name for each in inner for name in _names(each)] if origin in (Union, UnionType) else []


SHARE = Where("a share in [0, 1]", lambda value: 0 <= value <= 1)
SHARES = Where("shares in [0, 1]", lambda values: all(0 <= value <= 1 for value in values))


def keyword_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each keyword-only argument of a function, by name: what its options are."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: _hints(function)[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation says, its items included where they can be read twice."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits_marked(value, inner[0], inner[1:])
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if hint in _SCALARS:
        return _SCALARS[hint](value)
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if kind is Any or not isinstance(kind, type):
        return True
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and (not inner or _fits_mapping(value, *inner))
    return _fits_items(value, kind, inner) if _is_collection(kind) else _is_instance(value, kind)


def described(hint: Any) -> str:
    """Return in words what an annotation asks for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _described_marked(inner[0], inner[1:])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(described, inner)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    kind = origin or hint
    if kind in _NAMES:
        return _NAMES[kind]
    if isinstance(kind, type) and _is_collection(kind):
        items = [described(each) for each in inner if each is not Ellipsis]
        if kind is tuple and Ellipsis not in inner and items:
            return f"({', '.join(items)})"
        return f"several values, each {items[0]}" if items else "several values"
    name = getattr(kind, "__name__", str(kind))
    return f"a {name}" if name[:1].upper() not in "AEIOU" else f"an {name}"


def _described_marked(kind: Any, marks: tuple[Any, ...]) -> str:
    """Return what an annotation with marks asks for: names, and beside them what text is not; conditions."""
    names = [repr(mark) for mark in marks if isinstance(mark, OneOf)]
    if names:
        return " or ".join([*names, *(described(each) for each in get_args(kind) if each is not str)])
    return ", ".join([described(kind), *(mark.words for mark in marks if isinstance(mark, Where))])


def shown(value: Any) -> str:
    """Return a value as messages show it, in one short line: of a tensor its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    try:
        text = repr(value)
    except Exception as error:  # of any class of the caller's
        text = f"{type(value).__name__}, whose repr raises {type(error).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({type(value).__name__})"


@cache
def _hints(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function or class, looked up once, at the first call: names may be defined late."""
    return get_type_hints(owner, include_extras=True)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool"  # NumPy's is no subclass


def _is_whole(value: Any) -> bool:
    """Return whether a value stands for a whole number: an int, or what can index, but no truth value."""
    if _is_truth(value):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return str(getattr(value, "dtype", "")) != "torch.bool"


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite real number and no truth value."""
    if not isinstance(value, Real) or _is_truth(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number larger than any float
        return False


_SCALARS: dict[Any, Callable[[Any], bool]] = {
    NoneType: lambda value: value is None,
    bool: _is_truth,
    int: _is_whole,
    float: _is_number,
    str: lambda value: isinstance(value, str),
}


def _fits_marked(value: Any, kind: Any, marks: tuple[Any, ...]) -> bool:
    """Return whether a value is what an annotation with marks says: of text, one of the names."""
    if kinds := [mark.classes.values() for mark in marks if isinstance(mark, OneKindOf)]:
        return fits(value, kind) or _has_methods_of(value, kinds[0])
    names = [mark.choices for mark in marks if isinstance(mark, OneOf)]
    if names and isinstance(value, str):
        return value in names[0]
    conditions = (mark.holds for mark in marks if isinstance(mark, Where))
    return fits(value, kind) and (value is None or all(holds(value) for holds in conditions))


def _has_methods_of(value: Any, classes: Collection[type]) -> bool:
    """Return whether a value, of a class of the caller's own perhaps, has every public method that classes share."""
    shared = set.intersection(*({name for name in dir(kind) if name[0] != "_"} for kind in classes))
    methods = [name for name in shared if all(callable(getattr(kind, name)) for kind in classes)]
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _fits_mapping(value: Mapping[Any, Any], key: Any, item: Any) -> bool:
    return all(fits(each, key) and fits(one, item) for each, one in value.items())


def _is_collection(kind: type) -> bool:
    return kind in (list, tuple, set, frozenset) or kind.__module__ == "collections.abc"


def _fits_items(value: Any, kind: type, inner: tuple[Any, ...]) -> bool:
    """Return whether a value holds what a list, tuple or iterable should; what can be read once is left unread."""
    # A mapping is read by its keys where order does not matter.
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return False
    if kind is tuple and inner and Ellipsis not in inner:
        # Files and users write pairs as lists; what counts is their number.
        if isinstance(value, Mapping) or not isinstance(value, Collection) or len(value) != len(inner):
            return False
        return all(fits(one, each) for one, each in zip(value, inner, strict=True))
    if kind is not Iterable and (isinstance(value, Mapping) or not isinstance(value, Collection)):
        return False
    if not inner or not isinstance(value, list | tuple | set | frozenset):
        return True
    return all(fits(one, inner[0]) for one in value)


def _is_instance(value: Any, kind: type) -> bool:
    """Return whether a value is of a class; protocols that Python cannot test at run time are left alone."""
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return True
    return isinstance(value, kind)
