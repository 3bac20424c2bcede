"""A recipe's table from the numbers of its runs: what each metric is, and each row's mean, spread and text.

In this order: `records.numbers` has a line each of scale, arm, seed, metric and value; `RecipeTable.by_seed` adds the
metrics that compare arms, in each seed; `RecipeTable.summary` groups by row and metric, over seeds; `text_table`
makes text of it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit

from experiments.arms import arms
from experiments.measurements import Number
from experiments.recipe import COLUMNS, Recipe, Row
from experiments.records import CHECKS, RECALL, SMOKE_RECALL, Record, numbers, recall_metric
from experiments.scales import scale_named
from saf.errors import CompareError, InputError, did_you_mean
from saf.models.gpt import preset
from saf.paired import block_length, bootstrap_means
from saf.records.table import MISSING

PAPER_TOKEN_GAIN = 0.14
"""By how many percent 1% more tokens lowers perplexity in the paper, from its tables at matched tokens and time."""

# --- metrics


@dataclass(frozen=True)
class Comparison:
    """A row's arm beside those that it is compared with: what metrics that compare arms are computed from.

    A number that no record has is NaN, and so is every number of the other arm where that is the row's own.
    """

    row: Row
    references: Mapping[str, str | None]
    """The reference of each arm of the recipe."""
    number: Callable[[str | None, str], Any]
    """Returns an arm's number by metric: a series over seeds, or for the bootstrap one number or one a resample."""

    def own(self, metric: str) -> Any:
        return self.number(self.row.arm, metric)

    def reference(self, metric: str) -> Any:
        return self._other(self.row.reference, metric)

    def against(self, metric: str) -> Any:
        return self._other(self.row.against, metric)

    def _other(self, arm: str | None, metric: str) -> Any:
        return self.number(None if arm == self.row.arm else arm, metric)

    def change(self) -> Any:
        """Return by how many percent perplexity is above the reference's."""
        return 100.0 * np.expm1(self.own("loss") - self.reference("loss"))

    def difference(self) -> Any:
        """Return by how many points its change is above that of the arm in `against`."""
        return self.change() - self.of(self.row.against).change()

    def extra_tokens(self) -> Any:
        """Return how many percent more tokens the arm has than its reference, by their updates."""
        return 100.0 * (self.own("updates") / self.reference("updates") - 1.0)

    def of(self, arm: str | None) -> "Comparison":
        """Return another arm compared with its own reference; without an arm it has no numbers."""
        return replace(self, row=Row(arm=arm or "", label="", reference=self.references.get(arm or "")))

    def token_gain(self) -> Any:
        """Return by how many percent 1% more tokens lowers perplexity, from an ordinary run that had more."""
        more = self.of(self.row.more_tokens)
        return -more.change() / more.extra_tokens()

    def estimate(self, token_gain: Any) -> Any:
        """Estimate the change at matched time: that at matched tokens less the gain from the extra tokens."""
        return self.of(self.row.tokens).change() - token_gain * self.extra_tokens()


@dataclass(frozen=True)
class Metric:
    """A column of a table: a number of the row's own record, or one that compares several records."""

    title: str
    places: int
    signed: bool = False
    of: Callable[[Comparison], Any] | None = None
    every_seed: bool = False
    """Whether the number of each seed is shown in place of their mean."""


def _by_seed(title: str, places: int, signed: bool, of: Callable[[Comparison], Any]) -> Metric:
    return Metric(f"{title} by seed (%)", places, signed, of, every_seed=True)


def _token_gain(c: Comparison) -> Any:
    """Return the gain in the row of the run that measures it; estimates in other rows only use it."""
    return c.token_gain() if c.row.more_tokens == c.row.arm else math.nan


