"""From records to tables: numbers by arm, seed and metric, then a recipe's rows.

A ratio or a difference is taken in each seed first, then averaged over seeds. Where there is one seed, the interval of
a change is the paired bootstrap over held-out windows.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit

from experiments.arms import ARMS
from experiments.recipe import COLUMNS, COMPANIONS, Recipe, Row
from experiments.scales import scale_named
from saf.errors import CompareError, InputError, did_you_mean
from saf.evaluate.paired import block_length, bootstrap_means, mean_and_standard_error
from saf.records.result import read_result

Record = Mapping[str, Any]
Get = Callable[[str | None, str], Any]
"""Gives an arm's number of a metric: one a seed, one a resample, or NaN where there is none."""
CHECKS = {"heads": True, "executed": True, "query_key_rows": 0, "query_key_gradients": 0}
"""What a run's check of its heads must have; earlier records lack the last."""
PAPER_EXCHANGE = 0.14
"""Percent of perplexity that 1% more tokens buys in the paper's regime, by its tables at matched tokens and time."""
RECALL = ((512, 8), (512, 16), (512, 24), (512, 32), (512, 48), (512, 64), (2_048, 8), (4_096, 8))
"""Tokens and pairs of the paper's tests of associative recall."""
SMOKE_RECALL = ((32, 2), (32, 4))


def recall_metric(length: int, pairs: int) -> str:
    """Return the name of the metric of one test of recall."""
    return f"recall {length} {pairs}"


RECALL_METRICS = tuple(recall_metric(*test) for test in (*RECALL, *SMOKE_RECALL))

# --- numbers of one record


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a record by metric; those that it lacks are left out."""
    losses, heads = dict(record.get("by_position") or ()), record["provenance"].get("heads")
    tests = (record.get("recall") or {}).get("tests", ())
    at = partial(_number_at, record)
    numbers: dict[str, float] = {
        "loss": at("report_loss") if "report_perplexity" in record else math.nan,
        "perplexity": at("report_perplexity"),
        "accuracy": 100 * at("accuracy"),
        "epochs": at("epochs"),
        "example_tokens": at("example_tokens"),
        "gate": 100 * at("recall", "development", "accuracy"),
        "rise": at("intervention", "loss_rise"),
        # By how many nats the loss of a window's last targets is below that of targets 17 to 64.
        "context": losses[64] - losses[max(losses)] if 64 in losses and len(losses) > 2 else math.nan,
        "window": max(losses, default=math.nan),
        "to_4k": _perplexity_to(4_096, losses),
        "heads": math.nan if heads is None else len(heads) + len(record["provenance"].get("pruned") or ()),
        "updates": at("updates"),
        "remaining": at("updates") - at("intervention", "update"),
        "peak": (at("peak_memory_bytes") or math.nan) / 2**30,
        "fit_kl": at("fits", "largest_kl"),
        "median_kl": at("fits", "median_kl"),
        "skipped": at("fits", "skipped"),
        "exponential": at("fits", "exponential"),
        "extra_kl": at("fits", "largest_extra_kl"),
        **{recall_metric(test["length"], test["pairs"]): 100 * test["accuracy"] for test in tests},
        **({} if record.get("shared") else _times(record)),  # which mean nothing of a run that shared its device
    }
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def _number_at(record: Record, *path: str) -> float:
    value: Any = record
    for name in path:
        value = (value or {}).get(name)
    return math.nan if value is None else float(value)


def _times(record: Record) -> dict[str, float]:
    """Return minutes of a run, seconds of its event, and milliseconds of its updates."""
    time, event = record.get("time") or {}, (record.get("intervention") or {}).get("seconds")
    parts = time.get("parts") or {}
    times = {
        "minutes": _number_at(record, "time", "everything", "seconds") / 60,
        "compilation": parts.get("compile", parts.get("compilation", math.nan)),  # the latter in earlier records
        "update": 1e3 * _number_at(record, "update_seconds", "median"),
        "last_updates": 1e3 * _number_at(record, "last_updates_seconds"),
    }
    if time.get("parent_parts") is not None:
        # Earlier records also have parts that neither total counted.
        times["continuation"] = sum(parts[name] for name in parts if name not in ("afterwards", "lost")) / 60
    if event is not None:
        for name, of in (("intervention", event), ("capture", ("capture", "statistics")), ("fit", ("fit",))):
            times[name] = math.fsum(event.get(part, 0.0) for part in of)
    return times


def _perplexity_to(last: int, losses: Mapping[int, float]) -> float:
    """Return the perplexity of a window's first targets, from mean losses by the last target of each group."""
    groups = {end: loss for end, loss in losses.items() if end <= last}
    if last not in groups:
        return math.nan
    return math.exp(np.average(list(groups.values()), weights=np.diff([0, *groups])))


