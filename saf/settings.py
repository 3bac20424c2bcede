"""What classes of settings share: each field is described once, below it, for Python's `help()` and the command line.

A class of settings is a dataclass whose fields have a string below them. `documented` adds these strings to the class's
docstring; `saf.cli.command` makes its flags, their defaults and their help from the same fields.
"""

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

Settings = TypeVar("Settings")

FLAT = "flat"
"""Marks a field, as `Annotated[TrainConfig, FLAT]`, whose own fields are flags without a prefix."""


@dataclass(frozen=True, eq=False, repr=False)
class OneOf:
    """Mark a setting, as `Annotated[str, OneOf(SCORES)]`, whose value is one of the names in a collection."""

    names: Collection[str]
    """The names, or a dictionary by name: what is added to it later is a choice too."""
    also: tuple[str, ...] = ()
    """Further names, such as "auto"."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Return every name, the further ones first."""
        return (*self.also, *self.names)

    def __repr__(self) -> str:
        return f"one of {', '.join(self.choices)}"


@dataclass(frozen=True, eq=False, repr=False)
class OneKindOf:
    """Mark settings of one of several classes, as `Annotated[Schedule | None, OneKindOf(SCHEDULES)]`, chosen by name.

    On the command line `--schedule NAME` chooses the class; `--schedule.NAME.FIELD` sets a field of it.
    """

    classes: Mapping[str, type]
    """The classes by their names; what is added to it later is a choice too."""

    def __repr__(self) -> str:
        return f"settings of one of {', '.join(self.classes)}"


@dataclass(frozen=True)
class Flag:
    """Give a setting a name of its own on the command line, as `Annotated[float, Flag("freeze-at")]`."""

    name: str


def documented(settings: type[Settings]) -> type[Settings]:
    """Add the description of every field, inherited ones included, to a dataclass's docstring."""
    described = field_docs(settings)
    assert is_dataclass(settings), f"documented goes above @dataclass; {settings.__name__} is none yet"
    lines = [
        textwrap.fill(f"{field.name}: {described[field.name]}", 100, initial_indent="    ", subsequent_indent=" " * 8)
        for field in fields(settings)
        if field.name in described
    ]
    head = inspect.cleandoc(settings.__doc__ or "")
    settings.__doc__ = "\n".join([head, "", "Attributes:", *lines])
    return settings


@cache
def field_docs(settings: type) -> Mapping[str, str]:
    """Return the string below each field in the source of a class and of its bases, in one line each.

    Kept, since parsing a class's source takes milliseconds and a command asks for each several times.

    A class whose source is not there, such as one typed at Python's prompt, has no descriptions.
    """
    described: dict[str, str] = {}
    for owner in reversed(settings.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):
            continue
        described |= _strings_below(ast.parse(source).body[0])
    return MappingProxyType(described)


def _strings_below(statement: ast.stmt) -> dict[str, str]:
    """Return what a class statement has below its annotated names."""
    body = statement.body if isinstance(statement, ast.ClassDef) else []
    return {
        field.target.id: " ".join(inspect.cleandoc(below.value.value).split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
