"""A command of `saf`: a dataclass whose fields are its flags, and how the words after its name become one.

The fields of settings are flags with the same defaults and descriptions (`saf.settings`): nothing is written for the
command line alone. tyro reads the words and shows the help. It is given classes without checks of their own, so that a
setting that cannot be used is refused with the same error whether it was typed or written in Python.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from saf.arguments import check_fields, must_be
from saf.errors import InputError
from saf.heads import Head
from saf.records.events import heads_of_record
from saf.records.files import read_json_value
from saf.settings import FLAT, Flag, OneKindOf, OneOf, field_docs

Built = TypeVar("Built")

_HEADS = tuple[Head, ...]
_OPTIONS = dict[str, Any]
_METAVARS = {_HEADS: "[LAYER:HEAD|FILE ...]", _OPTIONS: "[NAME VALUE ...]"}
_TYPED = (int, float, str, bool, NoneType, Path)
"""Types that a word can stand for, beside choices, tuples and dictionaries of such."""


class Command(ABC):
    """Say what a command is: made from the words after its name, then run."""

    def __post_init__(self):
        """Raise InputError naming the first flag that has a value it cannot take."""
        check_fields(self)
        # A command may be settings too, which have checks of their own.
        getattr(super(), "__post_init__", lambda: None)()

    @classmethod
    def from_words(cls, words: Sequence[str], *, prog: str | None = None) -> Self:
        """Return the command that `words` ask for; ends the process after the help (0) and for wrong words (2).

        Raises:
            InputError: A value that the settings refuse.
        """
        return build(cls, given_values(cls, words, prog=prog))

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Do what was asked, show it, and return the record that `--json` prints."""


