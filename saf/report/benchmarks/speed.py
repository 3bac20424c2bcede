"""Tables of benchmarks that compare arms with a baseline: operators, updates, prefill, decoding and their like."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from saf.bench.models import TRANSFORMERS, shape_of
from saf.bench.protocol import CALL, FREE, GRAPH, PRUNED, REST_MS, SETTLE_MS
from saf.models.config import PRESETS
from saf.ops.inference.one_launch import are_few
from saf.records import paper
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import MISSING, gibibytes, number, signed
from saf.records.table import Cell, Notes, Part, Table

Record = Mapping[str, Any]
Named = Sequence[tuple[Cell, Record]]
"""Records, each with the cell that names its file."""
OTHER_DEVICE = "other_device"
"""Of the provenance of a record shown among others, most of which another device measured: its own, in short."""
REFUSED = "refused"
UNFINISHED = "Not finished: what was measured before the benchmark was stopped."
KEEPING = "ordinary, every activation kept"
APART = "ordinary, each process by itself"
NEAR_ONE = 0.005
"""A bound this close to 1 leaves nothing to take a share of."""
PINNED = (
    "Kernel pinned: where tokens are few a frozen layer takes one launch for all heads; with live heads pinned to a "
    "kernel it takes a launch for live and one for frozen heads, each with an output product, and in a call the host "
    "pays for every one. Such rows are no measure of a model left to PyTorch's choice of kernel."
)
_WAYS = {"update": "", "both": "forward and backward", "call": "called", "graph": "replayed as a CUDA graph"}
_USUAL_LAYER = (12, 12, 64)
"""Query heads, KV heads and channels of a layer of the 124M model; another layer is named."""


# Rows in groups


@dataclass(frozen=True)
class MeasuredArm:
    """One arm beside its baseline; `free` is the accepted row of the same arm with free frozen heads."""

    row: Record
    free: Record | None
    paper: Quoted | None
    apart: str = ""
    """What tells its frozen heads from those beside another kernel."""

    @property
    def ratio(self) -> float | None:
        """Return baseline time over arm time; None where the comparison is refused."""
        return None if self.row["refused"] else self.row["ratio"]

    @property
    def name(self) -> str:
        """Return what the arm is: a share of frozen heads with their backend, or another attention kernel."""
        if self.row["backend"] is None:
            usual = f"ordinary, {kernel_name(self.row['kernel'])}"
            return {"keeping": KEEPING, "apart": APART}.get(self.row["role"], usual)
        return ", ".join(filter(None, [edited_name(self.row), self.apart]))

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
        """Return which share of the time that free heads would save is saved; None where either saves none."""
        if self.ratio is None or self.ratio < 1 or self.bound is None or self.bound < 1 + NEAR_ONE or self.beats_bound:
            return None
        return (1 - 1 / self.ratio) / (1 - 1 / self.bound)


@dataclass(frozen=True)
class Group:
    """All arms that one baseline is compared with at one point, in one way of running."""

    subject: str
    """The model, or the part of a layer."""
    point: Record
    variant: str
    baseline: str
    control: Record | None
    arms: tuple[MeasuredArm, ...]
    file: str = ""
    unusual: str = ""
    """Which settings make these rows measurements of their own (`SpeedKind.unusual`)."""

    @property
    def way(self) -> str:
        """Return subject and variant: groups that share them share a table."""
        words = [_WAYS.get(word, word.replace("-", " ")) for word in self.variant.split()]
        return ", ".join(filter(None, [self.subject, self.unusual, *words, self.point.get("precision", "")]))

    @property
    def reason(self) -> str | None:
        """Return why comparisons of this group are refused; None where they are not."""
        rows = [self.control] if self.control is not None else [arm.row for arm in self.arms]
        if not any(row["refused"] for row in rows):
            return None
        if self.control is None:
            return "the control could not be measured"
        equal = "two ordinary models" if self.control.get("model") else "two times the same ordinary heads"
        return f"{equal} differ by {100 * abs(self.control['ratio'] - 1):.2f}%"


def subject(row: Record) -> str:
    """Return what a row is about: a model, or a part of a layer."""
    if row.get("alone"):
        return f"{row['alone']} head{'s' * (row['alone'] > 1)} alone"
    return f"whole {row['part']}" if "part" in row else row["model"]


def shape(point: Record) -> str:
    """Return a point as the command line writes it: context x sequences (x micro-batches of an update)."""
    return "x".join(str(point[key]) for key in ("length", "batch_size", "accumulation") if key in point)


def edited_name(row: Record) -> str:
    """Return what an arm's heads are: a share of them frozen, on a backend, or pruned."""
    share = f"{100 * row['rate']:g}%"
    return f"{share} pruned" if row["backend"] == PRUNED else f"{share} frozen, {row['backend']}"


