"""Parse the command line: tyro on a verb's dataclass, help in two tiers, and the types that tyro cannot read."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from saf.errors import InputError
from saf.heads import Head
from saf.records.files import read_json_value
from saf.records.run import heads_of_record
from saf.scores import Score
from saf.targets import Seed

RULES = ConstructorRegistry()


def parse(command: Any, words: Sequence[str], *, prog: str, default: Any = None, first: Sequence[str] = ()) -> Any:
    """Parse the command of `words`; settings left out take the values of `default`.

    A share may be written in percent: `--budget 1%`. With `first`, `--help` shows these settings alone, and
    `--help-all` every one. Ends the process after the help, with exit code 0, and for bad arguments, with 2.
    """
    options: dict[str, Any] = {"prog": prog, "registry": RULES, "config": (tyro.conf.CascadeSubcommandArgs,)}
    asked = {"-h", "--help", "--help-all"} & set(words)
    if asked and is_dataclass(command):
        short = first if "--help-all" not in asked else ()
        text = cleandoc(command.__doc__ or "") + ("\n\nMore settings: --help-all." if short else "")
        width = get_terminal_size().columns
        print("\n\n".join(fill(" ".join(part.split()), width) for part in text.split("\n\n")) + "\n")
        chosen = [word for word in words if re.fullmatch(r"[a-z-]+:[a-z-]+", word)]  # such as schedule:gradual
        command, words, options["description"] = _help_form(command, short), [*chosen, "--help"], ""
        if default is not None:
            default = _filled(command, default)
    words = ["--help" if word == "--help-all" else _without_percent(word) for word in words]
    return tyro.cli(command, args=words, **options, **({} if default is None else {"default": default}))


def _without_percent(word: str) -> str:
    """Write a number in percent as a share, alone or after a flag's equals sign.

    >>> _without_percent("1%"), _without_percent("--budget=2.5%"), _without_percent("text 1%")
    ('0.01', '--budget=0.025', 'text 1%')
    """
    match = re.fullmatch(r"(--[\w.-]+=|)(\d+\.?\d*|\.\d+)%", word)
    return word if match is None else f"{match[1]}{float(match[2]) / 100}"


def parse_one_of(commands: Mapping[str, Any], words: Sequence[str], *, prog: str, first: Sequence[str]) -> Any:
    """Parse the words of one of several commands, which the first word names."""
    if words and words[0] in commands:
        return parse(commands[words[0]], words[1:], prog=f"{prog} {words[0]}", first=first)
    return parse(Union[tuple(commands.values())], words, prog=prog)  # noqa: UP007 (made of a mapping)


def _help_form(kind: Any, names: Sequence[str]) -> Any:
    """Build a dataclass for help: only the fields of these names (`group.name` in a group), or all, texts unbroken.

    tyro itself breaks a text wherever the line of a docstring ends.
    """
    docs = {
        doc.arg_name: " ".join((doc.description or "").split())
        for base in reversed(kind.__mro__[:-1])
        for doc in docstring_parser.parse_from_object(base).params
    }
    hints, members = get_type_hints(kind, include_extras=True), []
    for each in fields(kind):
        hint, default = hints[each.name], partial(_default, each)
        parts: tuple[Any, ...] = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        group: Any = parts[0]
        inner = [name.partition(".")[2] for name in names if name.startswith(f"{each.name}.")]
        if is_dataclass(group) and (inner or not names or each.name in names):
            form, own = _help_form(group, inner), _default(each)
            hint = Annotated[(form, *parts[1:], None)]
            default = partial(_filled, form, own) if type(own) is group else form
        elif names and each.name not in names:
            hint = Annotated[hint, tyro.conf.Suppress]
        else:
            hint = Annotated[hint, tyro.conf.arg(help=docs.get(each.name))]
        setting = field() if _default(each) is MISSING else field(default_factory=default)
        members.append((each.name, hint, setting))
    frozen = kind.__dataclass_params__.frozen
    return make_dataclass(kind.__name__, members, bases=(kind,), namespace={"__doc__": ""}, kw_only=True, frozen=frozen)


def _filled(form: Any, value: Any) -> Any:
    """Build an instance of a help form with the settings of the dataclass that it is a form of."""
    values = {each.name: getattr(value, each.name) for each in fields(form)}
    for name, hint in get_type_hints(form, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if isinstance(inner, type) and is_dataclass(inner) and type(values.get(name)) in inner.__bases__:
            values[name] = _filled(inner, values[name])
    return form(**values)


def _default(setting: Field[Any]) -> Any:
    """Return the default of a field, MISSING where it has none."""
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def with_flags(text: str, command: Any) -> str:
    """Write settings of a command in an error's text, `batch_size`, as flags, `--batch-size`.

    Names of one word stay: they may be words of the sentence.
    """
    flags = {name: flag for kind in get_args(command) or (command,) for name, flag in _flags(kind).items()}
    marked = sorted((name for name in flags if set("_.") & set(name)), key=len, reverse=True)
    pattern = "|".join(map(re.escape, marked))
    return re.sub(rf"(?<![\w/.-])({pattern})(?![\w/=-])", lambda match: flags[match[1]], text) if pattern else text


def _flags(kind: Any, prefix: str = "--") -> dict[str, str]:
    flags: dict[str, str] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        group = next((each for each in (inner, *get_args(inner)) if is_dataclass(each)), None)
        if group is None:
            flags[name] = f"{prefix}{name.replace('_', '-')}"
        else:
            own = prefix if tyro.conf.OmitArgPrefixes in marks else f"{prefix}{name}."
            inner_flags = _flags(group, own)
            dotted = {flag.removeprefix("--").replace("-", "_"): flag for flag in inner_flags.values()}
            flags = dotted | inner_flags | flags  # by either name; the command's own fields go before a group's
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
    """Read a score as a name and a seed as a number; Python also takes a function and a generator."""
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