def given_values(
    command: type, words: Sequence[str], *, prog: str | None = None, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of a command that `words` give values to; those of a group of settings in its own dictionary.

    Values of `base`, by the field's name, stand for defaults in the help; nothing that has one is required.
    """
    description = inspect.cleandoc(command.__doc__ or "")
    parsed = tyro.cli(_unchecked(command, base or {}), prog=prog, description=description, args=list(words))
    return _given(command, parsed, {word.split("=")[0].replace("_", "-") for word in words})


def build(kind: type[Built], given: Mapping[str, Any], before: Built | None = None) -> Built:
    """Return a command or settings with the values of `given_values`, the others as they were `before`, or by default.

    A group of settings that may be None stays so unless one of its fields is given. Raises InputError for fields of a
    class of settings that was not chosen.
    """
    values = {**given, **build_groups(kind, given, before)}
    return kind(**values) if before is None else replace(before, **values)  # type: ignore[type-var]


def build_groups(kind: type, given: Mapping[str, Any], before: Any = None) -> dict[str, Any]:
    """Return the groups of settings that `given` has values of, or that have no default, as settings."""
    groups = {}
    for flag in _flags(kind):
        name = flag.field.name
        if flag.classes and name in given:
            groups[name] = _build_chosen(flag, given[name], flag.default({} if before is None else vars(before)))
        elif flag.group and (name in given or flag.required):
            groups[name] = build(flag.group, given.get(name, {}), getattr(before, name, None))
    return groups


@cache
def in_flags(message: str, command: type) -> str:
    """Return a message with each setting of the command written as its flag: `max_fit_kl` as `--freeze.max-fit-kl`.

    Names of one plain word are left as they are, unless the message begins with one whose flag is another word, or says
    what the setting must be; so are parts of paths.
    """
    for flag in all_flags(command):
        if any(isinstance(mark, Flag) for mark in flag.marks) and message.startswith(f"{flag.field.name} "):
            message = f"--{flag.name}{message.removeprefix(flag.field.name)}"
        elif " must be " in message and message.startswith(f"{must_be(flag.field.name, flag.hint)};"):
            # Of several settings of one name the condition tells which is meant.
            message = f"--{flag.name}{message.removeprefix(flag.field.name)}"
    flags, names = _names(command)
    return names.sub(lambda found: flags[found[1]], message) if flags else message


@cache
def _names(command: type) -> tuple[dict[str, str], re.Pattern[str]]:
    """Return the flags of a command by the names that a message may have for them, and what finds those names."""
    flags: dict[str, str] = {}
    for flag in all_flags(command):
        for name in (flag.field.name, flag.name.replace("-", "_")):
            if "_" in name or "." in name:
                flags.setdefault(name, f"--{flag.name}")
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    return flags, re.compile(rf"(?<![\w./'\"-])({names})(?![\w/'\"-]|\.\w)")


def read_heads(words: Sequence[str]) -> tuple[Head, ...]:
    """Return `(layer, head)` pairs from words: `LAYER:HEAD`, or a file or folder that names heads.

    That is JSON of pairs, alone or as "heads", the events.jsonl of a run or checkpoint, or its folder.
    """
    heads: list[Head] = []
    for word in words:
        layer, colon, head = word.partition(":")
        if colon and layer.isdecimal() and head.isdecimal():
            heads.append((int(layer), int(head)))
        else:
            heads += _heads_of_file(word)
    return tuple(heads)


@dataclass(frozen=True)
class _Choice:
    """Hold what words say about settings of one of several classes."""

    name: Any
    """The name of the class, or None for no settings; MISSING when no word chooses."""
    values: dict[str, dict[str, Any]]
    """By the name of a class, the values that words give to its fields; classes without any are left out."""


@dataclass(frozen=True)
class _Flag:
    """Show a field of a command or of its settings as a flag."""

    field: Field[Any]
    kind: Any
    """The field's type, without the marks of `Annotated`."""
    marks: tuple[Any, ...]
    name: str
    """The flag without its first hyphens, such as freeze.max-fit-kl."""
    help: str

    @property
    def hint(self) -> Any:
        """Return the field's annotation."""
        return Annotated[(self.kind, *self.marks)] if self.marks else self.kind

    @property
    def group(self) -> type | None:
        """Return the settings that the field stands for, each of whose own fields is a flag; None for a choice."""
        if self.classes:
            return None
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)

    @property
    def classes(self) -> Mapping[str, type]:
        """Return the classes, by name, of one of which the field holds settings; none for other fields."""
        return next((mark.classes for mark in self.marks if isinstance(mark, OneKindOf)), {})

    def class_of(self, value: Any) -> str | None:
        """Return the name of the class whose settings a value is; None for no settings."""
        return next((name for name, settings in self.classes.items() if type(value) is settings), None)

    def class_flags(self, name: str) -> "list[_Flag]":
        """Return the flags of the fields of one of the classes."""
        return list(_flags(self.classes[name], f"{self.name}.{name}."))

    @property
    def prefix(self) -> str:
        """Return what the flags of a group's fields begin with."""
        return self.name.removesuffix(self.name.rpartition(".")[2]) if FLAT in self.marks else f"{self.name}."

    @property
    def required(self) -> bool:
        """Return whether there is no default."""
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def spellings(self) -> set[str]:
        """Return the words that set it: its name, and for a truth value the one that says no."""
        group, dot, last = self.name.rpartition(".")
        return {f"--{self.name}", f"--{group}{dot}no-{last}"} if self.kind is bool else {f"--{self.name}"}

    def default(self, base: Mapping[str, Any]) -> Any:
        """Return the value of `base`, or else of the class; MISSING where there is neither."""
        if self.field.name in base:
            return base[self.field.name]
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()


@cache
def _flags(kind: type, prefix: str = "") -> tuple[_Flag, ...]:
    """Return the flags of a class's own fields, a group as one."""
    hints, described = get_type_hints(kind, include_extras=True), field_docs(kind)
    flags = []
    for each in fields(kind):
        hint = hints[each.name]
        inner, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        named = [mark.name for mark in marks if isinstance(mark, Flag)]
        name = named[0] if named else f"{prefix}{each.name}".replace("_", "-")
        flags.append(_Flag(each, inner, tuple(marks), name, described.get(each.name, "")))
    return tuple(flags)