METRICS = {
    # perplexity: the row's own, then compared with other arms
    "perplexity": Metric("perplexity", 3),
    "delta": Metric("change (%)", 3, True, Comparison.change),
    "difference": Metric("difference (points)", 3, True, Comparison.difference),
    "difference_seeds": Metric("difference by seed (points)", 3, True, Comparison.difference, every_seed=True),
    "perplexity_difference": Metric(
        "difference (%)", 3, True, lambda c: 100.0 * np.expm1(c.own("loss") - c.against("loss"))
    ),
    "delta_seeds": _by_seed("change", 3, True, Comparison.change),
    # perplexity at matched time and at matched tokens
    "extra_tokens": Metric("extra tokens (%)", 2, True, Comparison.extra_tokens),
    "tokens": Metric("change at matched tokens (%)", 3, True, lambda c: c.of(c.row.tokens).change()),
    "measured_time": Metric("change at measured time (%)", 3, True, lambda c: c.of(c.row.measured_time).change()),
    "token_gain": Metric("decrease for 1% more tokens (%)", 3, False, _token_gain),
    "estimate_at_paper_gain": Metric("change estimated at 0.14% (%)", 3, True, lambda c: c.estimate(PAPER_TOKEN_GAIN)),
    "estimate_at_measured_gain": Metric(
        "change estimated at the measured rate (%)", 3, True, lambda c: c.estimate(c.token_gain())
    ),
    # perplexity by position in the window
    "context_gain": Metric("loss decrease by context (nats)", 3),
    "window": Metric("measured at (tokens of context)", 0),
    "perplexity_to_4k": Metric("perplexity of the first 4,096 tokens", 3),
    # tasks after pretraining
    "accuracy": Metric("accuracy (%)", 2),
    "seeds": _by_seed("accuracy", 2, False, partial(Comparison.own, metric="accuracy")),
    "points": Metric("change of accuracy (points)", 2, True, lambda c: c.own("accuracy") - c.reference("accuracy")),
    "points_against": Metric(
        "difference of accuracy (points)", 3, True, lambda c: c.own("accuracy") - c.against("accuracy")
    ),
    "epochs": Metric("epochs", 0),
    "example_tokens": Metric("mean tokens of a training example", 1),
    "gate": Metric("development accuracy (%)", 2),
    # the event that froze heads, and their fits
    "loss_increase": Metric("loss increase at the event (nats)", 4, True),
    "heads": Metric("heads", 0),
    "fit_kl": Metric("largest fit KL (nats)", 3),
    "median_kl": Metric("median fit KL (nats)", 3),
    "skipped": Metric("heads skipped by fit KL", 0),
    "exponential": Metric("exponential heads", 0),
    "extra_kl": Metric("largest extra KL (nats)", 4),
    # time and memory
    "updates": Metric("updates", 0),
    "remaining": Metric("updates after freezing", 0),
    "minutes": Metric("minutes", 2),
    "time_ratio": Metric("time ratio", 3, False, lambda c: c.own("minutes") / c.against("minutes")),
    "time_difference": Metric("difference (s)", 1, True, lambda c: 60 * (c.own("minutes") - c.against("minutes"))),
    "continuation": Metric("continuation (min)", 2),
    "intervention": Metric("intervention (s)", 2),
    "compilation": Metric("compilation (s)", 1),
    "capture": Metric("capture and mean (s)", 2),
    "fit": Metric("fit (s)", 2),
    "update": Metric("update (ms)", 1),
    "last_updates": Metric("mean of the last 100 updates (ms)", 0),
    "speedup": Metric("speedup", 3, False, lambda c: 1.0 / (c.own("update") / c.reference("update"))),
    "peak": Metric("peak memory (GiB)", 2),
    "peak_change": Metric(
        "change of peak memory (%)", 2, True, lambda c: 100 * (c.own("peak") / c.reference("peak") - 1)
    ),
}
"""Metrics by name.

A change is from the arm in `reference`, a difference from the arm in `against`: `difference` subtracts the changes of
both arms, `perplexity_difference` compares their perplexities. Metrics without a function stand in the runs' records.
"""
for _length, _pairs in (*RECALL, *SMOKE_RECALL):
    _metric, _title = recall_metric(_length, _pairs), f"recall at {_length:,} / {_pairs}"
    METRICS[_metric] = Metric(f"{_title} (%)", 2)
    METRICS[f"{_metric} seeds"] = _by_seed(_title, 2, False, partial(Comparison.own, metric=_metric))


def check_recipe(recipe: Recipe) -> None:
    """Raise InputError for unknown metrics and columns, and for changes and differences that no row can have."""
    for metric in (*recipe.metrics, *recipe.headline):
        if metric not in METRICS:
            raise InputError(f"recipe {recipe.name!r} has an unknown metric {metric!r}{did_you_mean(metric, METRICS)}")
    if columns := [each for row in recipe.rows for each in row.paper if each not in recipe.metrics]:
        near = did_you_mean(columns[0], [*COLUMNS, *recipe.metrics])
        raise InputError(f"recipe {recipe.name!r} has a column {columns[0]!r} that is none of its metrics{near}")
    changing = {row.arm for row in recipe.rows if row.reference}
    if "delta" in recipe.metrics and not changing:
        raise InputError(f"recipe {recipe.name!r} has the metric 'delta' and no row with 'reference'")
    if "difference" in recipe.metrics and not changing & {row.against for row in recipe.rows}:
        raise InputError(f"recipe {recipe.name!r}: 'difference' needs a row of the arm of 'against', with a reference")


