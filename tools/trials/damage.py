"""Ways to damage one file: of any kind, of JSON, and of JSON lines, each drawn from a seed."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NESTED = "[" * 100_000 + "]" * 100_000
STRANGE = (None, True, "text", -1, 0.5, [], {}, [[1]], {"a": 1}, 10**30)
"""What may stand in the place of any value."""
LITERALS = ("NaN", "Infinity", "1e999", "9" * 5000, NESTED)
"""What Python reads, or refuses, that is no value of JSON."""


class Damage(NamedTuple):
    """Hold one way to damage a file."""

    name: str
    apply: Callable[[Path], None]


def damages(path: Path, twin: Path | None, draw: random.Random) -> Iterator[Damage]:
    """Yield what is done to a file, which must be there; `twin` is a file of the same kind from elsewhere."""
    data = path.read_bytes()
    yield from _of_bytes(data, draw)
    yield from _of_places(twin)
    if path.suffix == ".json":
        for name, text in _of_json(json.loads(data), draw):
            yield Damage(name, _content(text.encode()))
    if path.suffix == ".jsonl":
        yield from _of_lines(data.decode().splitlines(), draw)


def _content(data: bytes) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(data)

    return apply


def _of_bytes(data: bytes, draw: random.Random) -> Iterator[Damage]:
    cuts = {"emptied": 0, "cut after a byte": 1, "cut in half": len(data) // 2, "cut before the end": len(data) - 1}
    cuts["cut somewhere"] = draw.randrange(len(data))
    for name, length in cuts.items():
        yield Damage(name, _content(data[:length]))
    for place in (0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(3))):
        bit = 1 << draw.randrange(8)
        changed = data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
        yield Damage(f"bit {bit} of byte {place} of {len(data)} flipped", _content(changed))
    yield Damage("zeros", _content(bytes(len(data))))
    yield Damage("a byte more", _content(data + b"\0"))
    yield Damage("other bytes", _content(draw.randbytes(len(data))))


def _of_places(twin: Path | None) -> Iterator[Damage]:
    def removed(path: Path) -> None:
        path.unlink()

    def folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def link(target: str) -> Callable[[Path], None]:
        def apply(path: Path) -> None:
            path.unlink()
            path.symlink_to(target)

        return apply

    def swapped(path: Path) -> None:
        assert twin is not None
        shutil.copyfile(twin, path)

    yield Damage("removed", removed)
    yield Damage("a folder in its place", folder)
    yield Damage("a link to nothing", link("nowhere"))
    yield Damage("unreadable", lambda path: os.chmod(path, 0))
    if twin is not None and twin.is_file():
        yield Damage("swapped", swapped)


def _of_json(record: Any, draw: random.Random) -> Iterator[tuple[str, str]]:
    for text in ("null", "[]", "{}", '"text"', "3", NESTED, '{"a": 1}'):
        yield f"{text[:10]} in its place", text
    leaves = list(_leaves(record))
    for _ in range(3):
        place, value = draw.choice(leaves), draw.choice(STRANGE)
        yield f"{_words(place)} is {value!r}", json.dumps(_with(record, place, value))
        place, literal = draw.choice(leaves), draw.choice(LITERALS)
        marked = json.dumps(_with(record, place, "@@"))
        yield f"{_words(place)} is {literal[:10]}", marked.replace('"@@"', literal)
    keys = [place for place in leaves if isinstance(place[-1], str)]
    top = sorted({place[0] for place in leaves if isinstance(place[0], str)})
    for place in [*draw.sample(keys, min(3, len(keys))), *((name,) for name in draw.sample(top, min(3, len(top))))]:
        yield f"{_words(place)} is gone", json.dumps(_without(record, place))
    if isinstance(record, dict) and top:
        name = draw.choice(top)
        yield f"{name} twice", json.dumps(record)[:-1] + f', {json.dumps(name)}: "twice"}}'
    yield "written in one line", json.dumps(record)


def _of_lines(lines: list[str], draw: random.Random) -> Iterator[Damage]:
    number = draw.randrange(len(lines))
    for name, text in _of_json(json.loads(lines[number]), draw):
        changed = [*lines[:number], text, *lines[number + 1 :]]
        yield Damage(f"line {number + 1}: {name}", _content("".join(f"{line}\n" for line in changed).encode()))
    others = {
        f"line {number + 1} is gone": [*lines[:number], *lines[number + 1 :]],
        f"line {number + 1} twice": [*lines[:number], *lines[number : number + 1] * 2, *lines[number + 1 :]],
        "lines the other way": lines[::-1],
        "an empty line": [*lines[:number], "", *lines[number:]],
    }
    for name, changed in others.items():
        yield Damage(name, _content("".join(f"{line}\n" for line in changed).encode()))


def _leaves(value: Any, place: tuple = ()) -> Iterator[tuple]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*place, key))
    elif place:
        yield place


def _with(record: Any, place: tuple, value: Any) -> Any:
    made = copy.deepcopy(record)
    _at(made, place[:-1])[place[-1]] = value
    return made


def _without(record: Any, place: tuple) -> Any:
    made = copy.deepcopy(record)
    del _at(made, place[:-1])[place[-1]]
    return made


def _at(value: Any, place: tuple) -> Any:
    for key in place:
        value = value[key]
    return value


def _words(place: tuple) -> str:
    return ".".join(map(str, place))
