"""Numbers of the paper stand beside the arms that they are of: each is read from its row and column of the table."""

import re

import pytest

from saf.experiments.recipe import open_recipes

RECIPES = open_recipes()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?")
RATES, CONTEXTS = ("25%", "50%"), ("4K", "8K", "16K")
WAYS = {"mean + variance": "Mean + variance", "pruning + variance": "Pruning + variance"}
Places = dict[str, tuple[str, dict[str, int]]]
"""By arm: what its row of the table begins with, and which cell, counted from 0, each of its numbers is."""


def matched_time() -> Places:
    cells = {"perplexity": 2, "updates": 3, "minutes": 4}
    rows = {f"4K {way} ({rate})": f"{row} & {rate}" for way, row in WAYS.items() for rate in RATES}
    rows |= {f"4K mean + random ({rate})": f"Mean + random heads & {rate}" for rate in RATES}
    return {arm: (row, cells) for arm, row in {**rows, "4K ordinary": "Ordinary attention"}.items()}


def fixed_token_controls() -> Places:
    cells = {"perplexity": 1, "minutes": 2, "intervention": 3, "difference": 4, "time_difference": 5}
    rows = {
        f"{way} ({rate})": f"{row} ({rate})"
        for way, row in {**WAYS, "mean + random": "Mean + random"}.items()
        for rate in RATES
    }
    rows |= {"ordinary": "Ordinary attention", "mean + variance (25%, early)": r"\shortstack[l]{Mean + variance"}
    return {arm: (row, cells) for arm, row in rows.items()}


def selectors() -> Places:
    places: Places = {}
    for context in CONTEXTS:
        for rate in RATES:
            row = f"{context} & {rate}"
            places[f"{context} variance {rate}"] = row, {"delta": 2}
            places[f"{context} forward_kl {rate}"] = row, {"delta": 3, "difference": 4}
    return places


def timing() -> Places:
    return {
        f"at {share}": (share, {"remaining": 1, "delta": 2}) for share in ("25%", "40%", "50%", "60%", "75%", "100%")
    }


def schedules() -> Places:
    rows = {f"one time, {rate}": f"one replacement & {rate[:2]}.00" for rate in RATES}
    rows |= {f"gradual, {rate}": f"gradual, five groups & {rate[:2]}.00" for rate in RATES}
    rows |= {f"validation budget {limit}": f"validation budget {limit}" for limit in ("1%", "2%")}
    rows |= {f"train loss, z = {z}": f"train-loss triggered, $z={z}$" for z in ("3.0", "1.5")}
    return {arm: (row, {"delta": 3}) for arm, row in rows.items()}


def schedule_confirmation() -> Places:
    triggered = {"delta": 2, "difference": 3, "time_ratio": 4}
    places: Places = {f"one time, {rate}": (f"{rate} &", {"delta": 1}) for rate in RATES}
    return places | {f"train loss, up to {rate}": (f"{rate} &", triggered) for rate in RATES}


def trainability() -> Places:
    cells = {"perplexity": 1, "continuation": 3, "peak": 4}
    return {"frozen": ("Frozen mean", cells), "trainable": ("Trainable mean", cells)}


def intervention_costs() -> Places:
    cells = {"capture": 2, "fit": 3, "intervention": 4}
    return {rate: (f"124M, 4K & {rate}", cells) for rate in RATES}


def representation() -> Places:
    rows, cells = {"learned": "Absolute", "rope": "RoPE &"}, {"ordinary": 1, "dense": 2, "compact": 3}
    return {f"{arm}, {how}": (row, {"perplexity": cell}) for arm, row in rows.items() for how, cell in cells.items()}


def contexts() -> Places:
    places: Places = {}
    for context, size in zip(CONTEXTS, (8, 4, 2), strict=True):
        rows = {rate: f"{context} ({size}) & {rate}" for rate in RATES}
        places |= {f"{context} {rate}": (row, {"perplexity": 3, "delta": 4}) for rate, row in rows.items()}
        places[f"{context} ordinary"] = rows["25%"], {"perplexity": 2}
    return places


def later_intervention() -> Places:
    rows = {"ordinary": "Ordinary attention", "mean + variance": r"\ourapproach{} + variance"}
    rows |= {f"pruning + {score}": f"Pruning + {score}" for score in ("variance", "gate-Taylor")}
    places: Places = {arm: (row, {"perplexity": 1}) for arm, row in rows.items()}
    return places | {f"{arm}, matched time": (row, {"perplexity": 2}) for arm, row in rows.items()}


TABLES = {
    matched_time: "tab:equal-time-controls",
    fixed_token_controls: "tab:fixed-token-controls-full",
    selectors: "tab:kl-continuation-selector",
    timing: "tab:timing-main",
    schedules: "tab:schedule-details",
    schedule_confirmation: "tab:schedule-confirmation",
    trainability: "tab:pattern-controls",
    intervention_costs: "tab:intervention-costs",
    representation: "tab:representation-details",
    contexts: "tab:main-results",
    later_intervention: "tab:pruning-additional-training",
}


def plain(text: str) -> str:
    """Return a row or a number without what typesetting adds."""
    for sign, written in (("\u2212", "-"), (r"\pm", " ± "), (r"\%", "%"), ("$", ""), ("~", " ")):
        text = text.replace(sign, written)
    return re.sub(r"\s+", " ", text).strip()


def number_in(cell: str) -> str:
    found = NUMBER.search(plain(re.sub(r"\\(textbf|qdegrade|qimprove|times)", "", cell)).replace("+", ""))
    assert found is not None, cell
    return found.group()


@pytest.mark.parametrize(("places", "label"), TABLES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_an_arm_has_the_numbers_of_its_row(places, label, shared):
    (paper,) = (shared / "seeds").glob("*.txt")
    body = paper.read_text().partition(f"\\label{{{label}}}")[2].partition("\\end{table")[0]
    rows = [line.strip().removesuffix(r"\\") for line in body.splitlines() if line.count("&") > 1]
    quoted = {arm.name: arm.paper for arm in RECIPES[places.__name__].arms if arm.paper}
    checked = 0
    for arm, (begins, cells) in places().items():
        found = [row for row in rows if plain(begins) in plain(row)]
        assert found, f"{label} has no row {begins!r}"
        for column, cell in cells.items():
            if column not in quoted[arm]:
                continue  # of some arms the table has no number there
            assert number_in(quoted[arm][column]) == number_in(found[0].split("&")[cell]), (arm, column)
            checked += 1
    assert checked >= len(places())
