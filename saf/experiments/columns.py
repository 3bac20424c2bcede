"""What a table shows of an arm: each column from the record of its run, and of the runs that it stands beside."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.evaluate.compare import free_heads_bound
from saf.train.clock import OFF_CLOCK

Record = Mapping[str, Any]
OWN, REFERENCE, AGAINST = "own", "reference", "against"
"""What a record is to a row: its arm's, that of the arm it is compared with, that of the arm a difference is from."""
PAPER_EXCHANGE = 0.14
"""Percent of perplexity that 1% more tokens buys in the paper's regime, by its tables at matched tokens and time."""


def of(role: str) -> str:
    """Return what the reference of an arm beside a row is to the row."""
    return f"{role} {REFERENCE}"


@dataclass(frozen=True)
class Row:
    """Hold what one seed of one arm is shown by: records, and how they were judged, by what they are to the row."""

    runs: Mapping[str, Record]
    judged: Mapping[str, Tensor]
    """Mean loss in nats of each, or share of questions answered rightly: a scalar, or `[resamples]` means of the same
    resampled windows or questions; float64. Runs of associative recall have none."""

    def change(self, role: str = OWN, other: str = REFERENCE) -> Tensor | None:
        """Return by how many percent a run's perplexity is above another's; None of a run and itself."""
        asked = all("report_perplexity" in self.runs[each] for each in (role, other))
        if not asked or self.runs[role]["key"] == self.runs[other]["key"]:
            return None
        return 100.0 * torch.expm1(self.judged[role] - self.judged[other])

    def difference(self) -> Tensor | None:
        """Return by how many points a run's change is above another arm's, each from its own reference."""
        own, other = self.change(), self.change(AGAINST, of(AGAINST))
        return None if own is None or other is None else own - other

    def points(self) -> Tensor | None:
        """Return by how many points of percent the accuracy is above the reference's; None of a run and itself."""
        asked = all("accuracy" in self.runs[each] for each in (OWN, REFERENCE))
        if not asked or self.runs[OWN]["key"] == self.runs[REFERENCE]["key"]:
            return None
        return 100.0 * (self.judged[OWN] - self.judged[REFERENCE])

    def extra_tokens(self, role: str = OWN, other: str = REFERENCE) -> float | None:
        """Return how many percent more tokens a run trained on than another; None of a run and itself."""
        one, two = self.runs[role], self.runs[other]
        return None if one["key"] == two["key"] else 100.0 * (one["updates"] / two["updates"] - 1.0)


def change_of(record: Record, other: Record) -> float:
    """Return by how many percent one record's perplexity is above another's; 0 of a run and itself."""
    runs = {OWN: record, REFERENCE: other}
    losses = {role: torch.tensor(run["report_loss"], dtype=torch.float64) for role, run in runs.items()}
    change = Row(runs, losses).change()
    return 0.0 if change is None else float(change)


Number = float | Tensor | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """Describe one column."""

    title: str
    value: Callable[[Row], Number]
    """The number of one seed; None where there is none."""
    places: int
    """Digits behind the point."""
    signed: bool = False
    needs: tuple[str, ...] = ()
    """What it needs beside the arm's own record: "reference", "against", or roles of `Arm.beside`, and the references
    of the arms of both."""
    timed: bool = False
    """Whether it is a time, which means nothing of a run that shared its device."""
    impossible: Callable[[Row], bool] = lambda row: False
    """Whether a number cannot be true, as something else kept the machine busy: it is left out, and named."""
    by_seed: bool = False
    """Whether it shows the number of every seed instead of their mean."""

    def written(self, number: float) -> str:
        """Return a bare number as the column has it: its places, and its sign where the column has one."""
        return f"{number:{'+' if self.signed else ''},.{self.places}f}".replace("-", "\u2212")


def _own(read: Callable[[Record], float | None]) -> Callable[[Row], Number]:
    """Return a column's number of the arm's record alone."""
    return lambda row: read(row.runs[OWN])


def _minutes(record: Record) -> float | None:
    """Return what the whole run took, its parent's part included."""
    seconds = ((record.get("time") or {}).get("everything") or {}).get("seconds")
    return None if seconds is None else seconds / 60


def _edited(record: Record) -> float | None:
    """Return how many heads of the model are frozen or pruned."""
    frozen = record["provenance"].get("heads")
    return None if frozen is None else float(len(frozen) + len(record["provenance"].get("pruned") or ()))


def _remaining(record: Record) -> float | None:
    """Return how many updates followed the first event that froze or pruned heads."""
    event = record.get("intervention")
    return None if event is None else float(record["updates"] - event["update"])