# --- rows


class RecipeTable:
    """The numbers of one recipe at one scale, from the records of its runs alone."""

    def __init__(self, recipe: Recipe, scale: str, records: Iterable[Record]):
        self.recipe, self.scale = recipe, scale
        self._records = {(each["experiment"]["arm"], int(each["experiment"]["seed"])): each for each in records}
        self._arms = {arm for arm, _ in self._records}
        self._references = {row.arm: row.reference for row in recipe.rows}
        self._draws: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}

    def _arm_that_ran(self, arm: str | None) -> str:
        """Return an arm, or where that was not run its stand-in."""
        name, at, place = (arm or "").partition("@")
        while name not in self._arms and name in arms() and arms()[name].stand_in:
            name = str(arms()[name].stand_in)
        return f"{name}{at}{place}"

    @cached_property
    def _lines(self) -> pd.DataFrame:
        return numbers(self._records.values())

    def recorded(self) -> int:
        """Return how many arms of its rows have records, those of several seeds twice; read no numbers."""
        rows = self.recipe.rows if self.recipe.metrics else ()
        seeds = Counter(arm for arm, _ in self._records)
        return sum(min(seeds[arm], 2) for arm in {self._arm_that_ran(row.arm).partition("@")[0] for row in rows})

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of the table, as many as the recipe has: those that most of its rows have."""
        own = self._lines[self._lines["arm"].isin([self._arm_that_ran(row.arm) for row in self.recipe.rows])]
        rows = own.groupby("seed")["arm"].nunique()
        # Seeds of the most rows first, then in their own order.
        return sorted(sorted(rows.index, key=lambda seed: (-rows[seed], seed))[: self.recipe.seeds])

    @cached_property
    def _by_arm(self) -> pd.DataFrame:
        """The numbers of runs: a line a seed, columns by arm and metric."""
        return self._lines.pivot(index="seed", columns=["arm", "metric"], values="value").reindex(self.seeds)

    def _number(self, arm: str | None, metric: str) -> Any:
        return self._by_arm.get((self._arm_that_ran(arm), metric), math.nan)

    @cached_property
    def by_seed(self) -> pd.DataFrame:
        """The table's own numbers, comparisons included: a line each of row, metric, seed and value."""
        runs, lines = set(zip(self._lines["arm"], self._lines["seed"], strict=True)), []
        for row in self.recipe.rows:
            comparison = Comparison(row, self._references, self._number)
            seeds = [scale_named(self.scale).seeds[0]] if row.first_seed else self.seeds
            seeds = [seed for seed in seeds if (self._arm_that_ran(row.arm), seed) in runs and seed in self.seeds]
            for metric in self.recipe.metrics:
                of = METRICS[metric].of
                values = pd.Series(of(comparison) if of else self._number(row.arm, metric), self._by_arm.index)
                lines += [(row.label, metric, seed, value) for seed, value in values.loc[seeds].dropna().items()]
        return pd.DataFrame(lines, columns=["row", "metric", "seed", "value"])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """A line for each row and metric: arm, mean, standard error, interval, seeds, the paper's number, text.

        The interval, `low` to `high`, is 95%: over held-out windows or questions of one seed, or by Student's t.
        """
        over_seeds: Any = self.by_seed.groupby(["row", "metric"]).agg(
            mean=("value", "mean"),
            standard_error=("value", "sem"),
            seeds=("value", "count"),
            values=("value", list),
            seed=("seed", "first"),
        )
        known, lines = over_seeds.to_dict("index"), []
        for row in self.recipe.rows:
            for metric in self.recipe.metrics:
                line = {"row": row.label, "arm": row.arm, "metric": metric, "seeds": 0}
                if (own := known.get((row.label, metric))) is not None:
                    low, high = self._interval(row, metric, own)
                    line |= {**own, "low": low, "high": high}
                    line["text"] = text_of(METRICS[metric], own["mean"], own["standard_error"], (low, high))
                    if METRICS[metric].every_seed:
                        line["text"] = ", ".join(text_of(METRICS[metric], value) for value in own["values"])
                lines.append({**line, "paper": self._paper(row, metric)})
        columns = ["row", "arm", "metric", "mean", "standard_error", "low", "high", "seeds", "paper", "text"]
        return pd.DataFrame(lines, columns=columns).set_index(["row", "metric"], drop=False)

    def _interval(self, row: Row, metric: str, own: Mapping[str, Any]) -> tuple[float, float]:
        """Return the 95% interval of a metric that compares arms; NaN for others, and where it has none."""
        if (of := METRICS[metric].of) is not None and own["seeds"] == 1:
            return self._bootstrap(row, of, own["seed"])
        if of is None or self.recipe.intervals == "error":
            return math.nan, math.nan
        # For three seeds Student's t is 4.30 where the normal distribution has 1.96.
        reach = float(stdtrit(own["seeds"] - 1, 0.975)) * own["standard_error"]
        return own["mean"] - reach, own["mean"] + reach

    def _paper(self, row: Row, metric: str) -> str | None:
        """Return the paper's number; a difference that it does not have is that of the two changes that it has."""
        deltas = {each.arm: each.paper.get("delta") for each in self.recipe.rows}
        own, other = deltas[row.arm], deltas.get(row.against or "")
        if metric != "difference" or metric in row.paper or not own or not other:
            return row.paper.get(metric)
        # Texts of the paper have U+2212 for a minus, as do ours.
        first, second = (float(text.split()[0].replace("\u2212", "-")) for text in (own, other))
        return text_of(METRICS[metric], first - second)

    # --- one seed: the paired bootstrap

    def _bootstrap(self, row: Row, of: Callable[[Comparison], Any], seed: int) -> tuple[float, float]:
        """Return 95% over the same resampled windows, or questions, of all runs; NaN where these decide nothing."""
        samples: dict[str, np.ndarray] = {}  # filled by the first `compute`: the arms that the number depends on

        def compute(mean: Callable[[str], Any]) -> Any:
            """Compute the number from mean losses, or shares of right answers, by arm."""

            def number(arm: str | None, metric: str) -> Any:
                name = self._arm_that_ran(arm)
                if metric not in ("loss", "accuracy"):
                    own = self._number(arm, metric)
                    return own[seed] if isinstance(own, pd.Series) else own
                if (sample := self._samples[seed].get(name)) is None:
                    return math.nan
                samples.setdefault(name, sample)
                return mean(name) * (100.0 if metric == "accuracy" else 1.0)

            return of(Comparison(row, self._references, number))

        def at(moved: str = "", by: float = 0.0) -> float:
            return float(np.squeeze(compute(lambda name: samples[name].mean() + (by if name == moved else 0.0))))

        with np.errstate(divide="ignore", invalid="ignore"):  # a smoke run may have no update more than another
            if math.isnan(at()) or not samples:
                return math.nan, math.nan
            self._check_same_windows(list(samples), seed)
            # Blocks must be as long as the number's own noise goes together, and a difference of two arms is noisy
            # otherwise than either arm: to first order a window moves the number by its loss times these slopes.
            small = 1e-6
            slopes = {name: (at(name, small) - at(name, -small)) / (2 * small) for name in samples}
            effects = sum(slope * samples[name] for name, slope in slopes.items())
            block = block_length(torch.as_tensor(effects))
            low, high = np.quantile(compute(lambda name: self._resampled(name, seed, block)), [0.025, 0.975])
        return float(low), float(high)

    @cached_property
    def _samples(self) -> dict[int, dict[str, np.ndarray]]:
        """The losses of windows, or the answers to questions, of every run, by seed and arm."""
        samples: dict[int, dict[str, np.ndarray]] = {seed: {} for seed in self.seeds}
        for (arm, seed), record in self._records.items():
            if seed in samples and (sample := record.get("window_losses") or record.get("right")):
                samples[seed][arm] = np.array(sample, dtype=float)
        return samples

    def _resampled(self, arm: str, seed: int, block: int) -> np.ndarray:
        """Return the means of an arm's resampled windows, drawn at once for all arms that have as many."""
        samples = self._samples[seed]
        place = seed, block, len(samples[arm])
        if place not in self._draws:
            alike = {name: sample for name, sample in samples.items() if len(sample) == place[2]}
            # Every arm has the same windows in a draw, so that the hardness of a window cancels.
            draws = bootstrap_means(torch.tensor(np.array([*alike.values()])), block=block).numpy()
            self._draws[place] = dict(zip(alike, draws, strict=True))
        return self._draws[place][arm]

    def _check_same_windows(self, arms: list[str], seed: int) -> None:
        for what, words in (("windows_hash", "held-out windows"), ("questions_hash", "questions")):
            hashes = {self._records[arm, seed].get(what) for arm in arms}
            if len(hashes) > 1:
                raise CompareError(f"{' and '.join(arms)} were evaluated on different {words}; train both on one text")

    # --- text

    def filled_rows(self) -> list[Row]:
        """Return the rows that have a number in some column."""
        labels = {*self.by_seed["row"]}
        return [row for row in self.recipe.rows if row.label in labels]

    def _headline(self) -> list[Row]:
        """Return the rows of the headline: those with a number in it, without the companions of other rows."""
        own = self.by_seed[self.by_seed["metric"].isin(self.recipe.headline or self.recipe.metrics)]
        companions = {arm for row in self.filled_rows() for arm in row.companions}
        return [row for row in self.filled_rows() if row.label in {*own["row"]} and row.arm not in companions]

    def text_table(self, *, headline: bool = False) -> pd.DataFrame:
        """Return the table as text, the paper's number behind each of ours; empty columns are left out.

        Where cells are of different numbers of seeds, a column n has the most of each row, and cells of fewer say so.
        """
        rows, metrics = (
            (self._headline(), self.recipe.headline) if headline else (self.filled_rows(), self.recipe.metrics)
        )
        labels, columns = pd.Index([row.label for row in rows], name="arm"), {}
        cells = {metric: self.summary.xs(metric, level="metric").loc[labels] for metric in metrics}
        seeds: Any = pd.DataFrame({metric: each["seeds"] for metric, each in cells.items()}, index=labels)
        most, mixed = seeds.max(axis=1), len({*seeds.to_numpy().flatten()} - {0}) > 1
        if mixed:
            columns["n"] = most.astype(str)
        for metric, each in cells.items():
            title, text = METRICS[metric].title, each["text"]
            if mixed and not METRICS[metric].every_seed:
                text = text.mask(
                    text.notna() & (each["seeds"] < most), text + " (n = " + each["seeds"].astype(str) + ")"
                )
            if text.notna().any():
                columns[title] = text.fillna(MISSING)
                if each["paper"].notna().any():
                    columns[f"paper's {title}"] = each["paper"].fillna(MISSING)
        return pd.DataFrame(columns, index=labels)

    def csv(self) -> str:
        """Return the numbers unrounded, a line for each row and metric that we or the paper have."""
        known = self.summary[(self.summary["seeds"] > 0) | self.summary["paper"].notna()]
        return known.drop(columns="text").to_csv(index=False)

    def notes(self) -> list[str]:
        """Return what a reader of the tables has to know."""
        notes = [
            f"MORE TOKENS RAISE PERPLEXITY HERE ({label}): these runs overfit their text, so that "
            "longer training is a loss, and neither time saved nor the estimates at 0.14% hold elsewhere."
            for label in self.overtrained_rows()
        ]
        notes += self.recipe.notes
        notes += [self.recipe.source.note] if self.recipe.source else []
        several: Any = self.summary[self.summary["seeds"] > 1]
        one: Any = self.summary[self.summary["seeds"] == 1]
        if len(several) and len(one):
            notes.append("n is the number of seeds.")
        if several["low"].isna().any():
            notes.append("± is the standard error over seeds.")
        if several["low"].notna().any():
            notes.append("(low to high) over several seeds is 95% by Student's t.")
        if one["low"].notna().any():
            notes.append("(low to high) is 95% of a paired bootstrap over held-out windows or questions, of one seed.")
        missing = len(self.recipe.rows) - len(self.filled_rows())
        if missing and self.recipe.metrics:
            is_part = scale_named(self.scale).base == "smoke" and self.recipe.smoke is not None
            why = "; the smoke scale runs only some arms" if is_part else ""
            notes.append(f"Not run: {missing} of {len(self.recipe.rows)} rows{why}.")
        runs = self._own_records()
        checks = [run["checks"] for run in runs if "checks" in run]
        if wrong := [each for each in checks if not all(each[n] == value for n, value in CHECKS.items() if n in each)]:
            notes.append(f"WRONG HEADS: {len(wrong)} runs froze or pruned other heads than they record: {wrong[0]}.")
        # saf.records.result adds "+" to the commit of a checkout with edited code.
        if dirty := sum(str(run["provenance"].get("commit")).endswith(("+", "None")) for run in runs):
            notes.append(f"DRAFT: {dirty} runs were made by edited code, or outside a git checkout: no commit has it.")
        devices = sorted({run["provenance"].get("device") or "an unknown device" for run in runs})
        return [*notes, f"Runs on {', '.join(devices)}."] if devices else notes

    def _own_records(self) -> list[Record]:
        """Return the records of the rows that have a number, of the table's seeds."""
        arms = {self._arm_that_ran(row.arm).partition("@")[0] for row in self.filled_rows()}
        return [record for (arm, seed), record in self._records.items() if arm in arms and seed in self.seeds]

    def runs_in_words(self) -> str:
        """Return in a sentence how large the table's runs are; "" where it has no run from initialisation."""
        scale, sizes, tokens = scale_named(self.scale), set[int](), set[int]()  # in millions
        for run in self._own_records():
            settings = run["experiment"]["settings"]
            if "model" in settings:  # a branch has its parent's
                overrides = {"vocab_size": scale.vocabulary, **settings.get("model_overrides", {})}
                sizes.add(round(preset(settings["model"], **overrides).num_parameters / 1e6))
                tokens.add(round(run["tokens"] / 1e6))
        if not sizes:
            return ""
        if scale.base == "smoke":
            return "The smoke scale shows that the recipe runs: its numbers mean nothing."
        parameters, most = (" or ".join(f"{number}M" for number in sorted(each)) for each in (sizes, tokens))
        seeds = "seed" if len(self.seeds) == 1 else "seeds"
        return f"Here: {parameters} parameters, {most} tokens, {seeds} {', '.join(map(str, self.seeds))}."

    def overtrained_rows(self) -> list[str]:
        """Return the rows of ordinary arms whose additional tokens raised perplexity, beyond chance."""
        gains: Any = self.summary[self.summary["metric"] == "token_gain"]
        # With one seed the bootstrap's interval, with several the standard error.
        highest = gains["high"].fillna(gains["mean"] + gains["standard_error"])
        return [*gains["row"][highest < 0]]