@cache
def all_flags(kind: type, prefix: str = "") -> tuple[_Flag, ...]:
    """Return the flags that words may name, those of groups included."""
    flags: list[_Flag] = []
    for flag in _flags(kind, prefix):
        if flag.group:
            flags += all_flags(flag.group, flag.prefix)
        else:
            flags.append(flag)
            for name in flag.classes:
                flags += all_flags(flag.classes[name], f"{flag.name}.{name}.")
    return tuple(flags)


def _unchecked(
    kind: type, base: Mapping[str, Any], command: type | None = None, prefix: str = "", *, may_lack: bool = False
) -> type:
    """Return a dataclass with the same flags whose values are what words can say, for tyro; it checks nothing.

    With `may_lack`, tyro lets words leave out fields without a default: the class may not be the one that is chosen.
    """
    command = command or kind
    members = []
    for flag in _flags(kind, prefix):
        value, default = flag.default(base), field()
        described: dict[str, Any] = {"help": in_flags(flag.help, command)}
        own = [mark for mark in flag.marks if mark != FLAT and not isinstance(mark, OneOf | OneKindOf | Flag)]
        if flag.classes:
            word_kind, described = _unchecked_choice(flag, value, command), {}
        elif flag.group:
            word_kind = _unchecked(flag.group, {} if value in (None, MISSING) else vars(value), command, flag.prefix)
            described |= {"name": ""} if FLAT in flag.marks else {}
        else:
            word_kind = _word_kind(flag.kind, flag.marks)
            if value is not MISSING:
                default = field(default_factory=partial(_spoken, value))
            elif may_lack:
                word_kind, default = word_kind | None, field(default=None)
                described |= {"help_behavior_hint": "(required)"}
            described |= {"metavar": _METAVARS[shape]} if (shape := _shape(flag.kind)) else {}
            described |= {"help_behavior_hint": "(default: none)"} if value in ((), {}) else {}
            described |= (
                {"name": flag.name, "prefix_name": False} if any(isinstance(m, Flag) for m in flag.marks) else {}
            )
        members.append((flag.field.name, Annotated[(word_kind, tyro.conf.arg(**described), *own)], default))
    return make_dataclass(kind.__name__, members, kw_only=True)


def _unchecked_choice(flag: _Flag, value: Any, command: type) -> type:
    """Return a dataclass of the name of a class of settings, `value`'s by default, and of each class's own fields."""
    names = Literal[tuple(flag.classes)]
    described = tyro.conf.arg(name=flag.name, prefix_name=False, help=in_flags(flag.help, command))
    default = field() if value is MISSING else field(default=flag.class_of(value))
    members = [("chosen", Annotated[names | None if NoneType in get_args(flag.kind) else names, described], default)]
    for name, settings in flag.classes.items():
        base = vars(value) if type(value) is settings else {}
        word_kind = _unchecked(settings, base, command, f"{flag.name}.{name}.", may_lack=True)
        summary = " ".join(inspect.cleandoc(settings.__doc__ or "").split("\n\n")[0].split())
        members.append((f"of_{name}", Annotated[word_kind, tyro.conf.arg(name=name, help=summary)], field()))
    return make_dataclass(flag.field.name, members, kw_only=True)


def _shape(kind: Any) -> Any:
    """Return what a type is when its words are read here, not by tyro: heads or options; None for any other."""
    return next((shape for shape in _METAVARS if shape in (kind, *get_args(kind))), None)