def _compiled(record: Record) -> float | None:
    """Return the seconds that a run itself compiled for, without its parent."""
    return ((record.get("time") or {}).get("parts") or {}).get("compilation")


def _part(*names: str) -> Callable[[Row], Number]:
    """Return what adds up some parts of an intervention, seconds; all of them without names."""

    def value(record: Record) -> float | None:
        seconds = (record.get("intervention") or {}).get("seconds")
        return None if seconds is None else math.fsum(seconds.get(name, 0.0) for name in names or seconds)

    return _own(value)


def _context(record: Record) -> float | None:
    """Return by how many nats the loss of the last targets of a window is below that of targets 17 to 64."""
    losses = dict(record.get("by_position") or ())
    return losses[64] - losses[max(losses)] if 64 in losses and len(losses) > 2 else None


def _exchange_rate(row: Row) -> Number:
    """Return by how many percent perplexity falls with 1% more tokens, from an ordinary run that had more."""
    change, extra = row.change("exchange", of("exchange")), row.extra_tokens("exchange", of("exchange"))
    return -change / extra if change is not None and extra else None


def _exchange(row: Row) -> Number:
    """Return the exchange rate, in the row of the run that measures it."""
    return _exchange_rate(row) if row.runs["exchange"]["key"] == row.runs[OWN]["key"] else None


def _exchanged(rate: Callable[[Row], Number]) -> Callable[[Row], Number]:
    """Return the change at matched tokens less what the tokens that the arm gains in time are worth at some rate."""

    def value(row: Row) -> Number:
        change, extra, worth = row.change("tokens", of("tokens")), row.extra_tokens(), rate(row)
        return None if change is None or extra is None or worth is None else change - worth * extra

    return value


_TOKENS = (REFERENCE, "tokens", of("tokens"))
_EXCHANGE = ("exchange", of("exchange"))


def _time_ratio(row: Row) -> Number:
    """Return how many times as long a whole run took as the one that its difference is from."""
    own, other = _minutes(row.runs[OWN]), _minutes(row.runs[AGAINST])
    return own / other if own and other else None


def _time_difference(row: Row) -> Number:
    """Return by how many seconds a whole run took longer than the one that its difference is from."""
    own, other = _minutes(row.runs[OWN]), _minutes(row.runs[AGAINST])
    return None if own is None or other is None else 60 * (own - other)


def _continuation(record: Record) -> float | None:
    """Return what a run took beside its parent's part; None of one from initialisation."""
    time = record.get("time") or {}
    return (
        None
        if time.get("parent_parts") is None
        else sum(seconds for part, seconds in time["parts"].items() if part not in OFF_CLOCK) / 60
    )


def _of_reference(read: Callable[[Record, Record], float | None]) -> Callable[[Row], Number]:
    """Return a column's number of the arm's record and its reference's; none of a run and itself."""

    def value(row: Row) -> Number:
        own, other = row.runs[OWN], row.runs[REFERENCE]
        return None if own["key"] == other["key"] else read(own, other)

    return value


def _accuracy(record: Record) -> float | None:
    """Return the share of questions answered rightly, %."""
    return None if record.get("accuracy") is None else 100 * record["accuracy"]


def _speedup(own: Record, other: Record) -> float | None:
    """Return how many times as long the reference's updates take."""
    mine, others = ((record.get("update_seconds") or {}).get("median") for record in (own, other))
    return others / mine if mine and others else None


def _beyond_free(row: Row) -> bool:
    """Return whether a run's updates were measured faster than heads that cost nothing would make them.

    Records of earlier versions do not tell how many heads their models have; theirs are taken as they are.
    """
    own, other = row.runs[OWN], row.runs[REFERENCE]
    found, heads = _speedup(own, other), own.get("num_heads")
    bound = free_heads_bound(int(_edited(own) or 0), heads) if heads else None
    return found is not None and bound is not None and own["key"] != other["key"] and found > bound


def _peak_change(own: Record, other: Record) -> float | None:
    """Return by how many percent the peak memory is above the reference's."""
    mine, others = own.get("peak_memory_bytes"), other.get("peak_memory_bytes")
    return 100 * (mine / others - 1) if mine and others else None


RECALL = ((512, 8), (512, 16), (512, 24), (512, 32), (512, 48), (512, 64), (2_048, 8), (4_096, 8))
"""Tokens and pairs of the paper's tests of associative recall."""


def recall_name(length: int, pairs: int) -> str:
    """Return the name of the column of one test."""
    return f"recall {length} {pairs}"


