"""Settings in messages, by the names that the command line has for them."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def in_flags(message: str, command: Any) -> str:
    """Return a message with each setting of the command written as its flag: `max_fit_kl` as `--freeze.max-fit-kl`.

    Names of one plain word are left as they are, and so are parts of paths.
    """
    flags: dict[str, str] = {}
    for name, flag in _flags(command):
        flags.setdefault(name, flag)
    if not flags:
        return message
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./'\"-])({names})(?![\w/'\"-]|\.\w)", lambda found: flags[found[1]], message)


def _flags(command: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings' names and flags; those of a group by their own name, and by the group's before it."""
    for field in fields(command) if is_dataclass(command) else ():
        flag = f"--{prefix}{field.name}".replace("_", "-")
        if "_" in field.name:
            yield field.name, flag
        if prefix:
            yield f"{prefix}{field.name}", flag
        yield from _flags(field.type, f"{prefix}{field.name}.")
