"""How a table of a recipe is to be read, said beside it.

What its errors and intervals are of, which options its seeds recommend, what is not to be read from it, what its runs
lack, and where they come from.
"""

from collections.abc import Mapping, Sequence

from scipy import stats

from saf.experiments.columns import COLUMNS, Record
from saf.experiments.plan import Plan
from saf.experiments.recipe import Recipe
from saf.experiments.rows import Records, Value, sample_of

Values = Mapping[str, Mapping[str, Value | None]]
"""By arm and column; an arm without a record is absent."""
LEAST_SEEDS = 3
"""Fewer say nothing of what another seed would change."""


def drafts(records: Sequence[Record]) -> tuple[str, ...]:
    """Return why a table of these is none to quote; nothing when every run is of a commit."""
    found = [record["provenance"].get("commit") for record in records]
    unclean = sum(commit is None or commit.endswith("+") for commit in found)
    return (f"DRAFT: {unclean} of {len(found)} records are of a tree that no commit holds.",) if unclean else ()


def errors_and_intervals(values: Values, records: Sequence[Record]) -> list[str]:
    """Return what the errors and intervals of a table are of."""
    found = [value for columns in values.values() for value in columns.values() if value is not None]
    told = ["± is the standard error over seeds."] if any(value.error is not None for value in found) else []
    if any(value.interval is not None for value in found):
        counts = sorted({len(sample) for record in records if (sample := sample_of(record))})
        kinds = {"questions" if record.get("right") else "held-out windows" for record in records if sample_of(record)}
        number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        told.append(
            f"An interval in brackets is 95% over {number} {' or '.join(sorted(kinds))}, the same draws for both runs "
            "of a pair of one seed, in blocks where neighbours go together: what another seed or another order of the "
            "data would change is not in it."
        )
    return told


def overtrained_arms(recipe: Recipe, values: Values) -> dict[str, str]:
    """Return the arms that compare themselves with an ordinary one of more tokens where these raised its perplexity.

    Each has the name of that ordinary arm beside it. What could be chance, by its interval or error, is no rise.
    """
    worse = {
        name
        for name, columns in values.items()
        if (value := columns.get("exchange")) is not None and value.reach is not None and value.reach[1] < 0
    }
    return {arm.name: more for arm in recipe.arms if (more := arm.beside.get("exchange")) in worse}


def worthless(overtrained: Mapping[str, str], values: Values) -> list[str]:
    """Return what is not to be read from rows of runs that went on past what their text teaches."""
    found = ((more, values[more]["exchange"]) for more in dict.fromkeys(overtrained.values()))
    return [
        f"MORE TOKENS RAISE PERPLEXITY HERE ({more}: by {-value.mean:.2f}% for 1% more): runs went on past what their "
        "text teaches, so that in these rows longer training is a loss, and neither time saved nor tokens at 0.14 say "
        "what they are worth elsewhere. More text, or shorter runs, would."
        for more, value in found
        if value is not None
    ]


def recommended(recipe: Recipe, values: Values) -> list[str]:
    """Return which options of a run three seeds or more recommend, and which they do not; none where too few ran."""
    told: dict[bool, list[str]] = {True: [], False: []}
    column = COLUMNS["difference"]
    for arm, asked in recipe.options.items():
        value = values.get(arm, {}).get("difference")
        if value is None or value.error is None or value.seeds < LEAST_SEEDS:
            continue
        reach = value.error * float(stats.t.ppf(0.975, value.seeds - 1))
        low, high = (column.written(value.mean + side * reach) for side in (-1, 1))
        judged = f"{asked} ({arm}: {column.written(value.mean)}, 95% over {value.seeds} seeds {low} to {high})"
        told[value.mean + reach < 0].append(judged)
    sentences = {
        True: "Recommended, since the difference lies below zero by more than its interval over seeds",
        False: "Not recommended, since that interval holds zero or lies above it",
    }
    return [f"{sentences[won]}: {'; '.join(told[won])}." for won in sentences if told[won]]


def fewer_seeds(name: str, recipe: Recipe, plan: Plan, values: Values) -> list[str]:
    """Return notes on rows that are means over fewer seeds than planned, and on columns over fewer than their row."""
    rows: list[str] = []
    columns: dict[str, set[str]] = {}
    for arm in recipe.arms:
        found = {column: value.seeds for column, value in values.get(arm.name, {}).items() if value is not None}
        if not (arm.row and found):
            continue
        planned = sum((of, each) == (name, arm.name) for of, each, _ in plan.arms)
        most = max(found.values())
        rows += [f"{arm.name} ({most} of {planned})"] * (most < planned)
        for column, seeds in found.items():
            if seeds < most:
                columns.setdefault(COLUMNS[column].title, set()).add(f"{seeds} of {most}")
    told = [f"Over fewer seeds than planned, and not to be set beside the others: {', '.join(rows)}."] if rows else []
    each = [f"{title} ({', '.join(sorted(numbers))})" for title, numbers in columns.items()]
    return told + ([f"Columns over fewer seeds than their row: {'; '.join(each)}."] if each else [])


def incomplete(records: Records) -> list[str]:
    """Return notes about what runs lack, such as events that never came, each once with the arms that lack it."""
    arms: dict[str, dict[str, None]] = {}
    for arm, by_seed in records.items():
        for what in (what for found in by_seed.values() for record in found for what in record.get("lacks", [])):
            arms.setdefault(what, {})[arm] = None
    return [f"Lacking in {', '.join(names)}: {what}." for what, names in arms.items()]


def origin(records: Sequence[Record]) -> list[str]:
    """Return a note about where runs were made: commits and devices."""
    commits = sorted({_short(record["provenance"].get("commit")) for record in records})
    devices = sorted({record["provenance"].get("device") or "an unknown device" for record in records})
    shared = sum(bool(record.get("shared")) for record in records)
    told = [f"Runs of commit {', '.join(commits)} on {', '.join(devices)}."] if records else []
    trained_on = max((record.get("trained_on", 0) for record in records), default=0)
    if trained_on:
        told.append(f"Test examples that are trained on too, whose accuracy tells nothing: {trained_on}.")
    return [*told, f"Runs that shared a device, whose times are left out: {shared}."] if shared else told


def _short(commit: str | None) -> str:
    """Return the first digits of a commit, with the sign of changes that it does not hold."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")