def _recall(length: int, pairs: int) -> Column:
    """Return the column of one test of associative recall: the share of its queries answered rightly."""

    def value(record: Record) -> float | None:
        tests = (record.get("recall") or {}).get("tests", ())
        found = (test["accuracy"] for test in tests if (test["length"], test["pairs"]) == (length, pairs))
        return next((100 * accuracy for accuracy in found), None)

    return Column(title=f"{length:,} / {pairs}, %", value=_own(value), places=2)


COLUMNS = {
    "perplexity": Column(title="perplexity", value=_own(lambda run: run.get("report_perplexity")), places=3),
    "delta": Column(title="change, %", value=Row.change, places=3, signed=True, needs=(REFERENCE,)),
    "difference": Column(
        title="difference, points",
        value=Row.difference,
        places=3,
        signed=True,
        needs=(REFERENCE, AGAINST, of(AGAINST)),
    ),
    "relative": Column(
        title="difference, %",
        value=lambda row: row.change(OWN, AGAINST),
        places=3,
        signed=True,
        needs=(AGAINST,),
    ),
    "time_ratio": Column(title="time ratio", value=_time_ratio, places=3, needs=(AGAINST,), timed=True),
    "time_difference": Column(
        title="difference, s", value=_time_difference, places=1, signed=True, needs=(AGAINST,), timed=True
    ),
    "raw": Column(
        title="change on the raw clock, %",
        value=lambda row: row.change("raw", of("raw")),
        places=3,
        signed=True,
        needs=("raw", of("raw")),
    ),
    "extra": Column(title="extra tokens, %", value=Row.extra_tokens, places=2, signed=True, needs=(REFERENCE,)),
    "tokens": Column(
        title="change at matched tokens, %",
        value=lambda row: row.change("tokens", of("tokens")),
        places=3,
        signed=True,
        needs=("tokens", of("tokens")),
    ),
    "paper_exchange": Column(
        title=f"with tokens at {PAPER_EXCHANGE} a %, %",
        value=_exchanged(lambda row: PAPER_EXCHANGE),
        places=3,
        signed=True,
        needs=_TOKENS,
    ),
    "own_exchange": Column(
        title="with tokens at the measured rate, %",
        value=_exchanged(_exchange_rate),
        places=3,
        signed=True,
        needs=(*_TOKENS, *_EXCHANGE),
    ),
    "exchange": Column(title="1% more tokens buys, %", value=_exchange, places=3, needs=_EXCHANGE),
    "accuracy": Column(title="accuracy, %", value=_own(_accuracy), places=2),
    "seeds": Column(title="by seed, %", value=_own(_accuracy), places=2, by_seed=True),
    "points": Column(title="change, points", value=Row.points, places=2, signed=True, needs=(REFERENCE,)),
    "speedup": Column(
        title="speedup",
        value=_of_reference(_speedup),
        places=3,
        needs=(REFERENCE,),
        timed=True,
        impossible=_beyond_free,
    ),
    "peak_change": Column(
        title="peak, change, %", value=_of_reference(_peak_change), places=2, signed=True, needs=(REFERENCE,)
    ),
    "gate": Column(
        title="development, %",
        value=_own(lambda run: 100 * run["recall"]["development"]["accuracy"] if run.get("recall") else None),
        places=2,
    ),
    **{recall_name(*test): _recall(*test) for test in RECALL},
    "rise": Column(
        title="rise at the event, nats",
        value=_own(lambda run: (run.get("intervention") or {}).get("loss_rise")),
        places=4,
        signed=True,
    ),
    "context": Column(title="what context tells, nats", value=_own(_context), places=3),
    "heads": Column(title="heads", value=_own(_edited), places=0),
    "updates": Column(title="updates", value=_own(lambda run: run["updates"]), places=0),
    "remaining": Column(title="updates after freezing", value=_own(_remaining), places=0),
    "minutes": Column(title="minutes", value=_own(_minutes), places=2, timed=True),
    "continuation": Column(title="continuation, min", value=_own(_continuation), places=2, timed=True),
    "intervention": Column(title="intervention, s", value=_part(), places=2, timed=True),
    "compilation": Column(title="compilation, s", value=_own(_compiled), places=1, timed=True),
    "capture": Column(title="capture and mean, s", value=_part("capture", "statistics"), places=2, timed=True),
    "fit": Column(title="fit, s", value=_part("fit"), places=2, timed=True),
    "update": Column(
        title="update, ms",
        value=_own(lambda run: 1e3 * run["update_seconds"]["median"] if run.get("update_seconds") else None),
        places=1,
        timed=True,
    ),
    "peak": Column(
        title="peak, GiB",
        value=_own(lambda run: run["peak_memory_bytes"] / 2**30 if run.get("peak_memory_bytes") else None),
        places=2,
    ),
}
