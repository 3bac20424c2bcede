"""The tables of what compilation costs at an event, and of two forms of it: `tools/compare_compile.py`."""

from collections.abc import Hashable, Sequence

from saf.bench.harness.kind import Kind
from saf.bench.harness.measured import Record, shape
from saf.bench.harness.recorder import unmeasured
from saf.bench.harness.speed_tables import REFUSED
from saf.records.quantities import MISSING, gibibytes, number, seconds
from saf.records.table import Cell, Part, Table

EVENT, AHEAD, PAIR = "event", "ahead", "pair"
"""Parts of a record: an event of one form, the process that compiled ahead, and two forms timed as pairs."""
FORMS = {"whole": "the whole model", "layers": "by decoder layers"}
CACHES = {"empty": "empty", "ahead": "filled ahead", "warm": "of an earlier process"}
"""What the compiler finds on disk when an event comes, by the names of records."""

_EVENTS = ("model", "point", "compiled", "cache on disk", "event", "heads frozen", "lost", "first update")
_EVENTS += ("update after it",)
_AHEADS = ("model", "point", "layouts compiled ahead", "took", "memory, at most")
_PAIRS = ("model", "point", "frozen", "whole, ms", "by layers, ms", "whole / by layers", "middle half of pairs")
_PAIRS += ("pairs", "control", "kernels whole", "kernels by layers")


class CompileKind(Kind):
    """Describe what `tools/compare_compile.py` writes."""

    name = "compile"
    title = "Compilation after an event"

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return how it was measured, and a table each of events, of processes that compiled ahead and of pairs."""
        return [self.conditions(record), *_tables([(None, record)]), *unmeasured(record)]

    def conditions(self, record: Record) -> str:
        """Return what is counted as lost, and how forms were compared."""
        settings, told = record["settings"], []
        if any(row["part"] == EVENT for row in record["rows"]):
            told.append(
                "Lost is what the updates after an event took beyond as many at the speed that follows, their "
                f"compilation included and the event's own work left out; {settings['after']} updates an event, each "
                "form once, in a process of its own that begins with no compiled code on disk."
            )
        if any(row["part"] == PAIR for row in record["rows"]):
            # Earlier records waited for the device after each update, whose successor then began with an idle one.
            apart = " in a row, as in training" if settings.get("in_a_row") else ", the device waited for after each"
            told.append(
                f"Forms are compared in one process, in alternating pairs (ABBA), each timed block the mean of "
                f"{number(settings['repeats'])} updates{apart}. Control: the whole model compiled again; pairs whose "
                f"control is further than {100 * settings['tolerance']:g}% from 1 are refused."
            )
        return " ".join(told)

    def measured(self, row: Record) -> Hashable | None:
        """Return the part, model, point and form, and the event or the share of frozen heads; None for a control."""
        if row.get("control"):
            return None
        own = [row.get(name) for name in ("form", "caches", "event", "rate")]
        return row["part"], row["model"], tuple(row["point"].items()), *own

    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return the tables of several records, each row with its file."""
        return list(_tables(records))


def _tables(records: Sequence[tuple[Cell | None, Record]]) -> list[Part]:
    """Return the tables of events, of processes that compiled ahead and of pairs; rows name files where cells do."""
    made = (
        ("", EVENT, _EVENTS, _event),
        ("Processes that compiled ahead", AHEAD, _AHEADS, _ahead),
        ("Updates compiled whole and by layers", PAIR, _PAIRS, _pair),
    )
    parts: list[Part] = []
    for title, part, head, cells in made:
        found = []
        for cell, record in records:
            rows = [cells(row) for row in record["rows"] if row["part"] == part and not row.get("control")]
            found += [(cell, Table.of(title, head, rows))] if rows else []
        if found and found[0][0] is None:
            parts += [table.used() for _, table in found]
        elif found:
            parts.append(Table.stacked(title, [(cell, table) for cell, table in found if cell is not None]).used())
    return parts


def _event(row: Record) -> list[str]:
    """Return the cells of one event."""
    return [
        row["model"],
        shape(row["point"]),
        FORMS[row["form"]],
        CACHES[row["caches"]],
        row["event"],
        number(row["frozen"]),
        seconds(row["lost_s"]),
        seconds(row["first_s"]),
        seconds(row["update_s"]),
    ]


def _ahead(row: Record) -> list[str]:
    layouts, took = number(row["layouts"]), seconds(row["seconds"])
    return [row["model"], shape(row["point"]), layouts, took, gibibytes(row["bytes"])]


def _pair(row: Record) -> list[str]:
    """Return the cells of two forms at one share of frozen heads."""
    refused = row["refused"]
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
        *(_busy(row.get("busy", {}).get(form)) for form in FORMS),
    ]


def _busy(told: dict[str, float] | None) -> str:
    """Return how many kernels an update has, and their time added up; earlier records have none of it."""
    return MISSING if told is None else f"{number(told['kernels'])}, {number(told['ms'])} ms"
