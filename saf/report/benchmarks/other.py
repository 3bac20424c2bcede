"""Tables of the other benchmarks: accuracy, freezing, compilation after an event, and the update beside nanoGPT's."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from saf.records import paper
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import MISSING, gibibytes, number, seconds
from saf.records.table import Cell, Notes, Part, Table
from saf.report.benchmarks.speed import REFUSED, Named, Record, compiled, shape, unmeasured


@dataclass(frozen=True, kw_only=True)
class OtherKind:
    """How records of one kind are shown."""

    name: str
    title: str
    conditions: Callable[[Record], str]
    """How a record was measured, and against what."""
    measured: Callable[[Record], Hashable | None]
    """What a row measures: of two rows of the same the newer one stands; None for a row that serves others."""
    overview: Callable[[Named], list[Part]]
    """Tables of several records, each row with its file."""
    details: Callable[[Record], list[Part]] | None = None
    """Tables of one record, where they are not those of several."""

    def title_of(self, record: Record) -> str:
        """Return the heading for one record."""
        return self.title

    def unusual(self, record: Record) -> str:
        """Return nothing: what a row measures is in the row."""
        return ""

    def tables(self, record: Record) -> list[Part]:
        """Return how one record was measured, its tables, and what was left out."""
        parts = self.details(record) if self.details else self.overview([(Cell(text=""), record)])
        plain = [each.without(("in",)).used() if isinstance(each, Table) else each for each in parts]
        return [*filter(None, [self.conditions(record)]), *plain, *unmeasured(record)]


def _stacked(records: Named, table: Callable[[Record], Table], title: str = "") -> list[Part]:
    """Return one table of the rows of several records; none where there are no rows."""
    found = [(cell, made) for cell, record in records if (made := table(record)).rows]
    return [Table.stacked(title, found).used()] if found else []


def _rows(record: Record, part: str) -> list[Record]:
    return [row for row in record["rows"] if row["part"] == part]


# Accuracy

_PARTS = {
    "layer": ("a layer of live and frozen heads", "unfrozen layer"),
    "pruned layer": ("a layer whose heads are pruned", "unfrozen layer"),
    "transitions": ("a model after each freezing, pruning or undoing of heads", "ordinary model"),
    "operator": ("frozen heads alone, operands in the dtype", "PyTorch's attention"),
}
_PAPERS_CASE = {"length": 129, "stored": 192, "batch_size": 2, "num_heads": 4, "head_dim": 64, "frozen": [1, 3]}
_OF_PAPER = {"fp32": 0, "bf16": 2}
"""Where the paper's largest and relative error of a precision stand among its four numbers of a tensor."""


def scientific(value: float | None) -> str:
    """Return an error the way the paper's numbers are kept: 1.19e-7."""
    if value is None:
        return MISSING
    digits, power = f"{value:.2e}".split("e")
    return f"{digits}e{int(power)}"


def _error_groups(record: Record) -> Iterable[tuple[tuple[str, str | None, str], list[Record]]]:
    key = lambda row: (row["part"], row["backend"], row["precision"])  # noqa: E731
    return ((where, list(rows)) for where, rows in groupby(record["rows"], key=key))


def _is_papers_case(record: Record) -> bool:
    settings = record["settings"]
    case = {key: list(value) if isinstance(value := settings[key], tuple) else value for key in _PAPERS_CASE}
    return case == _PAPERS_CASE


def _largest_errors(record: Record) -> Table:
    """Return the largest error of each part, backend and precision, beside its limit and the paper's."""
    head = ["of", "backend", "precision", "tensors", "relative L2", "largest share of its limit", "within"]
    head += ["unfrozen layer or PyTorch's attention", "from eager, L2", "paper, L2"]
    papers, cells = _is_papers_case(record), []
    for (part, backend, precision), rows in _error_groups(record):
        quoted = [paper.GRADIENT_ERRORS.get(row["tensor"]) for row in rows] if papers and part == "layer" else []
        said = [each[_OF_PAPER[precision] + 1] for each in quoted if each]
        said += [paper.PRUNED_ERRORS[precision]] if papers and part == "pruned layer" else []
        cells.append(
            [
                _PARTS[part][0],
                backend,
                precision,
                len(rows),
                scientific(max(row["relative_l2"] for row in rows)),
                f"{100 * max(row['relative_l2'] / row['limit'] for row in rows):.0f}%",
                "yes" if all(row["within"] for row in rows) else Cell(text="above", strong=True),
                scientific(max(row["beside"]["relative_l2"] for row in rows)),
                scientific(max((row["eager"]["relative_l2"] for row in rows if row["eager"]), default=None)),
                max(said, key=float, default=MISSING),
            ]
        )
    return Table.of("", head, cells).used()


