"""The rows of a benchmark's record in groups: what ran against one baseline, at one point, in one way."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saf.bench.harness.arms import PRUNED
from saf.bench.harness.pairs import control_words
from saf.records.paper import Quoted

_WAYS = {
    "update": "",
    "forward": "forward",
    "both": "forward and backward",
    "call": "called",
    "graph": "replayed as a CUDA graph",
}
OTHER_DEVICE = "other_device"
"""Of the provenance of a record shown among others, most of which another device measured: its own, in short."""
KEEPING = "ordinary, every activation kept"
APART = "ordinary, each process by itself"
NEAR_ONE = 0.005
"""A bound this close to 1 leaves nothing to take a share of."""

Record = Mapping[str, Any]
QuotedAt = Callable[[Record], Quoted | None]
"""What the paper has at the shape of a row."""
Apart = Callable[[Record], str]
"""What tells an arm's row from one that differs in the kernel asked for alone, in words; nothing where none does."""


@dataclass(frozen=True)
class Measured:
    """Hold one arm beside its baseline; `free` is the accepted row of the same arm with free frozen heads."""

    row: Record
    free: Record | None
    paper: Quoted | None
    apart: str = ""
    """In words, what tells its frozen heads' way from another kernel's (`Apart`)."""

    @property
    def ratio(self) -> float | None:
        """Return baseline time over arm time; None when the measurement is refused."""
        return None if self.row["refused"] else self.row["ratio"]

    @property
    def name(self) -> str:
        """Say what the arm is: a share of frozen heads with their backend, or another attention kernel."""
        if self.row["backend"] is None:
            usual = f"ordinary, {kernel_name(self.row['kernel'])}"
            return {"keeping": KEEPING, "apart": APART}.get(self.row["role"], usual)
        return ", ".join(filter(None, [edited_name(self.row), self.apart]))

    @property
    def pruned(self) -> bool:
        """Return whether its heads are gone rather than frozen."""
        return self.row["backend"] == PRUNED

    @property
    def bound(self) -> float | None:
        """Return the free bound: the speedup were the arm's frozen heads free."""
        return None if self.free is None else self.free["ratio"]

    @property
    def beats_bound(self) -> bool:
        """Return whether the arm gains, and was measured faster than its free bound."""
        return self.ratio is not None and self.bound is not None and self.ratio > max(1.0, self.bound)

    @property
    def share_of_bound(self) -> float | None:
        """Return which share of the time that free heads would save is saved.

        None when either saves none, or the arm was measured faster than the bound.
        """
        if self.ratio is None or self.ratio < 1 or self.bound is None or self.bound < 1 + NEAR_ONE or self.beats_bound:
            return None
        return (1 - 1 / self.ratio) / (1 - 1 / self.bound)


@dataclass(frozen=True)
class Group:
    """Hold all arms that one baseline is compared with at one point, in one way of running."""

    kind: str
    subject: str
    """The model, or the part of a layer."""
    point: Record
    variant: str
    baseline: str
    control: Record | None
    arms: tuple[Measured, ...]
    file: str = ""
    """The name of its file, where several are shown together."""
    unusual: str = ""
    """In words, which settings make these rows measurements of their own (`SpeedKind.unusual`)."""

    @property
    def way(self) -> str:
        """Return subject and variant: groups that share them share an axis."""
        words = [
            self.subject,
            self.unusual,
            *(_WAYS.get(word, word.replace("-", " ")) for word in self.variant.split()),
            self.point.get("precision", ""),
        ]
        return ", ".join(word for word in words if word)

    @property
    def reason(self) -> str | None:
        """Return why measurements of this group are refused; None when they are not."""
        rows = [self.control] if self.control is not None else [arm.row for arm in self.arms]
        if not any(row["refused"] for row in rows):
            return None
        if self.control is None:
            return "the control could not be measured"
        return control_words(self.control, self.control["ratio"])