def read_records(folder: Path, scale: str) -> dict[tuple[str, int], Record]:
    """Return the records of a scale by arm and seed: of run folders, or of files ARM/seed-SEED.json."""
    records = {}
    for path in sorted((folder / scale).glob("*/seed-*")):
        file = path / "result.json" if path.is_dir() else path
        if path.parent.name == "measurements" or file.suffix != ".json" or not file.is_file():
            continue
        if "experiment" in (record := read_result(file)):
            records[record["experiment"]["arm"], int(record["experiment"]["seed"])] = record
    return records


# --- numbers of a row, by metric


@dataclass(frozen=True)
class Comparison:
    """A row with the numbers of arms: metrics of several records are computed from it, in percent."""

    row: Row
    references: Mapping[str, str | None]
    """The reference of each arm that the recipe shows."""
    get: Get

    def gap(self, metric: str, arm: str | None, reference: str | None) -> Any:
        """Return an arm's number minus another's; NaN for an arm and itself."""
        same = arm is None or reference is None or arm == reference
        return math.nan if same else self.get(arm, metric) - self.get(reference, metric)

    def ratio(self, metric: str, arm: str | None, reference: str | None) -> Any:
        """Return an arm's number over another's; NaN for an arm and itself."""
        same = arm is None or reference is None or arm == reference
        return math.nan if same else self.get(arm, metric) / self.get(reference, metric)

    def change(self, arm: str | None, reference: str | None) -> Any:
        """Return how far an arm's perplexity is above another's."""
        return 100.0 * np.expm1(self.gap("loss", arm, reference))

    def own_change(self, arm: str | None) -> Any:
        """Return an arm's change from its own reference."""
        return self.change(arm, self.references.get(arm or ""))

    def extra(self, arm: str | None, reference: str | None) -> Any:
        """Return how many more updates an arm has than another."""
        return 100.0 * (self.ratio("updates", arm, reference) - 1.0)

    def exchange(self) -> Any:
        """Return how far perplexity falls with 1% more tokens, from an ordinary run that had more."""
        arm = self.row.companions.get("exchange")
        return -self.own_change(arm) / self.extra(arm, self.references.get(arm or ""))

    def at_tokens(self, rate: Any) -> Any:
        """Return the change at matched tokens less the worth of the tokens that the arm gains in time."""
        gained = self.extra(self.row.arm, self.row.reference)
        return self.own_change(self.row.companions.get("tokens")) - rate * gained


@dataclass(frozen=True)
class Metric:
    """A column of a table: a number of the row's own record, or one of several records."""

    title: str
    places: int
    signed: bool = False
    of: Callable[[Comparison], Any] | None = None
    by_seed: bool = False
    """Whether the number of each seed is shown in place of their mean."""

    def text(self, number: float) -> str:
        """Return a number at the metric's digits and, where it has one, with its sign."""
        return f"{number:{'+' if self.signed else ''},.{self.places}f}".replace("-", "\u2212")


