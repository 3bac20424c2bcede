"""Wrong values of settings: the fields and their annotations are the table."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import saf
from saf.bench.accuracy.errors import ErrorSettings
from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings
from saf.data.config import PrepareConfig
from saf.freeze_checkpoint import CheckpointFreezing
from saf.freezing.config import FreezeConfig
from saf.schedules import SCHEDULES
from saf.settings import OneOf
from saf.train import TrainConfig
from tools.trials.attempt import INF, MAPPING, NAME, NAN, NUMBER, PAIRS, PATH, STRANGE, TEXT, TRUTH, WHOLE, Row

SETTINGS: tuple[type, ...] = (
    *(saf.GPTConfig, FreezeConfig, TrainConfig, PrepareConfig, CheckpointFreezing),
    *(OpSettings, PrefillSettings, UpdateSettings, ErrorSettings, CalibrationSettings),
    *SCHEDULES.values(),
)
REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "num_heads"), 2),
    **{"hidden_size": 8, "max_length": 12, "data": "data", "config": FreezeConfig(), "runs": (Path("nowhere"),)},
    **dict.fromkeys(("checkpoint", "model", "first", "second", "one_head", "ordinary"), Path("nowhere")),
}
"""What settings without a default are given; `out` is a path in some classes and text in others."""


def of_settings() -> Iterator[Row]:
    """Yield a row a class of settings: its fields, and what their annotations do not allow."""
    for kind in SETTINGS:
        hints = get_type_hints(kind, include_extras=True)
        needed = {each.name: REQUIRED.get(each.name) for each in fields(kind) if _is_required(each)}
        if "out" in needed:
            needed["out"] = "out" if hints["out"] is str else Path("out")
        bad = {each.name: tuple(wrong_for(hints[each.name])) for each in fields(kind)}
        if kind is FreezeConfig:
            bad["below"] = bad["below"][:-1]  # a score may be negative
        yield Row(kind.__name__, kind, _constant(needed), bad)


def _is_required(each: Any) -> bool:
    return isinstance(each.default, type(fields(Row)[0].default)) and isinstance(
        each.default_factory, type(fields(Row)[0].default)
    )


def _constant(values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: values


def wrong_for(hint: Any) -> list[Any]:
    """Return values that an annotation of a setting does not allow."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    named = any(isinstance(mark, OneOf) for mark in marks)
    wrong = next(pool for test, pool in _POOLS if any(test(member, named) for member in members))
    return [value for value in wrong if not (value is None and type(None) in members)]


def _several(member: Any, *items: Any) -> bool:
    return get_origin(member) is tuple and get_args(member)[: len(items)] == items


_POOLS: tuple[tuple[Callable[[Any, bool], bool], tuple[Any, ...]], ...] = (
    (lambda member, named: is_dataclass(member), (*STRANGE, "abc", 3, {})),
    (lambda member, named: member is float, (*NUMBER, -1.0)),
    (lambda member, named: member is bool, TRUTH),
    (lambda member, named: member is int, WHOLE),
    (lambda member, named: get_origin(member) is Literal or (member is str and named), NAME),
    (lambda member, named: member is str, TEXT),
    (lambda member, named: member is Path, PATH),
    (lambda member, named: _several(member, float, float), (*STRANGE, 3, "ab", (0.5,), (NAN, 0.5), ("a", "b"))),
    (lambda member, named: _several(member, float), (*STRANGE, 0.5, "ab", ("a",), (NAN,), (INF,), (True,))),
    (lambda member, named: _several(member, int), (*STRANGE, 3, "ab", ("a",), (1.5,), (True,))),
    (lambda member, named: _several(member, str), (*STRANGE, 3, "ab", (1,), (None,))),
    (lambda member, named: _several(member), PAIRS),
    (lambda member, named: get_origin(member) is dict, MAPPING),
)