def _word_kind(kind: Any, marks: Sequence[Any] = ()) -> Any:
    """Return the type that tyro reads for a field: choices for names, words where they are read here."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if choices := [mark.choices for mark in marks if isinstance(mark, OneOf)]:
        return reduce(or_, [NoneType] * (NoneType in members), Literal[choices[0]])
    if len(members) > 1:
        # What no word can say, such as a function, is for Python alone.
        said = [each for each in members if each in _TYPED or get_origin(each) in (Literal, tuple)]
        return reduce(or_, map(_word_kind, said))
    return tuple[str, ...] if kind in _METAVARS else kind


def _spoken(value: Any) -> Any:
    """Return a default as words would say it, for the help: heads as LAYER:HEAD, options as JSON."""
    if isinstance(value, dict):
        pairs = ((name, one if isinstance(one, str) else json.dumps(one)) for name, one in value.items())
        return tuple(word for pair in pairs for word in pair)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return tuple(f"{layer}:{head}" for layer, head in value)
    return value


def _given(kind: type, parsed: Any, words: set[str], prefix: str = "") -> dict[str, Any]:
    """Return the values that the words gave, nested as the settings are; what was not given is left out."""
    values: dict[str, Any] = {}
    for flag in _flags(kind, prefix):
        name, value = flag.field.name, getattr(parsed, flag.field.name)
        if flag.classes:
            chosen = value.chosen if words & flag.spellings else MISSING
            by_class = {
                each: _given(settings, getattr(value, f"of_{each}"), words, f"{flag.name}.{each}.")
                for each, settings in flag.classes.items()
            }
            by_class = {each: own for each, own in by_class.items() if own}
            if by_class or chosen is not MISSING:
                values[name] = _Choice(chosen, by_class)
        elif flag.group:
            if own := _given(flag.group, value, words, flag.prefix):
                values[name] = own
        elif tyro.conf.Positional in flag.marks or words & flag.spellings:
            values[name] = _meant(flag, value)
    return values


def _build_chosen(flag: _Flag, choice: _Choice, before: Any) -> Any:
    """Return the settings that words choose, those `before` with the values given where words choose no other class.

    Where there were none before, the fields of a single class choose it.
    """
    name = choice.name
    if name is MISSING:
        name = flag.class_of(before) or next(iter(choice.values))
    for other in choice.values.keys() - {name}:
        wrong = next(each for each in flag.class_flags(other) if each.field.name in choice.values[other])
        raise InputError(
            f"--{wrong.name} belongs to --{flag.name} {other}, and the {flag.field.name} is {name}; "
            f"leave it out, or choose --{flag.name} {other}"
        )
    if name is None:
        return None
    given = choice.values.get(name, {})
    kept = before if flag.class_of(before) == name else None
    values = {**({} if kept is None else vars(kept)), **given}
    lacking = [each.name for each in flag.class_flags(name) if each.required and values.get(each.field.name) is None]
    if lacking:
        raise InputError(f"--{flag.name} {name} needs --{' and --'.join(lacking)}")
    return build(flag.classes[name], given, kept)


def _meant(flag: _Flag, value: Any) -> Any:
    """Return what words say: the heads that they name, and options as numbers, lists or truth values."""
    if value is None or (shape := _shape(flag.kind)) is None:
        return value
    if shape == _HEADS:
        return read_heads(value)
    if len(value) % 2:
        raise InputError(f"--{flag.name} takes pairs of a name and a value; got {' '.join(value)}")
    return {name: _option(text) for name, text in zip(value[::2], value[1::2], strict=True)}


def _option(text: str) -> Any:
    """Return a number, list or truth value written as JSON; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _heads_of_file(name: str) -> list[Head]:
    """Return the heads that a file lists: those in force in a run's events, or pairs in a JSON file."""
    path = Path(name)
    if path.suffix == ".jsonl" or path.is_dir():
        return [(layer, head) for layer, head in heads_of_record(path)]
    if not path.is_file():
        raise InputError(
            "expected heads as LAYER:HEAD, such as 0:3, or a file that lists them, such as events.jsonl, or its "
            f"folder; there is no file or folder {name!r}"
        )
    try:
        found = read_json_value(path)
        pairs = found if isinstance(found, list) else found["heads"]
        return [(int(layer), int(head)) for layer, head in pairs]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} does not list heads: expected [[layer, head], ...], or an object that has them as heads"
        ) from error