METRICS = {
    "perplexity": Metric("perplexity", 3),
    "delta": Metric("change (%)", 3, True, lambda c: c.change(c.row.arm, c.row.reference)),
    "difference": Metric(
        *("difference (points)", 3, True),
        lambda c: c.change(c.row.arm, c.row.reference) - c.own_change(c.row.against),
    ),
    "relative": Metric("difference (%)", 3, True, lambda c: c.change(c.row.arm, c.row.against)),
    "time_ratio": Metric("time ratio", 3, False, lambda c: c.ratio("minutes", c.row.arm, c.row.against)),
    "time_difference": Metric("difference (s)", 1, True, lambda c: 60 * c.gap("minutes", c.row.arm, c.row.against)),
    "raw": Metric("change at measured time (%)", 3, True, lambda c: c.own_change(c.row.companions.get("raw"))),
    "extra": Metric("extra tokens (%)", 2, True, lambda c: c.extra(c.row.arm, c.row.reference)),
    "tokens": Metric("change at matched tokens (%)", 3, True, lambda c: c.own_change(c.row.companions.get("tokens"))),
    "paper_exchange": Metric(
        *(f"change estimated at {PAPER_EXCHANGE}% (%)", 3, True),
        lambda c: c.at_tokens(PAPER_EXCHANGE),
    ),
    "own_exchange": Metric(
        *("change estimated at the measured rate (%)", 3, True),
        lambda c: c.at_tokens(c.exchange()),
    ),
    "exchange": Metric(
        *("decrease for 1% more tokens (%)", 3, False),
        lambda c: c.exchange() if c.row.companions.get("exchange") == c.row.arm else math.nan,
    ),
    "accuracy": Metric("accuracy (%)", 2),
    "seeds": Metric("accuracy by seed (%)", 2, False, lambda c: c.get(c.row.arm, "accuracy"), by_seed=True),
    "delta_seeds": Metric("change by seed (%)", 3, True, lambda c: c.change(c.row.arm, c.row.reference), by_seed=True),
    "points_against": Metric(
        "difference of accuracy (points)", 3, True, lambda c: c.gap("accuracy", c.row.arm, c.row.against)
    ),
    "epochs": Metric("epochs", 0),
    "example_tokens": Metric("mean tokens of a training example", 1),
    "points": Metric("change of accuracy (points)", 2, True, lambda c: c.gap("accuracy", c.row.arm, c.row.reference)),
    "speedup": Metric("speedup", 3, False, lambda c: 1.0 / c.ratio("update", c.row.arm, c.row.reference)),
    "peak_change": Metric(
        *("change of peak memory (%)", 2, True),
        lambda c: 100.0 * (c.ratio("peak", c.row.arm, c.row.reference) - 1.0),
    ),
    "gate": Metric("development accuracy (%)", 2),
    **{recall_metric(*test): Metric(f"recall at {test[0]:,} / {test[1]} (%)", 2) for test in (*RECALL, *SMOKE_RECALL)},
    "recall seeds": Metric(
        *("recall at 512 / 32 by seed (%)", 2, False), lambda c: c.get(c.row.arm, recall_metric(512, 32)), by_seed=True
    ),
    "rise": Metric("loss increase at the event (nats)", 4, True),
    "context": Metric("loss decrease by context (nats)", 3),
    "window": Metric("measured at (tokens of context)", 0),
    "to_4k": Metric("perplexity of the first 4,096 tokens", 3),
    "heads": Metric("heads", 0),
    "fit_kl": Metric("largest fit KL (nats)", 3),
    "median_kl": Metric("median fit KL (nats)", 3),
    "skipped": Metric("heads skipped by fit KL", 0),
    "exponential": Metric("exponential heads", 0),
    "extra_kl": Metric("largest extra KL (nats)", 4),
    "updates": Metric("updates", 0),
    "remaining": Metric("updates after freezing", 0),
    "minutes": Metric("minutes", 2),
    "continuation": Metric("continuation (min)", 2),
    "intervention": Metric("intervention (s)", 2),
    "compilation": Metric("compilation (s)", 1),
    "capture": Metric("capture and mean (s)", 2),
    "fit": Metric("fit (s)", 2),
    "update": Metric("update (ms)", 1),
    "last_updates": Metric("mean of the last 100 updates (ms)", 0),
    "peak": Metric("peak memory (GiB)", 2),
}


