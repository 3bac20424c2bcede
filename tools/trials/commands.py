"""Wrong words on the command line: every flag that takes a number or a name."""

import importlib
from collections.abc import Collection, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from saf.cli import COMMANDS, GROUPS
from saf.cli.command import Command, all_flags, in_flags
from saf.errors import SafError
from saf.heads import Head
from saf.settings import OneOf
from tools.trials.attempt import Attempt

WORDS = {float: ("abc", "nan", "inf", "-1"), int: ("abc", "1.5", "nan", "-1")}
"""What a flag of a type may not be given on the command line."""

RIGHT = {("below", "-1")}
"""Words that a flag takes all the same: a score may be negative."""


def commands() -> Iterator[tuple[str, type[Command]]]:
    """Yield every command with its words."""
    for name in COMMANDS:
        module = importlib.import_module(f"saf.cli.{name}")
        if name in GROUPS:
            yield from ((f"{name} {sub}", command) for sub, command in module.COMMANDS.items())
        else:
            yield name, module.COMMAND


def command_attempts(only: Collection[str] = (), flags: Collection[str] = ()) -> Iterator[Attempt]:
    """Yield command lines whose flags have values that they cannot take, and flags that do not exist."""
    for attempt in _command_attempts(only):
        if not flags or attempt.argument in flags:
            yield attempt


def _command_attempts(only: Collection[str]) -> Iterator[Attempt]:
    for name, command in commands():
        if only and name not in only:
            continue
        flags = list(all_flags(command))
        needed = [word for flag in flags if flag.required for word in _needed_words(flag)]
        yield _said(name, command, [*needed, "--no-such-flag", "1"], "no-such-flag")
        for flag in flags:
            members = get_args(flag.kind) if get_origin(flag.kind) in (Union, UnionType) else (flag.kind,)
            literal = any(isinstance(mark, OneOf) for mark in flag.marks) or get_origin(flag.kind) is Literal
            words = next((WORDS[kind] for kind in (float, int) if kind in members), ("nope",) if literal else ())
            for word in words:
                if (flag.field.name, word) in RIGHT:
                    continue
                yield _said(name, command, [*needed, f"--{flag.name}", word], flag.name)


def _needed_words(flag: Any) -> list[str]:
    positional = any("Positional" in repr(mark) for mark in flag.marks)
    word = "0:1" if flag.kind == tuple[Head, ...] else "nowhere"
    return [word] if positional else [f"--{flag.name}", word]


def _said(name: str, command: type[Command], words: list[str], flag: str) -> Attempt:
    named = (flag, flag.rpartition(".")[2], flag.rpartition(".")[2].replace("-", "_"))

    def call() -> None:
        try:
            command.from_words(words)
        except SafError as error:
            raise type(error)(in_flags(str(error), command)) from None

    return Attempt(f"saf {name}", f"--{flag}", words[-1], named, call)