def _error_details(record: Record) -> list[Part]:
    """Return a row a tensor, for each part, backend and precision."""
    parts: list[Part] = []
    for (part, backend, precision), rows in _error_groups(record):
        what, beside = _PARTS[part]
        head = ["tensor", "max. absolute", "relative L2", "limit", "within", f"{beside}, max.", f"{beside}, L2"]
        head += ["from eager, max.", "paper, max.", "from eager, L2", "paper, L2"]
        first, cells = _OF_PAPER[precision], []
        for row in rows:
            eager, papers = row["eager"] or {}, _is_papers_case(record) and part == "layer"
            quoted = paper.GRADIENT_ERRORS.get(row["tensor"]) if papers else None
            most, relative = quoted[first : first + 2] if quoted else (MISSING, MISSING)
            found, other = (
                [scientific(errors[key]) for key in ("max_abs", "relative_l2")] for errors in (row, row["beside"])
            )
            within = "yes" if row["within"] else Cell(text="above", strong=True)
            from_eager = [scientific(eager.get("max_abs")), most, scientific(eager.get("relative_l2")), relative]
            cells.append([row["tensor"], *found, scientific(row["limit"]), within, *other, *from_eager])
        title = ", ".join(filter(None, [what, backend, precision]))
        parts.append(Table.of(title, head, cells).used())
    return [*parts, _error_notes([record])]


def _error_overview(records: Named) -> list[Part]:
    parts = _stacked(records, _largest_errors, "Largest relative L2 error of output and gradients")
    return [*parts, _error_notes([record for _, record in records])]


def _error_notes(records: Sequence[Record]) -> Notes:
    """Return where the paper's numbers are from, and which of a pruned layer it has."""
    cases = [record for record in records if _is_papers_case(record)]
    if not cases:
        return Notes(["The paper tells another case."])
    source = paper.GRADIENTS
    lines = [
        f"Paper, {source.label}: {source.conditions}. It stands beside our column of the same comparison.",
    ]
    if any(_rows(record, "pruned layer") for record in cases):
        fp32, bf16 = paper.PRUNED_ERRORS.values()
        lines.append(
            f"Of the pruned layer the paper tells the largest relative L2 error of the seven tensors alone: {fp32} in "
            f"fp32, {bf16} in bf16."
        )
    return Notes(lines)


def _error_conditions(record: Record) -> str:
    """Return the case whose errors are measured, and against what."""
    settings = record["settings"]
    return (
        f"{settings['batch_size']} sequences of {settings['length']} tokens, {settings['num_heads']} heads of "
        f"{settings['head_dim']} channels, patterns of {settings['stored']} positions, heads "
        f"{', '.join(map(str, settings['frozen']))} frozen. Baseline: the exact result in float64. A row is within its "
        f"limit by its relative L2 error; the limit follows from what stands beside it."
    )


# Freezing

SYNTHETIC = "synthetic: random weights whose heads see distance and content to different degrees; not trained"
"""What a record of freezing says of weights that nobody trained."""
_FITS = "Fit of all heads and its KL"
_DENSE = "Dense collection of the same queries and keys, in float32, as the baseline"


def _freezing_overview(records: Named) -> list[Part]:
    """Return one row an intervention with the warm time of each stage, one a fit, one a dense collection."""
    quoted: list[Quoted | None] = []
    parts = _stacked(records, lambda record: _interventions(record, quoted))
    fits, dense = _stacked(records, _fits, _FITS), _stacked(records, _dense, _DENSE)
    quoted += [Quoted("", paper.COSTS)] * bool(fits)
    notes = [f"Paper, {note}" for note in footnotes(quoted)]
    if fits:
        cost = {rate: paper.INTERVENTION["124m", 4096, rate]["fit"] for rate in (0.25, 0.5)}
        heads = f"36 heads in {cost[0.25]} s and 72 in {cost[0.5]} s"
        notes = [f"The paper fits {heads}, 400 Adam steps each (124M, 4K).", *notes]
    notes += ["The paper has no number at these shapes."] * (not any(quoted))
    return [*parts, *fits, *dense, Notes(notes)]


def _interventions(record: Record, quoted: list[Quoted | None]) -> Table:
    """Return median seconds of each stage and of the whole, and append what the paper has to `quoted`."""
    rows = _rows(record, "intervention")
    cells = []
    for row in rows:
        model, length, sequences = row["model"], row["point"]["length"], row["point"]["batch_size"]
        found = paper.intervention(model, length, row["rate"], "total", sequences=sequences)
        quoted.append(found)
        # What the paper has of these stages stands in the table of one record alone; its source is named here too.
        quoted += [
            paper.intervention(model, length, row["rate"], part, sequences=sequences)
            for part in ("statistics", "fit")
            if part in row["stages"]
        ]
        whole = row["spread"]
        title = f"{Path(model).name}, {length}x{sequences}, {100 * row['rate']:g}% of heads"
        stages = [seconds(stage["median"]) for stage in row["stages"].values()]
        spread = f"{seconds(whole['min'])} to {seconds(whole['max'])}"
        said = MISSING if found is None else found.text
        cells.append([title, *stages, seconds(whole["median"]), spread, seconds(row["first_seconds"]), said])
    stages = [*rows[0]["stages"]] if rows else []
    return Table.of("", ["intervention", *stages, "whole", "range", "first use", "paper"], cells)


def _fits(record: Record) -> Table:
    """Return the table of timed fits: heads, tokens, seconds, sweeps, and how far from the reference they end."""
    head = ["of", "heads", "tokens", "warm median", "first use", "sweeps, mean and most", "worst KL"]
    head += ["KL over the reference, at most", "not converged"]
    cells = [
        [
            Path(row["of"]).name,
            number(row["heads"]),
            number(row["length"]),
            seconds(row["seconds"]) + _limit(row["seconds"], row["bar_seconds"], " s"),
            seconds(row["seconds"] + row["first_use_seconds"]),
            f"{row['sweeps']['mean']:.1f}, {row['sweeps']['max']}",
            f"{row['worst_kl']:.4f} nats",
            MISSING
            if row["excess_kl"] is None
            else f"{scientific(row['excess_kl'])} nats" + _limit(row["excess_kl"], row["bar_excess_kl"], " nats"),
            number(row["not_converged"]),
        ]
        for row in _rows(record, "fit")
    ]
    return Table.of("", head, cells).used()


def _dense(record: Record) -> Table:
    """Return the table that compares the statistics with their collection from whole matrices."""
    head = ["point", "layers measured", "dense, all layers", "ours", "ratio", "intervention with it", "ratio of wholes"]
    head += ["ours from float64, relative"]
    cells = []
    for row in _rows(record, "dense"):
        ratios = ["refused"] * 2 if row["refused"] else [f"{row[key]:.1f}×" for key in ("ratio", "intervention_ratio")]
        layers = f"{row['layers']} of {row['of_layers']}" + (", extrapolated" if row["extrapolated"] else "")
        place = f"{Path(row['model']).name} {row['point']['length']}x{row['point']['batch_size']}"
        largest = max(row["difference"].values())
        worst = scientific(largest) + _limit(largest, row["bar_difference"])
        times = [seconds(row["seconds"]), seconds(row["statistics_seconds"])]
        cells.append([place, layers, *times, ratios[0], seconds(row["intervention_seconds"]), ratios[1], worst])
    return Table.of("", head, cells).used()


def _limit(value: float, limit: float | None, unit: str = "") -> str:
    """Return behind a number whether it is within its limit; nothing where it has none."""
    return "" if limit is None else f" ({'within' if value <= limit else 'above'} {limit:g}{unit})"


def _freezing_measured(row: Record) -> Hashable:
    point = tuple((row.get("point") or {"length": row.get("length")}).items())
    return row["part"], row.get("model", row.get("of")), point, row.get("rate")


# Compilation after an event

FORMS = {"whole": "the whole model", "layers": "by decoder layers"}
_CACHES = {"empty": "empty", "ahead": "filled ahead", "warm": "of an earlier process"}
"""What the compiler finds on disk when an event comes, by the names of records."""
_EVENTS = ("model", "point", "compiled", "cache on disk", "event", "heads frozen", "lost", "first update")
_EVENTS += ("update after it",)
_AHEAD = ("model", "point", "layouts compiled ahead", "took", "memory, at most")
_PAIRS = ("model", "point", "frozen", "whole, ms", "by layers, ms", "whole / by layers", "middle half of pairs")
_PAIRS += ("pairs", "control", "kernels whole", "kernels by layers")


def _compile_conditions(record: Record) -> str:
    """Return what is counted as lost, and how forms were compared."""
    settings, words = record["settings"], []
    if _rows(record, "event"):
        words.append(
            "Lost is what the updates after an event took beyond as many at the speed that follows, their "
            f"compilation included and the event's own work left out; {settings['after']} updates an event, each "
            "form once, in a process of its own that begins with no compiled code on disk."
        )
    if _rows(record, "pair"):
        # Earlier records waited for the device after each update, whose successor then began with an idle one.
        apart = " in a row, as in training" if settings.get("in_a_row") else ", the device waited for after each"
        words.append(
            f"Forms are compared in one process, in alternating pairs (ABBA), each timed block the mean of "
            f"{number(settings['repeats'])} updates{apart}. Control: the whole model compiled again; pairs whose "
            f"control is further than {100 * settings['tolerance']:g}% from 1 are refused."
        )
    return " ".join(words)


def _compile_overview(records: Named) -> list[Part]:
    """Return the tables of events, of processes that compiled ahead, and of pairs."""
    kinds = (
        ("", "event", _EVENTS, _event_cells),
        ("Processes that compiled ahead", "ahead", _AHEAD, _ahead_cells),
        ("Updates compiled whole and by layers", "pair", _PAIRS, _pair_cells),
    )
    parts: list[Part] = []
    for title, part, head, cells in kinds:

        def table(record: Record, part=part, head=head, cells=cells) -> Table:
            return Table.of("", head, [cells(row) for row in _rows(record, part) if not row.get("control")])

        parts += _stacked(records, table, title)
    return parts


def _event_cells(row: Record) -> list[str]:
    times = [seconds(row[name]) for name in ("lost_s", "first_s", "update_s")]
    form, cache = FORMS[row["form"]], _CACHES[row["caches"]]
    return [row["model"], shape(row["point"]), form, cache, row["event"], number(row["frozen"]), *times]


def _ahead_cells(row: Record) -> list[str]:
    layouts, took = number(row["layouts"]), seconds(row["seconds"])
    return [row["model"], shape(row["point"]), layouts, took, gibibytes(row["bytes"])]


def _pair_cells(row: Record) -> list[str]:
    """Return the cells of two forms at one share of frozen heads; earlier records have no kernels."""
    refused, busy = row["refused"], [row.get("busy", {}).get(form) for form in FORMS]
    return [
        row["model"],
        shape(row["point"]),
        f"{100 * row['rate']:g}%",
        number(row["baseline_ms"]),
        number(row["arm_ms"]),
        REFUSED if refused else f"{row['ratio']:.3f}×",
        MISSING if refused else f"{row['q25']:.3f} to {row['q75']:.3f}",
        number(row["pairs"]),
        MISSING if row["control_ratio"] is None else f"{row['control_ratio']:.4f}",
        *(MISSING if each is None else f"{number(each['kernels'])}, {number(each['ms'])} ms" for each in busy),
    ]


def _compile_measured(row: Record) -> Hashable | None:
    if row.get("control"):
        return None
    own = [row.get(name) for name in ("form", "caches", "event", "rate")]
    return row["part"], row["model"], tuple(row["point"].items()), *own


# nanoGPT

_NANOGPT = ("model", "point", "nanoGPT, ms", "ours, ms", "speedup", "middle half of pairs", "pairs", "control")
_NANOGPT += ("nanoGPT, tokens/s", "ours, tokens/s")


def _nanogpt(record: Record) -> Table:
    """Return a row a point: times, ratio and its spread, control, tokens a second."""
    cells = [
        [
            row["model"],
            shape(row["point"]),
            number(row["baseline_ms"]),
            number(row["arm_ms"]),
            REFUSED if row["refused"] else f"{row['ratio']:.3f}×",
            MISSING if row["refused"] else f"{row['q25']:.3f} to {row['q75']:.3f}",
            number(row["pairs"]),
            f"{row['control_ratio']:.4f}",
            f"{row['baseline_tokens_per_second']:,.0f}",
            f"{row['arm_tokens_per_second']:,.0f}",
        ]
        for row in record["rows"]
        if not row["control"]
    ]
    return Table.of("", _NANOGPT, cells)


def _nanogpt_conditions(record: Record) -> str:
    """Return what was compared, and how."""
    tolerance, model = 100 * record["settings"]["tolerance"], str(record["nanogpt_model_sha256"])[:12]
    return (
        f"Baseline: nanoGPT's own update, its model.py of sha256 {model}; ours: ordinary attention in every head. "
        f"Both {compiled(record)}, in the same process; alternating pairs (ABBA). Control: a second nanoGPT "
        f"against the first; measurements whose control is further than {tolerance:g}% from 1 are refused."
    )


NANOGPT = OtherKind(
    name="nanogpt",
    title="Updates: beside nanoGPT",
    conditions=_nanogpt_conditions,
    measured=lambda row: None if row["control"] else (row["model"], tuple(row["point"].items())),
    overview=lambda records: _stacked(records, _nanogpt),
)
COMPILE = OtherKind(
    name="compile",
    title="Compilation after an event",
    conditions=_compile_conditions,
    measured=_compile_measured,
    overview=_compile_overview,
)
CALIBRATION = OtherKind(
    name="calibration",
    title="Freezing: seconds",
    conditions=lambda record: (
        "Warm times are medians over repeated interventions on one model; the first use is told apart."
    ),
    measured=_freezing_measured,
    overview=_freezing_overview,
)
ERRORS = OtherKind(
    name="errors",
    title="Numerical errors",
    conditions=_error_conditions,
    measured=lambda row: (row["part"], row["backend"], row["precision"], row["tensor"]),
    overview=_error_overview,
    details=_error_details,
)