_COMPARING = {
    "reference": ("delta", "delta_seeds", "extra", "points", "speedup", "peak_change"),
    "against": ("difference", "relative", "time_ratio", "time_difference", "points_against"),
}
"""Metrics by the column of rows that they need."""


def check_recipe(name: str, recipe: Recipe) -> None:
    """Raise InputError for metrics and columns that there are not, and metrics that no row can have."""
    for metric in (*recipe.metrics, *recipe.headline):
        if metric not in METRICS:
            raise InputError(f"recipe {name!r} has an unknown metric {metric!r}{did_you_mean(metric, METRICS)}")
    columns = [each for row in recipe.rows for each in row.paper if each not in recipe.metrics]
    if columns:
        near = did_you_mean(columns[0], [*COLUMNS, *COMPANIONS, *recipe.metrics])
        raise InputError(f"recipe {name!r} has a column {columns[0]!r} that is none of its metrics{near}")
    for column, metrics in _COMPARING.items():
        needing = [metric for metric in metrics if metric in recipe.metrics]
        if needing and not any(getattr(row, column) for row in recipe.rows):
            raise InputError(
                f"recipe {name!r} has the metric {needing[0]!r} and no row with {column!r}; add the column"
            )
    changing = {row.arm for row in recipe.rows if row.reference}
    if "difference" in recipe.metrics and not changing & {row.against for row in recipe.rows}:
        raise InputError(f"recipe {name!r}: 'difference' needs a row of the arm of 'against', with a reference")


@dataclass(frozen=True, kw_only=True)
class Value:
    """One number of one row, over seeds."""

    by_seed: Mapping[int, float]
    interval: tuple[float, float] | None = None
    """95%: over held-out windows or questions of one seed, or by Student's t over several."""

    @cached_property
    def mean(self) -> float:
        """Mean over seeds."""
        return mean_and_standard_error(list(self.by_seed.values()))["mean"]

    @cached_property
    def error(self) -> float | None:
        """Standard error over seeds; None of one seed."""
        return mean_and_standard_error(list(self.by_seed.values()))["standard_error"]

    @property
    def reach(self) -> tuple[float, float] | None:
        """Its interval, or a standard error either way."""
        if self.interval is not None or self.error is None:
            return self.interval
        return self.mean - self.error, self.mean + self.error

    def text(self, metric: Metric) -> str:
        """Return the number with its standard error or interval, unless that has no extent at the metric's digits."""
        if metric.by_seed:
            return ", ".join(metric.text(self.by_seed[seed]) for seed in sorted(self.by_seed))
        mean, error = metric.text(self.mean), f"{self.error or 0.0:.{metric.places}f}"
        if self.interval is not None:
            ends = [*map(metric.text, self.interval)]
            return mean if ends == [mean, mean] else f"{mean} ({' to '.join(ends)})"
        return f"{mean} ± {error}" if float(error) else mean

    def t_interval(self) -> tuple[float, float]:
        """Return the 95% interval of the mean over seeds by Student's t."""
        reach = float(stdtrit(len(self.by_seed) - 1, 0.975)) * (self.error or 0.0)
        return self.mean - reach, self.mean + reach


