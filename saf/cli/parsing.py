"""Parsing of the command line: tyro on a verb's dataclass, help in two tiers, and the types that tyro cannot read."""

import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from saf.errors import InputError
from saf.heads import Head
from saf.records.events import heads_of_record
from saf.records.files import read_json_value
from saf.scores import Score
from saf.targets import Seed

Command = TypeVar("Command")
RULES = ConstructorRegistry()


def parse(command: Any, words: Sequence[str], *, prog: str, default: Any = None, first: Sequence[str] = ()) -> Any:
    """Return the command of `words`, with the values of `default` for settings left out.

    With `first`, `--help` shows these settings alone, and `--help-all` every one. Ends the process after the help, with
    exit code 0, and for bad arguments, with 2.
    """
    options: dict[str, Any] = {"prog": prog, "registry": RULES, "config": (tyro.conf.CascadeSubcommandArgs,)}
    if first and {"-h", "--help"} & set(words):
        return tyro.cli(_shortened(command, first), args=["--help"], **options)
    words = ["--help" if word == "--help-all" else word for word in words]
    return tyro.cli(command, args=words, **options, **({} if default is None else {"default": default}))


def _shortened(kind: Any, names: Sequence[str]) -> Any:
    """Return a dataclass whose help shows the fields of these names, `group.name` for those of a group."""
    hints, members = get_type_hints(kind, include_extras=True), []
    for each in fields(kind):
        inner = [name.partition(".")[2] for name in names if name.startswith(f"{each.name}.")]
        if inner:
            group, *marks = get_args(hints[each.name]) or (hints[each.name],)
            short, default = _shortened(group, inner), _default(each)
            values = {it.name: getattr(default, it.name) for it in fields(group)} if isinstance(default, group) else {}
            members.append(
                (each.name, Annotated[(short, *marks, None)], field(default_factory=partial(short, **values)))
            )
        elif each.name not in names:
            hidden = Annotated[hints[each.name], tyro.conf.Suppress]
            members.append((each.name, hidden, field(default_factory=partial(_default, each))))
    namespace = {"__doc__": f"{cleandoc(kind.__doc__)}\n\nMore settings: --help-all."}
    frozen = kind.__dataclass_params__.frozen
    return make_dataclass(kind.__name__, members, bases=(kind,), namespace=namespace, kw_only=True, frozen=frozen)


def _default(setting: Field[Any]) -> Any:
    """Return the default of a field, MISSING where it has none."""
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def with_flags(text: str, command: Any) -> str:
    """Return an error's text in which settings of a command, `batch_size`, are written as flags, `--batch-size`.

    Names of one word stay: they may be words of the sentence.
    """
    flags = {name: flag for kind in get_args(command) or (command,) for name, flag in _flags(kind).items()}
    flags |= {flag.removeprefix("--").replace("-", "_"): flag for flag in flags.values()}  # mqar.test_lengths, too
    marked = sorted((name for name in flags if set("_.") & set(name)), key=len, reverse=True)
    pattern = "|".join(map(re.escape, marked))
    return re.sub(rf"(?<![\w/.-])({pattern})(?![\w/=-])", lambda found: flags[found[1]], text) if pattern else text


def _flags(kind: Any, prefix: str = "--") -> dict[str, str]:
    """Return the flag of each setting of a dataclass, by name; an outer one hides an inner one of its name."""
    flags: dict[str, str] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        group = next((each for each in (inner, *get_args(inner)) if is_dataclass(each)), None)
        if group is None:
            flags[name] = f"{prefix}{name.replace('_', '-')}"
        else:
            own = prefix if tyro.conf.OmitArgPrefixes in marks else f"{prefix}{name}."
            flags = _flags(group, own) | flags
    return flags


def read_heads(words: Sequence[str]) -> tuple[Head, ...]:
    """Return `(layer, head)` pairs of words: LAYER:HEAD, or a file or folder that lists heads.

    That is JSON of pairs, alone or as "heads", the events.jsonl of a run or checkpoint, or its folder.
    """
    heads: list[Head] = []
    for word in words:
        layer, _, head = word.partition(":")
        path = Path(word)
        if layer.isdecimal() and head.isdecimal():
            heads.append((int(layer), int(head)))
        elif path.suffix == ".jsonl" or path.is_dir():
            heads += [(layer, head) for layer, head in heads_of_record(path)]
        elif path.is_file():
            content = read_json_value(path)
            try:
                pairs = content if isinstance(content, list) else content["heads"]
                heads += [(int(layer), int(head)) for layer, head in pairs]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path} must list heads, as [[layer, head], ...], alone or as heads") from error
        else:
            raise InputError(
                f"heads must be LAYER:HEAD, such as 0:3, or a file or folder that lists them; got {word!r}"
            )
    return tuple(heads)


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

    def read(words: Sequence[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise ValueError(f"expected pairs of NAME VALUE, got {' '.join(words)}")
        return {name: _value(word) for name, word in zip(words[::2], words[1::2], strict=True)}

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda values: [
            word
            for name, value in values.items()
            for word in (name, value if isinstance(value, str) else json.dumps(value))
        ],
    )


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


@RULES.primitive_rule
def _names_and_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read a score, which Python also takes as a function, as a name, and a seed, also a generator, as a number."""
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
