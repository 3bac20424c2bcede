"""`parse` reads a command line into its dataclass by tyro; below: a short and a whole help, and types tyro cannot read.

tyro makes the flags. Its help would show all 80 settings of `saf pretrain`, so `--help` shows those that a command
names, and `--help-all` every one.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from saf.errors import InputError
from saf.heads import Head
from saf.records.files import read_json_value
from saf.records.run import heads_of_record
from saf.scores import Score

HelpFields = Mapping[Any, Sequence[str]]
"""The fields that `--help` shows of each dataclass; it shows all fields of one without an entry."""
HELP = {"-h", "--help", "--help-all"}
"""The words that ask for help."""
RULES = ConstructorRegistry()
"""How tyro reads the types in `SPECS`."""


def parse(
    command: type[Any],
    words: Sequence[str],
    *,
    prog: str,
    default: Any = None,
    help_fields: HelpFields | None = None,
    choices: Collection[str] = (),
) -> Any:
    """Parse the command of `words`; settings left out take the values of `default`.

    `choices` are names of subcommands: the help is that of a subcommand where `words` has one, as for
    `schedule:gradual`. Without `help_fields`, `--help` shows every setting, as `--help-all` does.

    Ends the process after the help, with exit code 0, and for bad arguments, with 2.
    """
    # Cascade: flags of the run may stand behind `schedule:NAME`, too.
    options: dict[str, Any] = {"prog": prog, "registry": RULES, "config": (tyro.conf.CascadeSubcommandArgs,)}
    if default is not None:
        options["default"] = default
    if not HELP & set(words):
        return tyro.cli(command, args=words, **options)
    shown = {} if "--help-all" in words or help_fields is None else help_fields
    text = cleandoc(command.__doc__ or "")
    if shown:
        text += "\n\nMore settings: --help-all."
    # Printed here, with an empty description for tyro, which would fill the lines of the commands, too.
    print("\n\n".join(map(_filled, text.split("\n\n"))) + "\n")
    options["description"] = ""
    # In the help alone: parsing takes --no-x all the same.
    options["config"] += (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    rules = ConstructorRegistry()
    rules.struct_rule(partial(_help_rule, shown))
    # Without the other words: they may be wrong, or flags that a short help lacks.
    chosen = [word for word in words if word in choices or re.fullmatch(r"[a-z-]+:[a-z-]+", word)]
    with rules:
        return tyro.cli(command, args=[*chosen, "--help"], **options)


def _filled(paragraph: str) -> str:
    """Fill a paragraph to the terminal's width; one of indented lines, such as commands, stays."""
    if paragraph.startswith(" "):
        return paragraph
    return fill(" ".join(paragraph.split()), get_terminal_size().columns)


def _help_rule(shown: HelpFields, info: StructTypeInfo) -> StructConstructorSpec | None:
    """Show the chosen fields of a dataclass, their texts unbroken: tyro breaks them where a docstring's line ends."""
    if not is_dataclass(info.type):
        return None
    kind: Any = info.type
    docs = {}
    for base in reversed(kind.__mro__[:-1]):  # a field's text in a derived class replaces that of its base
        for doc in docstring_parser.parse_from_object(base).params:
            docs[doc.arg_name] = " ".join((doc.description or "").split())
    hints, members = get_type_hints(kind, include_extras=True), []
    for each in fields(kind):
        hint: Any = hints[each.name]
        default = each.default
        if isinstance(info.default, kind):  # an instance that stands for the defaults, such as the parent's settings
            default = getattr(info.default, each.name)
        elif default is MISSING:
            default = tyro.MISSING if each.default_factory is MISSING else each.default_factory()
        if each.name not in shown.get(kind, [each.name]):
            hint = Annotated[hint, tyro.conf.Suppress]
        elif default is tyro.MISSING or default is None or default in ((), {}, ""):
            # Not "(default: None)": the text of such a setting says what happens without it.
            behaviour = "(required)" if default is tyro.MISSING else "(optional)"
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=behaviour)]
        text = docs.get(each.name)
        if names := each.metadata.get("one_of"):  # of a registry
            text = f"{text} One of {', '.join(names)}."
        members.append(StructFieldSpec(each.name, hint, default, text))
    return StructConstructorSpec(kind, tuple(members))


# --- types


def _read_number(words: Sequence[str]) -> float:
    """Read a number, or a share in percent: 0.01 or 1%."""
    (word,) = words
    return float(word[:-1]) / 100 if word.endswith("%") else float(word)


def read_heads(words: Sequence[str]) -> tuple[Head, ...]:
    """Return `(layer, head)` pairs of words: LAYER:HEAD, or a file or folder that lists heads.

    That is JSON of pairs, alone or as "heads", the events.jsonl of a run or checkpoint, or its folder.
    """
    heads: list[Head] = []
    for word in words:
        path = Path(word)
        if re.fullmatch(r"\d+:\d+", word):
            layer, head = map(int, word.split(":"))
            heads.append((layer, head))
        elif path.suffix == ".jsonl" or path.is_dir():  # the heads edited at its end, without undone ones
            heads += [(layer, head) for layer, head in heads_of_record(path)]
        elif path.is_file():
            content = read_json_value(path)
            try:
                pairs = content if isinstance(content, list) else content["heads"]
                heads += [(int(layer), int(head)) for layer, head in pairs]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path} must list heads, as [[layer, head], ...], alone or as heads") from error
        else:
            raise InputError(f"heads must be LAYER:HEAD, such as 0:3, or a file or folder of them; got {word!r}")
    return tuple(heads)


def _read_options(words: Sequence[str]) -> dict[str, Any]:
    """Read pairs of a name and a value."""
    if len(words) % 2:
        raise ValueError(f"expected pairs of NAME VALUE, got {' '.join(words)}")
    return {name: _value(word) for name, word in zip(words[::2], words[1::2], strict=True)}


def _value(word: str) -> Any:
    # Numbers, booleans and lists are JSON; other words are text, and need no quotes.
    try:
        return json.loads(word)
    except ValueError:
        return word


def _write_options(values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        words += name, value if isinstance(value, str) else json.dumps(value)
    return words


SPECS: dict[Any, PrimitiveConstructorSpec[Any]] = {
    float: PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=_read_number,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    ),
    tuple[Head, ...]: PrimitiveConstructorSpec(
        nargs="*",
        metavar="LAYER:HEAD|FILE",
        instance_from_str=read_heads,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda heads: [f"{layer}:{head}" for layer, head in heads],
    ),
    dict[str, Any]: PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE",
        instance_from_str=_read_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=_write_options,
    ),
    str | Score: PrimitiveConstructorSpec(  # in Python a score may be a function, too
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    ),
}
"""How to read and show types that tyro does not know, and numbers, which tyro would not read in percent."""


@RULES.primitive_rule
def _spec(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    return SPECS.get(info.type)