class RecipeTable:
    """The numbers of one recipe at one scale, from records alone."""

    def __init__(self, name: str, recipe: Recipe, scale: str, records: Mapping[tuple[str, int], Record]):
        self.name, self.recipe, self.scale, self.records = name, recipe, scale, records
        self.numbers: dict[tuple[str, int], dict[str, float]] = {}
        """By arm and seed, then by metric; reports before the end of a run are arms of their own, NAME@0 the first."""
        for (arm, seed), record in records.items():
            self.numbers[arm, seed] = numbers_of(record)
            reports = record.get("reports") or {}
            for place, update in enumerate(sorted(reports, key=int)):
                self.numbers[f"{arm}@{place}", seed] = numbers_of({**record, **reports[update]})
        self._arms = {arm for arm, _ in records}
        self._references = {row.arm: row.reference for row in recipe.rows}
        self._draws: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of the table, as many as the recipe has: those that most of its rows have."""
        arms = {self._resolved(row.arm) for row in self.recipe.rows}
        counts = Counter(seed for arm, seed in self.numbers if arm in arms)
        return sorted(sorted(counts, key=lambda seed: (-counts[seed], seed))[: self.recipe.seeds])

    @cached_property
    def values(self) -> dict[tuple[str, str], Value]:
        """Numbers by row's label and metric; those that there are not are absent."""
        pairs = ((row, metric) for row in self.recipe.rows for metric in self.recipe.metrics)
        with np.errstate(divide="ignore", invalid="ignore"):  # a smoke run may have no update more than another
            values = {(row.label, metric): self._value(row, metric) for row, metric in pairs}
        return {place: value for place, value in values.items() if value is not None}

    def _resolved(self, arm: str) -> str:
        """Return an arm, or the one that stands for it where it was not run."""
        name, at, place = arm.partition("@")
        while name not in self._arms and name in ARMS and ARMS[name].elsewhere:
            name = str(ARMS[name].elsewhere)
        return f"{name}{at}{place}"

    def _number(self, arm: str | None, metric: str, seed: int) -> np.float64:
        return np.float64(self.numbers.get((self._resolved(arm or ""), seed), {}).get(metric, math.nan))

    def _value(self, row: Row, metric: str) -> Value | None:
        of = METRICS[metric].of or (lambda comparison: comparison.get(comparison.row.arm, metric))
        by_seed: dict[int, float] = {}
        for seed in [scale_named(self.scale).seeds[0]] if row.first_seed else self.seeds:
            get = lambda arm, metric, seed=seed: self._number(arm, metric, seed)  # noqa: E731
            number = float(of(Comparison(row, self._references, get)))
            if seed in self.seeds and (self._resolved(row.arm), seed) in self.numbers and not math.isnan(number):
                by_seed[seed] = number
        if not by_seed:
            return None
        value = Value(by_seed=by_seed)
        if METRICS[metric].of and len(by_seed) == 1:
            return Value(by_seed=by_seed, interval=self._interval(row, of, *by_seed))
        if METRICS[metric].of and self.recipe.intervals == "t":
            return Value(by_seed=by_seed, interval=value.t_interval())
        return value

    def _interval(self, row: Row, of: Callable[[Comparison], Any], seed: int) -> tuple[float, float] | None:
        """Return 95% over the same resampled windows, or questions, of all runs; None where these decide nothing."""
        samples: dict[str, np.ndarray] = {}

        def compute(mean: Callable[[str], Any]) -> Any:
            def get(arm: str | None, metric: str) -> Any:
                name = self._resolved(arm or "")
                if metric not in ("loss", "accuracy"):
                    return self._number(arm, metric, seed)
                if (sample := self._samples[seed].get(name)) is None:
                    return math.nan
                samples.setdefault(name, sample)
                return mean(name) * (100.0 if metric == "accuracy" else 1.0)

            return of(Comparison(row, self._references, get))

        def at(moved: str = "", by: float = 0.0) -> float:
            return float(np.squeeze(compute(lambda name: samples[name].mean() + (by if name == moved else 0.0))))

        if math.isnan(at()) or not samples:
            return None
        self._check_same_windows(list(samples), seed)
        # The first-order effect of each window on the number says which of them go together.
        small = 1e-6
        effects = sum((at(name, small) - at(name, -small)) / (2 * small) * sample for name, sample in samples.items())
        block = block_length(torch.as_tensor(effects))
        low, high = np.quantile(compute(lambda name: self._resampled(name, seed, block)), [0.025, 0.975])
        return float(low), float(high)

    @cached_property
    def _samples(self) -> dict[int, dict[str, np.ndarray]]:
        """The losses of windows, or the answers to questions, of every run, by seed and arm."""
        samples: dict[int, dict[str, np.ndarray]] = {seed: {} for seed in self.seeds}
        for (arm, seed), record in self.records.items():
            if seed in samples and (sample := record.get("window_losses") or record.get("right")):
                samples[seed][arm] = np.array(sample, dtype=float)
        return samples

    def _resampled(self, arm: str, seed: int, block: int) -> np.ndarray:
        """Return the means of an arm's resampled windows, drawn at once for all arms that have as many."""
        samples = self._samples[seed]
        place = seed, block, len(samples[arm])
        if place not in self._draws:
            alike = {name: sample for name, sample in samples.items() if len(sample) == place[2]}
            draws = bootstrap_means(torch.tensor(np.array([*alike.values()])), block=block).numpy()
            self._draws[place] = dict(zip(alike, draws, strict=True))
        return self._draws[place][arm]

    def _check_same_windows(self, arms: list[str], seed: int) -> None:
        for what, words in (("windows_hash", "held-out windows"), ("questions_hash", "questions")):
            hashes = {self.records[arm, seed].get(what) for arm in arms}
            if len(hashes) > 1:
                raise CompareError(f"{' and '.join(arms)} were evaluated on different {words}; train both on one text")

    # --- shown

    def ran(self) -> list[Row]:
        """Return the rows that have a number."""
        return [row for row in self.recipe.rows if any((row.label, m) in self.values for m in self.recipe.metrics)]

    def headline(self) -> list[Row]:
        """Return the rows of the headline: those with a number in it that stand beside no other row."""
        companions = {arm for row in self.ran() for arm in row.companions.values()}
        named = self.recipe.headline or self.recipe.metrics
        with_numbers = [row for row in self.ran() if any((row.label, metric) in self.values for metric in named)]
        return [row for row in with_numbers if row.arm not in companions]

    def shown(self, *, headline: bool = False) -> pd.DataFrame:
        """Return the table as text, the paper's number behind each of ours; empty columns are left out."""
        rows = self.headline() if headline else self.ran()
        metrics = self.recipe.headline if headline else self.recipe.metrics
        columns: dict[str, list[str]] = {}
        for metric in metrics:
            cells = [self.values.get((row.label, metric)) for row in rows]
            if all(cell is None for cell in cells):
                continue
            title = METRICS[metric].title
            columns[title] = ["–" if cell is None else cell.text(METRICS[metric]) for cell in cells]
            if any(self._paper(row, metric) for row in rows):
                columns[f"paper's {title}"] = [self._paper(row, metric) or "–" for row in rows]
        return pd.DataFrame(columns, index=pd.Index([row.label for row in rows], name="arm"))

    def _paper(self, row: Row, metric: str) -> str | None:
        """Return the paper's number; a difference that it does not have is that of the two changes that it has."""
        deltas = {each.arm: each.paper.get("delta") for each in self.recipe.rows}
        own, other = deltas[row.arm], deltas.get(row.against or "")
        if metric != "difference" or metric in row.paper or not own or not other:
            return row.paper.get(metric)
        first, second = (float(text.split()[0].replace("\u2212", "-")) for text in (own, other))
        return METRICS[metric].text(first - second)

    def notes(self) -> list[str]:
        """Return what a reader of the tables has to know."""
        notes = [
            f"MORE TOKENS RAISE PERPLEXITY HERE ({label}): these runs overfit their text, so that "
            "longer training is a loss, and neither time saved nor the estimates at 0.14% hold elsewhere."
            for label in self.overtrained()
        ]
        notes += self.recipe.notes
        if source := self.recipe.source:
            notes.append(f"Paper, {source.label}: {source.conditions}.")
        several = [value for value in self.values.values() if value.error is not None]
        if any(value.interval is None for value in several):
            notes.append("± is the standard error over seeds.")
        if any(value.interval is not None for value in several):
            notes.append("(low to high) over several seeds is 95% by Student's t.")
        if any(value.interval is not None for value in self.values.values() if value.error is None):
            notes.append("(low to high) is 95% of a paired bootstrap over held-out windows or questions, of one seed.")
        missing = [row.label for row in self.recipe.rows if row not in self.ran()]
        if missing and self.recipe.metrics:
            few = scale_named(self.scale).base == "smoke" and self.recipe.smoke is not None
            why = "; the smoke scale runs only some arms" * few
            notes.append(f"Not run: {len(missing)} of {len(self.recipe.rows)} rows{why}.")
        checks = [run["checks"] for run in self._own() if "checks" in run]
        if wrong := [each for each in checks if not all(each[n] == value for n, value in CHECKS.items() if n in each)]:
            notes.append(f"WRONG HEADS: {len(wrong)} runs froze or pruned other heads than they record: {wrong[0]}.")
        if dirty := sum(str(run["provenance"].get("commit")).endswith(("+", "None")) for run in self._own()):
            notes.append(f"DRAFT: {dirty} runs were made by edited code, or outside a git checkout: no commit has it.")
        devices = sorted({run["provenance"].get("device") or "an unknown device" for run in self._own()})
        return [*notes, f"Runs on {', '.join(devices)}."] if devices else notes

    def overtrained(self) -> list[str]:
        """Return the rows of ordinary arms whose additional tokens raised perplexity, beyond chance."""
        exchanges = {row.label: self.values.get((row.label, "exchange")) for row in self.recipe.rows}
        return [label for label, value in exchanges.items() if value and value.reach and value.reach[1] < 0]

    def _own(self) -> list[Record]:
        arms = {self._resolved(row.arm).partition("@")[0] for row in self.ran()}
        return [record for (arm, seed), record in self.records.items() if arm in arms and seed in self.seeds]

    def csv(self) -> str:
        """Return the numbers unrounded, a line for each row and metric."""
        lines = []
        for row in self.recipe.rows:
            for metric in self.recipe.metrics:
                value = self.values.get((row.label, metric))
                if value is None and not self._paper(row, metric):
                    continue
                low, high = (value.interval if value else None) or (None, None)
                numbers = [value.mean, value.error, low, high, len(value.by_seed)] if value else [None] * 4 + [0]
                lines.append([row.label, row.arm, metric, *numbers, self._paper(row, metric)])
        names = ["row", "arm", "metric", "mean", "standard_error", "low", "high", "seeds", "paper"]
        return pd.DataFrame(lines, columns=names).to_csv(index=False)


