"""Options that several commands share: how heads are frozen, and types that show well in `--help`."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from saf.errors import InputError
from saf.estimates import PATTERNS, Storage
from saf.fit import FITTERS
from saf.freezing.config import FreezeConfig
from saf.records.events import heads_in_force, read_events
from saf.records.files import read_json_value
from saf.scores import SCORES


def optional(metavar: str) -> Any:
    """Show an option that may be left out; its help text names the default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def several(metavar: str) -> Any:
    """Show an option of any number of words; its help text names the default."""
    return tyro.conf.arg(metavar=f"[{metavar} ...]", help_behavior_hint="")


Int = Annotated[int | None, optional("INT")]
Float = Annotated[float | None, optional("FLOAT")]
Moment = Annotated[int | float | None, optional("INT|FLOAT")]
Name = Annotated[str | None, optional("NAME")]
Folder = Annotated[Path | None, optional("FOLDER")]
Heads = Annotated[tuple[str, ...], several("LAYER:HEAD|FILE")]
Values = Annotated[dict[str, str], several("NAME VALUE")]
if TYPE_CHECKING:
    Score = str | None
    Pattern = str | None
    Fitter = str | None
    Kept = Storage | None
else:
    # One of the names that exist, whatever is added to the dictionaries.
    Score = Annotated[Literal[tuple(SCORES)] | None, optional("|".join(SCORES))]
    Pattern = Annotated[Literal[tuple(PATTERNS)] | None, optional("|".join(PATTERNS))]
    Fitter = Annotated[Literal[tuple(FITTERS)] | None, optional("|".join(FITTERS))]
    Kept = Annotated[Storage | None, optional("|".join(get_args(Storage)))]


@dataclass(kw_only=True)
class FreezeOptions:
    """How heads are frozen."""

    rate: Float = None
    """Share of the original model's heads that this event freezes, chosen among those still live."""
    count: Int = None
    """Freeze so many heads instead of a share."""
    score: Score = None
    """Heads with the lowest score are frozen first (variance)."""
    pattern: Pattern = None
    """What replaces their attention (mean)."""
    storage: Kept = None
    """Fitted key and distance logits, or every entry in bfloat16 (compact)."""
    fitter: Fitter = None
    """How compact patterns are fitted (proportional)."""
    max_fit_kl: Float = None
    """Largest fit KL of a frozen head, nats (0.2)."""
    strict: bool = False
    """Refuse when one of the lowest heads does not fit, instead of taking the next one."""
    heads: Heads = ()
    """Exactly these heads, as 0:3 1:11 or a file: JSON pairs, or the events.jsonl of a run."""
    exclude: Heads = ()
    """Heads that stay live, written the same way (none)."""
    max_per_layer: Int = None
    """Most heads to freeze in a layer (no limit)."""
    match: Score = None
    """Freeze as many heads in each layer as this score would choose; the control is a random score matched so."""
    whole_groups: bool = False
    """Choose whole KV groups, so that keys go too."""
    seed: Int = None
    """Of random scores and sampled patterns (0)."""
    backend: Name = None
    """Which backend executes frozen heads (auto)."""
    trainable: bool = False
    """Train the patterns on with the model, from their fit, instead of keeping them fixed."""
    heldout_kl: bool = False
    """Also fit on one half of the calibration sequences, and report the KL to the other half."""
    fitter_options: Values = field(default_factory=dict)
    """Further arguments of the fitter, such as: steps 200."""
    pattern_options: Values = field(default_factory=dict)
    """Further arguments of the pattern, such as: scale 4."""

    def given(self) -> dict[str, Any]:
        """Return the arguments of `FreezeConfig` that were given; raise InputError for unusable heads."""
        values = {name: value for name, value in changed(self).items() if name in _FIELDS}
        if len(budgets := [name for name in ("rate", "count", "heads") if name in values]) > 1:
            raise InputError(f"give either a rate, a count or the heads to freeze; got {' and '.join(budgets)}")
        for name in values.keys() & {"heads", "exclude"}:
            values[name] = read_heads(values[name])
        for name in values.keys() & {"fitter_options", "pattern_options"}:
            values[name] = {key: read_value(text) for key, text in values[name].items()}
        return values


_FIELDS = {f.name for f in fields(FreezeConfig)}


def changed(options: Any) -> dict[str, Any]:
    """Return the fields whose value is not the default: what was given on the command line."""
    given = {}
    for f in fields(options):
        value = getattr(options, f.name)
        if value != (f.default if f.default_factory is MISSING else f.default_factory()):
            given[f.name] = value
    return given


def read_heads(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return `(layer, head)` pairs from `LAYER:HEAD` words and JSON files that hold pairs, alone or as "heads"."""
    heads = []
    for word in words:
        layer, colon, head = word.partition(":")
        if colon and layer.isdecimal() and head.isdecimal():
            heads.append((int(layer), int(head)))
        else:
            heads += _heads_of_file(word)
    return tuple(heads)


def _heads_of_file(name: str) -> list[tuple[int, int]]:
    path = Path(name)
    if path.suffix == ".jsonl" or (path.is_dir() and read_events(path)):
        return [(layer, head) for layer, head in heads_in_force(read_events(path))]
    if not path.is_file():
        raise InputError(
            "expected heads as LAYER:HEAD, such as 0:3, or a file that lists them, such as events.jsonl; "
            f"there is no file {name!r}"
        )
    try:
        found = read_json_value(path)
        pairs = found if isinstance(found, list) else found["heads"]
        return [(int(layer), int(head)) for layer, head in pairs]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} does not list heads: expected [[layer, head], ...], or an object that has them as heads"
        ) from error


def read_value(text: str) -> Any:
    """Return a number, list or truth value written as JSON; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