def kernel_name(kernel: str) -> str:
    """Return an attention kernel's name as its makers write it."""
    names = {"cudnn": "cuDNN", "auto": "PyTorch's choice of kernel", "flash": "flash attention"}
    return (names | {"flex": "flex attention"}).get(kernel, kernel)


def model_of(record: Record) -> str:
    """Return the model of a record's settings, and how many layers of it where not all, as its rows name it."""
    settings = record["settings"]
    layers = settings.get("num_layers")
    return f"{settings.get('model')}" + ("" if layers is None else f", {layers} layers")


def way_of(variant: str) -> str:
    """Return how a variant was run: "graph" or "call"."""
    return GRAPH if variant.endswith(f" {GRAPH}") else CALL


def by_way(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return groups by subject and variant."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.way, []).append(group)
    return found


# Kinds


def _no_quote(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class SpeedKind:
    """How records of one kind are shown."""

    name: str
    title: str
    memory_title: str = ""
    """The heading of records that timed nothing."""
    gains: str
    """What its speedups are of: "update"."""
    same: str = "the same model"
    """What the baseline is, but for its heads."""
    up_to_repeats: bool = True
    """Whether a timed block may have fewer calls than `repeats`."""
    compile: str = "auto"
    """The usual setting; records of others say so."""
    quoted: Callable[[Record, Record], Quoted | None] = _no_quote
    """The paper's speedup at the shape of a record's row."""
    quoted_memory: Callable[[Record, Record], Quoted | None] = _no_quote
    """The paper's peak memory at the shape of a record's entry."""
    apart: Callable[[Record], str] = lambda row: ""
    """What tells an arm's frozen heads from those beside another kernel, in words."""
    averaged: bool = False
    """Whether its variants are orders of the same examples, whose mean is shown."""

    def title_of(self, record: Record) -> str:
        """Return the heading for one record."""
        return self.title if record["rows"] or not self.memory_title else self.memory_title

    def unusual(self, record: Record) -> str:
        """Return which settings make other measurements of a record's rows than the usual ones would; "" for none."""
        settings, provenance = record["settings"], record["provenance"]
        driver, words = provenance.get("driver"), []
        if self.name == "op":
            layers = {tuple(row["layer"].values()) for row in record["rows"] if row.get("layer")} - {_USUAL_LAYER}
            words += [f"{heads} heads of {dim}, {kv_heads} of keys" for heads, kv_heads, dim in layers]
            words += ["whole groups frozen"] * bool(settings.get("whole_groups"))
        placed = {"even": "as many heads in every layer frozen", "groups": "whole groups frozen"}
        words.append(placed.get(settings.get("placement", ""), ""))
        if settings.get("per_layer"):
            words.append(f"{' '.join(map(str, settings['per_layer']))} heads of the layers frozen")
        compiled = settings.get("compile", self.compile)
        if compiled == "layers":
            words.append("compiled by layers")
        elif _is_compiled(compiled, driver) != _is_compiled(self.compile, driver):
            words.append("compiled" if _is_compiled(compiled, driver) else "not compiled")
        words += ["layers computed again"] * bool(settings.get("activation_checkpointing"))
        if settings.get("parallel", "none") != "none":
            words.append(f"{settings['parallel']}, {_processes(provenance.get('processes', 1))}")
        words += ["processes of their own"] * bool(settings.get("fresh"))
        if settings.get("dtype", "auto") not in ("auto", "bf16" if driver else "fp32"):
            words.append(settings["dtype"])
        if OTHER_DEVICE in provenance:
            words.append(f"on {provenance[OTHER_DEVICE]}")
        return ", ".join(filter(None, words))

    def memory_of(self, record: Record) -> str:
        """Return whose peak memory a record has: its model, and what is unusual."""
        return ", ".join(filter(None, [model_of(record), self.unusual(record)]))

    def groups(self, record: Record, *, file: str = "") -> list[Group]:
        """Return a record's rows in groups of what one baseline is compared with."""
        found: dict[Hashable, list[Record]] = {}
        for row in record["rows"]:
            key = (subject(row), tuple(row["point"].items()), row["variant"], row["baseline"])
            found.setdefault(key, []).append(row)
        unusual = self.unusual(record)
        return [replace(self._group(record, rows), file=file, unusual=unusual) for rows in found.values()]

    def _group(self, record: Record, rows: Sequence[Record]) -> Group:
        """Return the group of rows that share a point, a variant and a baseline."""
        free = {row["rate"]: row for row in rows if row["role"] == "free" and not row["refused"]}
        arms = [
            MeasuredArm(
                row,
                None if row["role"] == "pruned" else free.get(row["rate"]),
                self.quoted(record, row),
                self.apart(row),
            )
            if row["backend"]
            else MeasuredArm(row, None, None)
            for row in rows
            if row["role"] not in ("control", "free")
        ]
        first, control = rows[0], next((row for row in rows if row["role"] == "control"), None)
        return Group(subject(first), first["point"], first["variant"], first["baseline"], control, tuple(arms))

    def main_groups(self, record: Record) -> list[Group]:
        """Return the groups that a summary of all records shows: those of its rows, or of their means."""
        if not self.averaged:
            return self.groups(record)
        by_task: dict[Hashable, list[Group]] = {}
        for group in self.groups(record):
            key = group.variant.split()[0], way_of(group.variant), *group.point.values(), group.baseline
            by_task.setdefault(key, []).append(group)
        return [_mean_group(groups) for groups in by_task.values()]

    def measured(self, row: Record) -> Hashable | None:
        """Return what a row measures: model or part, point, way of running, baseline, arm; None where it serves others.

        PyTorch's own choice of kernel and cuDNN by name are one there, but for an arm that is itself ordinary attention
        by that choice: every profile of the choice on a device that has both shows cuDNN.
        """
        if row["role"] in ("control", "free"):
            return None
        baseline, arm = (f"{each.removesuffix(' auto')} cudnn" if each.endswith(" auto") else each
                         for each in (row["baseline"], row["arm"]))  # fmt: skip
        arm = row["arm"] if row["backend"] is None else arm
        return (subject(row), tuple(row["point"].items()), row["variant"], baseline, arm), self.apart(row)

    def conditions(self, record: Record) -> str:
        """Return how a record's speeds were measured, and against what; of one that timed nothing, its memory."""
        if record["rows"]:
            return _protocol(record, self.groups(record), same=self.same, up_to_repeats=self.up_to_repeats)
        kind = {"allocated": "what PyTorch's allocator handed out", "resident": "the process's resident set"}
        return " ".join(
            f"Peak memory since the warm-up, one arm a process ({kind[entry['kind']]}). Baseline: the ordinary model."
            for entry in record["memory"][:1]
        )

    def overview(self, records: Named) -> list[Part]:
        """Return a table for each way of running, one of peak memory, and notes to read them by."""
        found = [group for cell, record in records for group in self.groups(record, file=cell.text) if group.arms]
        order = ("length", "batch_size", "accumulation")
        groups = sorted(found, key=lambda group: (*(group.point.get(name, 0) for name in order), group.baseline))
        parts = self._means(records, groups) if self.averaged else self._speeds(records, groups)
        memory = [(cell, self._memory(record)) for cell, record in records if record["memory"]]
        parts += [Table.stacked("", memory).used()] * bool(memory)
        refusals = [f"Refused: {each.way}, {shape(each.point)}: {each.reason}." for each in groups if each.reason]
        wrong = [note for _, record in records for note in _wrong_kernels(record)]
        pinned = [PINNED] * any(arm.apart for group in groups for arm in group.arms)
        quoted = [arm.paper for _, record in records for group in self.groups(record) for arm in group.arms]
        quoted += [self.quoted_memory(record, entry) for _, record in records for entry in record["memory"]]
        notes = [f"Paper, {note}" for note in footnotes(quoted)] or ["The paper has no number at these shapes."]
        return [*parts, Notes([*refusals, *wrong, *pinned, *_bound_notes(groups), *notes])]

    def tables(self, record: Record) -> list[Part]:
        """Return how one record was measured, its tables, which kernels ran, and what was left out."""
        here = Cell(text="")
        parts = [
            each.without(("in", "middle half of pairs", "of the bound", "paper")) if isinstance(each, Table) else each
            for each in self.overview([(here, record)])
        ]
        return [f"{self.conditions(record)} {kernel_words(record)}".strip(), *parts, *unmeasured(record)]

    def _speeds(self, records: Named, groups: Sequence[Group]) -> list[Part]:
        """Return the tables of speedups of several records, whose `groups` these are: one a way of running."""
        sources = {cell.text: cell for cell, _ in records}
        return [_speed_table(chosen, sources).titled(way) for way, chosen in by_way(groups).items()]

    def _means(self, records: Named, groups: Sequence[Group]) -> list[Part]:
        """Return the means over the orders of each record, whose rows of single orders are in its file."""
        parts: list[Part] = []
        for cell, record in records:
            for way in (CALL, GRAPH):
                own = [group for group in groups if group.file == cell.text and way_of(group.variant) == way]
                if own and (means := _orders_table(record, own)).rows:
                    title = f"{own[0].subject}, {record['settings']['task']}: mean over the orders"
                    parts.append(means.titled(title + ", passes replayed as CUDA graphs" * (way == GRAPH)))
        return parts

    def _memory(self, record: Record) -> Table:
        """Return a row for each arm: its peak memory in a process of its own, and the change from ordinary."""
        kernels = {each["arm"].split()[-1] for each in record["memory"]}
        rows = []
        for entry in record["memory"]:
            kernel, change = entry["arm"].split()[-1], entry["change_percent"]
            quoted = self.quoted_memory(record, entry)
            if entry["backend"] is None:
                arm = KEEPING if " keeping " in entry["arm"] else f"ordinary, {kernel_name(kernel)}"
            else:
                arm = edited_name(entry) + f", live heads on {kernel_name(kernel)}" * (len(kernels) > 1)
            changed = MISSING if change is None or entry["backend"] is None else signed(change)
            size = f"{entry['bytes'] / 2**30:.2f} GiB"
            said = MISSING if quoted is None else quoted.text
            rows.append([self.memory_of(record), shape(entry["point"]), arm, size, changed, said])
        head = ["model", "point", "arm", "peak memory", "against ordinary", "paper"]
        return Table.of("", head, rows).used()


def _speed_table(groups: Sequence[Group], sources: Mapping[str, Cell]) -> Table:
    """Return one row an arm: times with TFLOP/s, ratio and its spread, control, bound, paper, and its file."""
    head = ["point", "baseline", "arm", "baseline, ms (TFLOP/s)", "arm, ms (TFLOP/s)", "speedup"]
    head += ["middle half of pairs", "pairs", "share of time", "control", "free bound", "of the bound"]
    head += ["baseline cache", "cache", "paper", "in"]
    several = len({group.baseline for group in groups}) > 1
    rows = [[*_cells(group, arm, several), sources[group.file]] for group in groups for arm in group.arms]
    return Table.of("", head, rows).used()


def _cells(group: Group, arm: MeasuredArm, several: bool) -> list[str]:
    """Return the cells of one arm's row; baselines are named where there are several."""
    row, ratio, share = arm.row, arm.ratio, arm.share_of_bound
    return [
        shape(group.point),
        kernel_name(group.baseline.removeprefix("ordinary ")) if several else MISSING,
        arm.name,
        *(f"{number(row[f'{side}_ms'])} ({number(row[f'{side}_tflops'], 3)})" for side in ("baseline", "arm")),
        REFUSED if ratio is None else f"{ratio:.3f}×",
        MISSING if ratio is None else _half(row),
        number(row["pairs"]),
        f"{1 / ratio:.3f}" if ratio is not None and row.get("part") == "frozen" else MISSING,
        MISSING if group.control is None else f"{group.control['ratio']:.4f}",
        MISSING if arm.bound is None else f"{arm.bound:.3f}×",
        MISSING if share is None else f"{100 * share:.0f}%",
        gibibytes(row.get("baseline_cache_bytes")),
        gibibytes(row.get("cache_bytes")),
        MISSING if arm.paper is None else arm.paper.text,
    ]


def _half(row: Record) -> str:
    return f"{row['q25']:.3f} to {row['q75']:.3f}"


def _bound_notes(groups: Iterable[Group]) -> list[str]:
    """Return one line for each arm that was measured faster than its free bound, which says how far pairs scatter."""
    lines = []
    for group in groups:
        for arm in group.arms:
            if arm.free is not None and arm.beats_bound:
                meet = arm.row["q25"] <= arm.free["q75"]
                why = "pairs scatter more than the two differ" if meet else "something else differs between the two"
                lines.append(
                    f"{arm.name}, {shape(group.point)} ({group.way}): measured faster than its free bound, so no share "
                    f"of it is told; {why} (middle halves {_half(arm.row)} and {_half(arm.free)})."
                )
    return lines


def _wrong_kernels(record: Record) -> list[str]:
    """Return one line for each arm whose profile shows another attention kernel than the one it names."""
    wrong = [seen for seen in record["kernels"] if seen["kernel_seen"] is False]
    return [f"{shape(seen['point'])}: {seen['arm']} did not run the attention kernel it was told to." for seen in wrong]


def kernel_words(record: Record) -> str:
    """Return whether kernels were recorded, and whether they are those of the arms' names."""
    if not record["kernels"]:
        return "Kernels not recorded."
    seen = [entry["kernel_seen"] for entry in record["kernels"] if entry["kernel_seen"] is not None]
    return "The profile of every arm that names an attention kernel shows it." if seen and all(seen) else ""


def missing_lines(record: Record) -> list[str]:
    """Return a line for each thing that a record lacks: an end before its time, what was left out."""
    reasons: dict[str, list[str]] = {}
    for entry in record.get("left_out") or []:
        reasons.setdefault(entry["why"].rstrip("."), []).append(entry["what"])
    unfinished = [UNFINISHED] if record.get("finished") is False else []
    return [*unfinished, *(f"Left out: {'; '.join(what)}: {why}." for why, what in reasons.items())]


def unmeasured(record: Record) -> list[Part]:
    """Return notes on what a record lacks; or nothing."""
    lines = missing_lines(record)
    return [Notes(lines)] if lines else []


# How records were measured


def _protocol(record: Record, groups: Sequence[Group], *, same: str, up_to_repeats: bool) -> str:
    """Return in one paragraph how a record's speeds were measured, and against what."""
    settings, provenance = record["settings"], record["provenance"]
    kernels = dict.fromkeys(kernel_name(group.baseline.removeprefix("ordinary ")) for group in groups)
    baselines = " or ".join(f"ordinary attention on {kernel}" for kernel in kernels)
    process = "every timed block in a process of its own" if settings.get("fresh") else "in the same process"
    if settings.get("parallel", "none") != "none":
        process = f"in {_processes(provenance['processes'])} ({settings['parallel']}), the slowest one's time"
    count = number(settings["repeats"])
    block = f"each timed block the {'median of up to' if up_to_repeats else 'mean of'} {count} calls"
    block = "each timed block one call" if settings["repeats"] == 1 else block
    floors, peak = "", provenance.get("peak")
    if peak and any(row["arm_floor_ms"] is not None for row in record["rows"]):
        rates = f"{number(peak['flops'] / 1e12)} TFLOP/s in bfloat16 and {number(peak['bandwidth'] / 1e12)} TB/s"
        floors = f" Floors are roofline bounds at {rates} ({peak['source']})."
    return (
        f"Baseline: {same} with {baselines} in every head, "
        f"{compiled(record)}, {process}; alternating pairs (ABBA), {block}{_clocks(record)}. "
        f"Control: a second ordinary model against the first; measurements whose control is further than "
        f"{100 * settings['tolerance']:g}% from 1 are refused.{floors}"
    )


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def _clocks(record: Record) -> str:
    """Say what comes before each timed block on account of the device's clocks; older records have nothing."""
    settings, cuda = record["settings"], record["provenance"]["driver"]
    pauses = (
        ("settle_ms", SETTLE_MS, "after up to {:g} ms of untimed ones"),
        ("rest_ms", REST_MS, "after {:g} ms of rest"),
    )
    for name, usual, words in pauses:
        given = settings.get(name, 0.0)
        if milliseconds := (usual if cuda else 0.0) if given is None else given:
            return " " + words.format(milliseconds)
    return ""


def compiled(record: Record) -> str:
    """Say whether a benchmark compiled its models, by default where there is a GPU, or which arms of an operator's."""
    if any("ran" in row for row in record["rows"]):
        some = [row for row in record["rows"] if row.get("ran") == "compiled"]
        names = ["layers with frozen heads where replayed as graphs"] * any(row["backend"] for row in some)
        names += dict.fromkeys(kernel_name(row["kernel"]) for row in some if row["backend"] is None)
        return f"not compiled but for {' and '.join(names)}" if names else "not compiled"
    settings = record["settings"]
    again = ", layers computed again in the backward pass" * bool(settings.get("activation_checkpointing"))
    if settings["compile"] == "layers":
        return f"compiled by decoder layers{again}"
    return ("compiled" if _is_compiled(settings["compile"], record["provenance"]["driver"]) else "not compiled") + again


def _is_compiled(setting: str, driver: str | None) -> bool:
    """Return whether a setting of `compile` has whole models compiled, on the device of a driver, None for a CPU."""
    return setting == "on" or (setting == "auto" and bool(driver))


# Means over orders of examples


def _mean_group(groups: Sequence[Group]) -> Group:
    """Return the group of several orders of one task, those that were accepted; refused where none was."""
    chosen = [group for group in groups if group.reason is None] or list(groups)
    arms = []
    for arm in chosen[0].arms:
        rows = [each.row for group in chosen for each in group.arms if each.row["arm"] == arm.row["arm"]]
        means = {name: statistics.fmean(row[name] for row in rows) for name in ("ratio", "baseline_ms", "arm_ms")}
        arms.append(replace(arm, row={**arm.row, **means}, free=None))
    variant = f"{chosen[0].variant.split()[0]} mean-of-{len(chosen)}-orders"
    variant += f" {GRAPH}" * (way_of(chosen[0].variant) == GRAPH)
    return replace(chosen[0], variant=variant, arms=tuple(arms))


def _orders_table(record: Record, groups: Sequence[Group]) -> Table:
    """Return the mean over orders of each arm's ratio, its standard error, and what its kernels take of an update.

    Orders whose control refuses them are left out, so that no row may be left. Where kernels take less than the
    update, the host bounds it; where both ways were timed, kernels stand beside graphs.
    """
    found: dict[str, list[Record]] = {}
    quoted: dict[str, Quoted | None] = {}
    for arm in (arm for group in groups for arm in group.arms):
        quoted[arm.row["arm"]] = arm.paper
        for row in (arm.row, arm.free):
            if row is not None and row["backend"] and not row["refused"] and row not in found.get(row["arm"], []):
                found.setdefault(row["arm"], []).append(row)
    graphed = way_of(groups[0].variant) == GRAPH
    shown = record["provenance"]["driver"] and (record["settings"].get("graphs") != "both" or graphed)
    kernels = {entry["arm"]: entry["kernels"] for entry in record["kernels"]} if shown else {}
    repeats = record["settings"]["repeats"]
    rows = []
    for arm, measured in found.items():
        ratios = [row["ratio"] for row in measured]
        error = f" ± {statistics.stdev(ratios) / math.sqrt(len(ratios)):.3f}" if len(ratios) > 1 else ""
        own = [each for name in (measured[0]["baseline"], arm) if (each := kernels.get(name))]
        said = quoted.get(arm)
        rows.append(
            [
                edited_name(measured[0]),
                f"{statistics.fmean(ratios):.3f}×{error}",
                len(ratios),
                *(number(statistics.fmean(row[side] for row in measured)) for side in ("baseline_ms", "arm_ms")),
                " / ".join(f"{sum(one['calls'] for one in each) / repeats:,.0f}" for each in own) or MISSING,
                " / ".join(f"{sum(one['ms'] for one in each) / repeats:.1f}" for each in own) or MISSING,
                MISSING if said is None else said.text,
            ]
        )
    head = ["arm", "speedup, mean ± SE", "orders", "ordinary, ms", "arm, ms"]
    return Table.of("", [*head, "kernels an update", "ms on the device", "paper"], rows).used()


# What the paper has at the same shapes


def _point(row: Record) -> tuple[str, int, int]:
    return row["model"], row["point"]["length"], row["point"]["batch_size"]


def _quoted_update(record: Record, row: Record) -> Quoted | None:
    """Return the paper's speedup of an update; it replayed none as CUDA graphs."""
    if way_of(row["variant"]) == GRAPH:
        return None
    together = record["provenance"].get("processes", 1) > 1
    return paper.update_speed(_point(row), row["rate"], pruned=row["backend"] == PRUNED, together=together)


def _quoted_update_memory(record: Record, entry: Record) -> Quoted | None:
    point = (model_of(record), entry["point"]["length"], entry["point"]["batch_size"])
    return paper.update_memory(point, entry["rate"], pruned=entry["backend"] == PRUNED)


def _quoted_finetuning(record: Record, row: Record) -> Quoted | None:
    if row["model"] != "124m" or row["backend"] == PRUNED:
        return None
    return paper.finetuning(row["variant"].split()[0], row["rate"])


def _quoted_finetuning_memory(record: Record, entry: Record) -> Quoted | None:
    settings = record["settings"]
    if settings["model"] != "124m" or entry["backend"] in (None, FREE, PRUNED):
        return None
    return paper.finetuning(settings["task"], entry["rate"], memory=True)


def _quoted_prefill(record: Record, row: Record) -> Quoted | None:
    graph = row["variant"] == GRAPH
    return paper.prefill_speed(_point(row), row["rate"], graph=graph, pruned=row["backend"] == PRUNED)


def _quoted_op(record: Record, row: Record) -> Quoted | None:
    """Return the paper's speedup of Qwen3-4B's attention, forward, where a row has its shape."""
    layer, point = row["layer"], row["point"]
    qwen = (layer["num_heads"], layer["num_kv_heads"], layer["head_dim"]) == (32, 8, 128)
    forward = row["part"] == "layer" and row["variant"].startswith("forward")
    return paper.attention_speed(point["length"], point["batch_size"], row["rate"]) if qwen and forward else None


def _prefill_apart(row: Record) -> str:
    """Say that the kernel is pinned, where frozen layers left to themselves take one launch for all heads.

    They do with few tokens in 16 bits (`saf.ops.inference.one_launch`).
    """
    name, point = row["model"].split(",")[0], row["point"]
    if row["backend"] != "toeplitz" or row["kernel"] == "auto" or point.get("precision") == "fp32":
        return ""
    if name not in PRESETS and name not in TRANSFORMERS:
        return ""
    sizes = shape_of(name, point["length"])
    values = torch.empty(point["batch_size"], sizes.num_kv_heads, point["length"], sizes.head_dim, device="meta")
    few = are_few(values, sizes.num_heads, replayed=row["variant"] == GRAPH)
    return "kernel pinned" if few else ""


SPEED_KINDS = {
    kind.name: kind
    for kind in (
        SpeedKind(
            name="update",
            title="Updates: speed",
            memory_title="Updates: peak memory",
            gains="update",
            up_to_repeats=False,
            quoted=_quoted_update,
            quoted_memory=_quoted_update_memory,
        ),
        SpeedKind(
            name="finetune",
            title="Finetuning updates: speed",
            gains="finetuning update",
            up_to_repeats=False,
            compile="off",
            quoted=_quoted_finetuning,
            quoted_memory=_quoted_finetuning_memory,
            averaged=True,
        ),
        SpeedKind(name="prefill", title="Prefill", gains="prefill", quoted=_quoted_prefill, apart=_prefill_apart),
        SpeedKind(
            name="attention", title="Attention layers", gains="attention layers", same="the same layers", compile="off"
        ),
        SpeedKind(name="decode", title="Decoding", gains="decoding"),
        SpeedKind(
            name="op",
            title="One layer's attention",
            gains="attention",
            same="the same heads or layer",
            quoted=_quoted_op,
        ),
    )
}
"""Kinds of records that compare arms, in the order of documents."""


def compares_arms(record: Record) -> bool:
    """Return whether a record's rows are arms beside baselines."""
    return record.get("kind") in SPEED_KINDS