def measured_table(recipe: Recipe, records: Mapping[str, list[Record]]) -> pd.DataFrame:
    """Return the numbers of measurements and the paper's, means ± SE over the seeds of their runs."""
    lines = []
    for each in recipe.measurements:
        for number in each.numbers if records.get(each.name) else ():
            values: Any = pd.Series([number.value(record) for record in records[each.name]]).dropna()
            ours = text_of(number, values.mean(), float(values.sem())) if len(values) else "not run"
            lines.append([number.title, ours, number.paper or MISSING])
    return pd.DataFrame(lines, columns=["", "ours", "paper"]).set_index("")


def text_of(
    kind: Metric | Number, mean: float, error: float = math.nan, interval: tuple[float, float] = (math.nan, math.nan)
) -> str:
    """Return a number at its digits with its interval or standard error, unless that has no extent there."""

    def digits(value: float, sign: str = "+" if kind.signed else "") -> str:
        return f"{value:{sign},.{kind.places}f}".replace("-", "\u2212")

    if isinstance(kind, Number) and kind.scientific:
        return scientific(mean)
    if not math.isnan(interval[0]):
        low, high = map(digits, interval)
        return digits(mean) if low == high == digits(mean) else f"{digits(mean)} ({low} to {high})"
    spread = f"{0.0 if math.isnan(error) else error:.{kind.places}f}"
    return f"{digits(mean)} ± {spread}" if float(spread) else digits(mean)


def scientific(value: float | None) -> str:
    """Return an error as the paper writes them: 1.19e-7."""
    return MISSING if value is None else re.sub("e([+-])0", r"e\1", f"{value:.2e}").replace("e+", "e")


def markdown(table: pd.DataFrame) -> str:
    """Return a table of text as Markdown: names to the left, numbers to the right; "; " parts columns of names."""
    names = str(table.index.name or "").split("; ")
    body = [
        [*str(label).split("; ", len(names) - 1), *map(str, row)]
        for label, row in zip(table.index, table.to_numpy(), strict=True)
    ]
    rule = ["-"] * len(names) + ["-:"] * len(table.columns)
    # chr(92) is the backslash, which expressions in f-strings may not contain before Python 3.12.
    lines = ([*names, *map(str, table.columns)], rule, *body)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def latex(table: pd.DataFrame) -> str:
    """Return a table of text as LaTeX with booktabs."""
    signs = {"−": "$-$", "±": r"$\pm$", "×": r"$\times$"}
    text = table.reset_index().to_latex(index=False, escape=True, column_format="l" + "r" * len(table.columns))
    for sign, written in signs.items():
        text = text.replace(sign, written)
    return text
