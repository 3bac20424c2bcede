"""How words become a command: tyro on its dataclass, with rules for the types that tyro cannot read by itself."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from saf.errors import InputError
from saf.estimates.sampling import Seed
from saf.heads import Head
from saf.records.events import heads_of_record
from saf.records.files import read_json_value
from saf.scores import Score

Command = TypeVar("Command")

RULES = ConstructorRegistry()
_CONFIG = (tyro.conf.CascadeSubcommandArgs,)


def parse(
    command: type[Command],
    words: Sequence[str],
    *,
    prog: str,
    default: Command | None = None,
    first: Sequence[str] = (),
) -> Command:
    """Return the command that `words` ask for; what they leave out is as in `default`.

    With `first`, `--help` shows the settings of these names alone, and `--help-all` every one. Ends the process after
    the help, with exit code 0, and for words that cannot be used, with 2.
    """
    words = list(words)
    if first and {"-h", "--help"} & set(words):
        return tyro.cli(_shortened(command, first), args=["--help"], prog=prog, registry=RULES, config=_CONFIG)
    words = ["--help" if word == "--help-all" else word for word in words]
    if default is None:
        return tyro.cli(command, args=words, prog=prog, registry=RULES, config=_CONFIG)
    return tyro.cli(command, args=words, prog=prog, default=default, registry=RULES, config=_CONFIG)


def _shortened(kind: Any, names: Sequence[str]) -> Any:
    """Return a dataclass whose help shows the fields of these names, `group.name` those of a group."""
    hints, members = get_type_hints(kind, include_extras=True), []
    for each in fields(kind):
        inner = [name.partition(".")[2] for name in names if name.startswith(f"{each.name}.")]
        if inner:
            group, *marks = get_args(hints[each.name]) or (hints[each.name],)
            short = _shortened(group, inner)
            members.append((each.name, Annotated[(short, *marks, None)], field(default_factory=short)))
        elif each.name not in names:
            hidden = Annotated[hints[each.name], tyro.conf.Suppress]
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            members.append((each.name, hidden, field(default_factory=lambda value=default: value)))
    namespace = {"__doc__": f"{kind.__doc__}\n\nMore settings: --help-all."}
    frozen = kind.__dataclass_params__.frozen
    return make_dataclass(kind.__name__, members, bases=(kind,), namespace=namespace, kw_only=True, frozen=frozen)


def read_heads(words: Sequence[str]) -> tuple[Head, ...]:
    """Return `(layer, head)` pairs from words: LAYER:HEAD, or a file or folder that names heads.

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


@RULES.primitive_rule
def _heads(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read heads as LAYER:HEAD words or the name of a file."""
    if info.type != tuple[Head, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="LAYER:HEAD|FILE",
        instance_from_str=lambda words: read_heads(words),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda heads: [f"{layer}:{head}" for layer, head in heads],
    )


@RULES.primitive_rule
def _options(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read a dictionary of any values as pairs of a name and JSON, or text where it is none."""
    if info.type != dict[str, Any]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE",
        instance_from_str=_read_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda values: [word for name, one in values.items() for word in (name, _as_word(one))],
    )


def _read_options(words: Sequence[str]) -> dict[str, Any]:
    if len(words) % 2:
        raise ValueError(f"expected pairs of NAME VALUE, got {' '.join(words)}")
    return {name: _value(word) for name, word in zip(words[::2], words[1::2], strict=True)}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@RULES.primitive_rule
def _words_only(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read what Python may also give as a function (a score) or a generator (a seed) as a name or a number."""
    kind = {str | Score: str, Seed: int}.get(info.type)
    if kind is None:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar={str: "STR", int: "INT"}[kind],
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )
