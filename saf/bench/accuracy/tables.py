"""Tables of numerical errors against float64, beside the paper's comparison: `saf bench errors`."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from saf.bench.harness.measured import Record
from saf.records import paper
from saf.records.quantities import MISSING
from saf.records.table import Cell, Notes, Part, Table

_PARTS = {
    "layer": ("a layer of live and frozen heads", "unfrozen layer"),
    "pruned layer": ("a layer whose heads are pruned", "unfrozen layer"),
    "transitions": ("a model after each freezing, pruning or undoing of heads", "ordinary model"),
    "operator": ("frozen heads alone, operands in the dtype", "PyTorch's attention"),
}
_PAPERS_CASE = {"length": 129, "stored": 192, "batch_size": 2, "num_heads": 4, "head_dim": 64, "frozen": [1, 3]}


_OF_PAPER = {"fp32": 0, "bf16": 2}
"""Where the paper's largest and relative error of a precision stand among its four numbers of a tensor."""
_COMPARED = ("from eager, max.", "paper, max.", "from eager, L2", "paper, L2")
"""Columns of the paper's comparison; in a terminal they are a table of their own, so that each fits 80 columns."""
_BUDGETED = ("max. absolute", "relative L2", "limit", "within")


def error_tables(record: Record, *, brief: bool = False) -> list[Part]:
    """Return a table for each part, backend and precision, and the notes to read them by; `brief` parts wide ones."""
    papers = _is_papers_case(record)
    parts: list[Part] = [conditions(record)]
    for (part, backend, precision), rows in _groups(record):
        what, beside = _PARTS[part]
        table = _table(list(rows), beside, precision if papers and part == "layer" else None)
        title = ", ".join(filter(None, [what, backend, precision]))
        if not brief:
            parts.append(table.titled(title))
            continue
        parts.append(table.without(_COMPARED).titled(title))
        if any(name in table.columns for name in _COMPARED):
            others = (*_BUDGETED, f"{beside}, max.", f"{beside}, L2")
            parts.append(table.without(others).titled(f"{title}, from eager attention in the same precision"))
    return [*parts, Notes([_paper(papers), *_paper_of_pruned([record])])]


def overview(records: Sequence[tuple[Cell, Record]]) -> list[Part]:
    """Return one row a part, backend and precision: the largest error of its tensors beside its limit and the paper."""
    found = [(cell, _largest(record)) for cell, record in records]
    papers = any("paper, L2" in table.columns for _, table in found)
    return [
        Table.stacked("Largest relative L2 error of output and gradients", found).used(),
        Notes([_paper(papers), *_paper_of_pruned([record for _, record in records])]),
    ]


def _largest(record: Record) -> Table:
    """Return the table of the largest error of each part, backend and precision, beside the paper's."""
    head = ["of", "backend", "precision", "tensors", "relative L2", "largest share of its limit", "within"]
    head += ["unfrozen layer or PyTorch's attention", "from eager, L2", "paper, L2"]
    papers = _is_papers_case(record)
    cells = []
    for (part, backend, precision), group in _groups(record):
        rows = list(group)
        quoted = [paper.GRADIENT_ERRORS.get(row["tensor"]) for row in rows] if papers and part == "layer" else []
        said = [each[_OF_PAPER[precision] + 1] for each in quoted if each]
        said += [paper.PRUNED_ERRORS[precision]] if papers and part == "pruned layer" else []
        eager = [row["eager"]["relative_l2"] for row in rows if row["eager"]]
        cells.append(
            [
                _PARTS[part][0],
                backend,
                precision,
                len(rows),
                error(max(row["relative_l2"] for row in rows)),
                f"{100 * max(row['relative_l2'] / row['limit'] for row in rows):.0f}%",
                "yes" if all(row["within"] for row in rows) else Cell(text="above", strong=True),
                error(max(row["beside"]["relative_l2"] for row in rows)),
                error(max(eager, default=None)),
                max(said, key=float, default=MISSING),
            ]
        )
    return Table.of("", head, cells).used()


def _groups(record: Record) -> Iterator[tuple[tuple[str, str | None, str], Iterator[Record]]]:
    return groupby(record["rows"], key=lambda row: (row["part"], row["backend"], row["precision"]))


def _is_papers_case(record: Record) -> bool:
    settings = record["settings"]
    case = {key: list(value) if isinstance(value := settings[key], tuple) else value for key in _PAPERS_CASE}
    return case == _PAPERS_CASE


def _paper(quoted: bool) -> str:
    source = paper.GRADIENTS
    if not quoted:
        return "The paper tells another case."
    return f"Paper, {source.label}: {source.conditions}. It stands beside our column of the same comparison."


def _paper_of_pruned(records: Sequence[Record]) -> list[str]:
    """Return what the paper says of a pruned layer, where a record of its case has one."""
    if not any(
        _is_papers_case(record) and any(row["part"] == "pruned layer" for row in record["rows"]) for record in records
    ):
        return []
    fp32, bf16 = paper.PRUNED_ERRORS.values()
    return [
        f"Of the pruned layer the paper tells the largest relative L2 error of the seven tensors alone: {fp32} in "
        f"fp32, {bf16} in bf16."
    ]


def conditions(record: Record) -> str:
    """Return the case whose errors are measured, and what they are measured against."""
    settings = record["settings"]
    return (
        f"{settings['batch_size']} sequences of {settings['length']} tokens, {settings['num_heads']} heads of "
        f"{settings['head_dim']} channels, patterns of {settings['stored']} positions, heads "
        f"{', '.join(map(str, settings['frozen']))} frozen. Baseline: the exact result in float64. A row is within its "
        f"limit by its relative L2 error; the limit follows from what stands beside it."
    )


def _table(rows: list[Record], beside: str, precision: str | None) -> Table:
    """Return the table of one group of rows, a tensor a row; `beside` names what its errors are compared with."""
    head = ["tensor", "max. absolute", "relative L2", "limit", "within", f"{beside}, max.", f"{beside}, L2"]
    head += _COMPARED
    cells = []
    for row in rows:
        eager = row["eager"] or {}
        quoted = paper.GRADIENT_ERRORS.get(row["tensor"]) if precision else None
        first = _OF_PAPER[precision or "bf16"]
        most, relative = quoted[first : first + 2] if quoted else (MISSING, MISSING)
        cells.append(
            [
                row["tensor"],
                *_pair(row),
                error(row["limit"]),
                "yes" if row["within"] else Cell(text="above", strong=True),
                *_pair(row["beside"]),
                error(eager.get("max_abs")),
                most,
                error(eager.get("relative_l2")),
                relative,
            ]
        )
    return Table.of("", head, cells).used()


def _pair(errors: Record) -> list[str]:
    return [error(errors["max_abs"]), error(errors["relative_l2"])]


def error(value: float | None) -> str:
    """Return an error the way the paper's numbers are kept: 1.19e-7."""
    if value is None:
        return MISSING
    digits, power = f"{value:.2e}".split("e")
    return f"{digits}e{int(power)}"