def groups_of(record: Record, *, quoted: QuotedAt, apart: Apart, unusual: str, file: str = "") -> list[Group]:
    """Return the groups of a record of arms, in the order of its rows, with what the paper has beside each arm."""
    found: dict[tuple, list[Record]] = {}
    for row in record["rows"]:
        key = (subject(row), tuple(row["point"].items()), row["variant"], row["baseline"])
        found.setdefault(key, []).append(row)
    return [replace(_group(record["kind"], rows, quoted, apart), file=file, unusual=unusual) for rows in found.values()]


def _group(kind: str, rows: Sequence[Record], quoted: QuotedAt, apart: Apart) -> Group:
    """Return the group of one kind's rows that share a point and a variant, with its control and bounds."""
    first = rows[0]
    free = {row["rate"]: row for row in rows if row["role"] == "free" and not row["refused"]}
    arms = [row for row in rows if row["role"] not in ("control", "free")]
    return Group(
        kind=kind,
        subject=subject(first),
        point=first["point"],
        variant=first["variant"],
        baseline=first["baseline"],
        control=next((row for row in rows if row["role"] == "control"), None),
        arms=tuple(
            Measured(row, None if row["role"] == "pruned" else free.get(row["rate"]), quoted(row), apart(row))
            if row["backend"]
            else Measured(row, None, None)
            for row in arms
        ),
    )


def by_point(groups: Iterable[Group]) -> list[Group]:
    """Return groups by their point, those of one point by their baseline."""
    return sorted(
        groups,
        key=lambda group: (
            group.point["length"],
            group.point["batch_size"],
            group.point.get("accumulation", 0),
            group.baseline,
        ),
    )


def measures(row: Record) -> Hashable:
    """Return what a row measures: model or part, point, way of running, baseline, arm.

    PyTorch's own choice of kernel and cuDNN by name are one there, but for an arm that is itself ordinary attention by
    that choice: every profile of the choice on a device that has both shows cuDNN.
    """
    arm = row["arm"] if row["backend"] is None else _named(row["arm"])
    return subject(row), tuple(row["point"].items()), row["variant"], _named(row["baseline"]), arm


def _named(arm: str) -> str:
    return f"{arm.removesuffix(' auto')} cudnn" if arm.endswith(" auto") else arm


def model_of(record: Record) -> str:
    """Return the model of a record's settings, and how many layers of it where not all, as its rows name it."""
    settings = record["settings"]
    layers = settings.get("num_layers")
    return f"{settings.get('model')}" + ("" if layers is None else f", {layers} layers")


def subject(row: Record) -> str:
    """Return what a row is about: a model, or a part of a layer."""
    if row.get("alone"):
        return f"{_count(row['alone'], 'head')} alone"
    return f"whole {row['part']}" if "part" in row else row["model"]


def shape(point: Record) -> str:
    """Return a point as the command line writes it: context x sequences (x micro-batches of an update)."""
    return "x".join(str(point[key]) for key in ("length", "batch_size", "accumulation") if key in point)


def shape_in_words(point: Record) -> str:
    """Return a point in words."""
    parts = [f"{point['length']:,} tokens", _count(point["batch_size"], "sequence")]
    if "accumulation" in point:
        parts.append(_count(point["accumulation"], "micro-batch"))
    return " × ".join(parts)


def edited_name(row: Record) -> str:
    """Return what an arm's heads are: a share of them frozen, on a backend, or pruned."""
    share = f"{100 * row['rate']:g}%"
    return f"{share} pruned" if row["backend"] == PRUNED else f"{share} frozen, {row['backend']}"


def kernel_name(kernel: str) -> str:
    """Return an attention kernel's name as its makers write it."""
    names = {
        "cudnn": "cuDNN",
        "auto": "PyTorch's choice of kernel",
        "flash": "flash attention",
        "flex": "flex attention",
    }
    return names.get(kernel, kernel)


def baseline_name(baseline: str) -> str:
    """Return "ordinary cudnn" as "ordinary attention on cuDNN"."""
    return f"ordinary attention on {kernel_name(baseline.removeprefix('ordinary '))}"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"