def measured_table(recipe: Recipe, records: Mapping[str, list[Record]]) -> pd.DataFrame:
    """Return the numbers of measurements beside the paper's, means ± SE over the seeds of their runs."""
    lines = []
    for each in recipe.measurements:
        for number in each.numbers if records.get(each.name) else ():
            numbers = [value for record in records[each.name] for value in number.find(record)]
            value = Value(by_seed=dict(enumerate(numbers)))
            ours = value.text(Metric(number.title, number.places, number.signed)) if numbers else "not run"
            if numbers and number.scientific:
                ours = f"{value.mean:.2e}".replace("e-0", "e-")
            lines.append([number.title, ours, number.paper or "–"])
    return pd.DataFrame(lines, columns=["", "ours", "paper"]).set_index("")


def markdown(table: pd.DataFrame) -> str:
    """Return a table of text as Markdown: names to the left, numbers to the right."""
    head = [str(table.index.name or ""), *map(str, table.columns)]
    body = [[str(name), *map(str, row)] for name, row in zip(table.index, table.to_numpy(), strict=True)]
    rule = ["-", *["-:"] * len(table.columns)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (head, rule, *body)
    )


def latex(table: pd.DataFrame) -> str:
    """Return a table of text as LaTeX with booktabs."""
    signs = {"−": "$-$", "±": r"$\pm$", "×": r"$\times$"}
    text = table.reset_index().to_latex(index=False, escape=True, column_format="l" + "r" * len(table.columns))
    for sign, written in signs.items():
        text = text.replace(sign, written)
    return text
