"""Tables of numerical errors against float64, beside the paper's comparison: `saf bench errors`."""

from itertools import groupby

from saf.bench.harness.measured import Record
from saf.records import paper
from saf.records.quantities import MISSING
from saf.records.table import Cell, Part, Table

_PARTS = {
    "layer": ("a layer of live and frozen heads", "unfrozen layer"),
    "operator": ("frozen heads alone, operands in the dtype", "PyTorch's attention"),
}
_PAPERS_CASE = {"length": 129, "stored": 192, "batch_size": 2, "num_heads": 4, "head_dim": 64, "frozen": [1, 3]}


_COMPARED = ("from eager, max.", "paper, max.", "from eager, L2", "paper, L2")
"""Columns of the paper's comparison; in a terminal they are a table of their own, so that each fits 80 columns."""
_BUDGETED = ("max. absolute", "relative L2", "limit", "within")


def error_tables(record: Record, *, brief: bool = False) -> list[Part]:
    """Return a table for each part, backend and precision, and the notes to read them by; `brief` parts wide ones."""
    settings = record["settings"]
    case = {key: list(value) if isinstance(value := settings[key], tuple) else value for key in _PAPERS_CASE}
    papers = case == _PAPERS_CASE
    parts: list[Part] = [_conditions(settings)]
    for key, rows in groupby(record["rows"], key=lambda row: (row["part"], row["backend"], row["precision"])):
        part, backend, precision = key
        what, beside = _PARTS[part]
        table = _table(list(rows), beside, precision if papers and part == "layer" else None)
        title = f"{what}, {backend}, {precision}"
        if not brief:
            parts.append(table.titled(title))
            continue
        parts.append(table.without(_COMPARED).titled(title))
        if any(name in table.columns for name in _COMPARED):
            others = (*_BUDGETED, f"{beside}, max.", f"{beside}, L2")
            parts.append(table.without(others).titled(f"{title}, from eager attention in the same precision"))
    source = paper.GRADIENTS
    about_paper = f"Paper, `{source.label}`: {source.conditions}. It stands beside our column of the same comparison."
    return [*parts, f"- {about_paper if papers else 'The paper tells another case.'}"]


def _conditions(settings: Record) -> str:
    return (
        f"{settings['batch_size']} sequences of {settings['length']} tokens, {settings['num_heads']} heads of "
        f"{settings['head_dim']} channels, patterns of {settings['stored']} positions, heads "
        f"{', '.join(map(str, settings['frozen']))} frozen. Baseline: the exact result in float64. A row is within its "
        f"limit by its relative L2 error; the limit follows from what stands beside it."
    )


def _table(rows: list[Record], beside: str, precision: str | None) -> Table:
    head = ["tensor", "max. absolute", "relative L2", "limit", "within", f"{beside}, max.", f"{beside}, L2"]
    head += _COMPARED
    cells = []
    for row in rows:
        eager = row["eager"] or {}
        quoted = paper.GRADIENT_ERRORS.get(row["tensor"]) if precision else None
        first = 0 if precision == "fp32" else 2
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
