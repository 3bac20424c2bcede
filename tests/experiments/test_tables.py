"""Tables from records: each number from an independent computation, and which records a table takes."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy import stats

from experiments.__main__ import main
from experiments.paper import Source
from experiments.recipe import Recipe, all_recipes, recipes_for, rows
from experiments.tables import METRICS, RecipeTable, check_recipe
from saf.errors import CompareError, InputError
from saf.paired import delta_of_windows

ROOT = Path(__file__).resolve().parents[2]
RECIPES_PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPE = Recipe(
    title="A table",
    source=Source("tab:none", "invented"),
    rows=rows(
        """
        arm           | label        | reference | against | tokens        | more_tokens | perplexity
        ordinary      | plain        |           |         |               |             | 23.9
        frozen        | cold         | ordinary  |         | frozen-tokens | more        |
        pruned        | cut          | ordinary  | frozen  |               |             |
        frozen-tokens | cold, tokens | ordinary  |         |               |             |
        more          | longer       | ordinary  |         |               | more        |
        recall@0      | at once      |           |         |               |             |
        recall@1      | later        |           |         |               |             |
        """
    ),
    metrics=(
        *("perplexity", "delta", "difference", "perplexity_difference", "extra_tokens", "tokens"),
        *("estimate_at_paper_gain", "estimate_at_measured_gain", "token_gain", "heads", "minutes", "recall 512 8"),
    ),
)


@pytest.mark.parametrize(
    ("table", "metrics", "message"),
    [
        ("arm | label\n a | b", ("perplexty",), "did you mean 'perplexity'"),
        ("arm | label | refrence\n a | b | c", ("heads",), "did you mean 'reference'"),
        ("arm | label | minutes\n a | b | 1", ("heads",), "none of its metrics"),
        ("arm | label\n a | b", ("delta",), "no row with 'reference'"),
        ("arm | label | reference | against\n a | b | c | d", ("difference",), "the arm of 'against'"),
    ],
)
def test_a_recipe_that_could_not_be_shown_is_refused(table, metrics, message):
    with pytest.raises(InputError, match=message):
        check_recipe(Recipe(title="Mine", rows=rows(table), metrics=metrics))


def record(loss: float, *, updates: int = 100, seconds: float = 60.0, windows: int = 40, **others) -> dict:
    noise = torch.randn(windows, generator=torch.Generator().manual_seed(round(1e4 * loss)), dtype=torch.float64)
    losses = loss + 0.1 * (noise - noise.mean())
    return {
        "report_loss": loss,
        "report_perplexity": math.exp(loss),
        "updates": updates,
        "provenance": {"heads": [[0, 1]], "pruned": [], "commit": "c" * 40, "device": "a device"},
        "time": {"everything": {"seconds": seconds}},
        "windows_hash": "same",
        "window_losses": losses.tolist(),
        **others,
    }


def table(records: dict, of: Recipe = RECIPE) -> RecipeTable:
    places = [{"experiment": {"scale": "small", "arm": arm, "seed": seed}} for arm, seed in records]
    return RecipeTable(of, "small", [r | p for r, p in zip(records.values(), places, strict=True)])


@pytest.fixture
def records() -> dict:
    tests = {update: [{"length": 512, "pairs": 8, "accuracy": share}] for update, share in (("0", 0.5), ("200", 0.75))}
    reports = {update: {"recall": {"tests": each, "development": {"accuracy": 1.0}}} for update, each in tests.items()}
    found = {}
    for seed, shift in ((1337, 0.0), (1338, 0.02)):
        found["ordinary", seed] = record(3.0 + shift)
        found["frozen", seed] = record(2.98 + 2 * shift, updates=110, seconds=90.0)
        found["pruned", seed] = record(2.99, updates=120)
        found["frozen-tokens", seed] = record(3.01 + shift)
        found["more", seed] = record(2.99 + shift, updates=105)
    return found | {("recall", 1337): record(1.0, reports=reports)}


def test_numbers_are_taken_in_each_seed_then_averaged(records):
    """Golden values, by hand: changes are 100 (exp(difference of losses) - 1) of a seed, their spread over two."""
    lines = pd.read_csv(io.StringIO(table(records).csv())).set_index(["row", "metric"])

    def change(own: float, other: float) -> float:
        return 100 * math.expm1(own - other)

    cold = change(2.98, 3.0), change(3.02, 3.02)
    cut = change(2.99, 3.0) - cold[0], change(2.99, 3.02) - cold[1]
    rate = -change(2.99, 3.0) / 5
    for row, metric, expected in (
        ("cold", "delta", sum(cold) / 2),
        ("cut", "difference", sum(cut) / 2),
        ("cut", "perplexity_difference", (change(2.99, 2.98) + change(2.99, 3.02)) / 2),
        ("cold", "extra_tokens", 10.0),
        ("cold", "tokens", change(3.01, 3.0)),
        ("cold", "estimate_at_paper_gain", change(3.01, 3.0) - 1.4),
        ("longer", "token_gain", rate),
        ("cold", "estimate_at_measured_gain", change(3.01, 3.0) - 10 * rate),
        ("cold", "minutes", 1.5),
        ("at once", "recall 512 8", 50),
        ("later", "recall 512 8", 75),
    ):
        assert lines.loc[(row, metric), "mean"] == pytest.approx(expected, rel=1e-9), (row, metric)
    assert lines.loc[("cold", "delta"), "standard_error"] == pytest.approx(abs(cold[0] - cold[1]) / 2, rel=1e-12)
    assert lines.loc[("plain", "perplexity"), "paper"] == 23.9
    assert ("cold", "token_gain") not in lines.index


def test_one_seed_has_the_paired_bootstrap_over_windows(records):
    one = {key: value for key, value in records.items() if key[1] == 1337}
    value = table(one).summary.loc[("cold", "delta")]
    own, other = (torch.tensor(one[arm, 1337]["window_losses"], dtype=torch.float64) for arm in ("frozen", "ordinary"))
    assert math.isnan(value["standard_error"])
    assert [value["low"], value["high"]] == pytest.approx(delta_of_windows(other, own)["ci95"], rel=1e-9)
    assert math.isnan(table(one).summary.loc[("cold", "extra_tokens"), "low"])


def test_a_recipe_may_show_intervals_over_seeds_by_t(records):
    value = table(records, replace(RECIPE, intervals="t")).summary.loc[("cold", "delta")]
    expected = stats.t.interval(0.95, 1, loc=value["mean"], scale=value["standard_error"])
    assert (value["low"], value["high"]) == pytest.approx(expected, rel=1e-12)


def test_a_one_seed_table_has_the_one_seed_that_most_rows_have(records):
    one = Recipe(title="", source=RECIPE.source, rows=RECIPE.rows[:3], metrics=("perplexity",), seeds=1)
    del records["pruned", 1337]
    found = table(records, one)
    assert found.seeds == [1338]
    assert found.summary.loc[("plain", "perplexity"), "mean"] == pytest.approx(math.exp(3.02))


def test_shared_devices_have_no_times_and_other_windows_no_comparison(records):
    records["frozen", 1337]["shared"] = True
    times = table(records).summary.loc[("cold", "minutes")]
    assert (times["seeds"], times["mean"]) == (1, 1.5)
    records = {key: value for key, value in records.items() if key[1] == 1337}
    records["frozen", 1337]["windows_hash"] = "other"
    with pytest.raises(CompareError, match="held-out windows"):
        _ = table(records).summary


@pytest.mark.parametrize("name", all_recipes())
def test_a_recipe_names_arms_metrics_and_rows_that_there_are(name):
    found = all_recipes()[name]
    assert set(found.metrics) | set(found.headline) <= METRICS.keys()
    labels = [row.label for row in found.rows]
    assert len(set(labels)) == len(labels)
    shown = {row.arm for row in found.rows}
    compared = {arm for row in found.rows for arm in (row.against, *row.companions) if arm}
    assert compared <= shown  # their own references are those of their rows
    places = [place for f in found.figures for ls in f.panels.values() for t in ls.values() for place in t.values()]
    assert {arm for arm, _ in places} <= shown
    assert {metric for _, metric in places} <= set(found.metrics)
    assert name in RECIPES_PAGE


def test_a_number_names_the_recipes_of_its_line_in_the_document_and_runs_no_others():
    lines = re.findall(r"^\| ((?:Table|Figure) \d+), `(\S+)` \|.*\| (.*`.*) \|$", RECIPES_PAGE, re.MULTILINE)
    assert len(lines) > 30
    for number, label, cell in lines:
        own, of_number = ({each.name for each in recipes_for(word)} for word in (label, number))
        assert own <= of_number
        assert own <= {*re.findall(r"`(\w+)`", cell)}, number
    # Three quarters of its tokens are ours, past the paper's table.
    assert "better" not in {each.name for each in recipes_for("table-2")}


def test_committed_results_are_shown_at_the_scale_that_has_most_of_them(tmp_path, capsys):
    words = ["table-12", "--show", "--out"]
    assert main([*words, str(ROOT / "results"), "--tables", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Here: 34M parameters, 75M tokens, seeds 1337, 1338, 1339." in shown
    assert re.search("Other scales .*: .*small-75M-controls, .*124m-84M", shown)
    assert f"{tmp_path}/small-75M-fixed_token_controls.tex" in shown
    assert (tmp_path / "small-75M-fixed_token_controls.tex").read_text().count("toprule") == 2
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "nothing to show" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["table-8", "--scale", "smoke", "--out", str(tmp_path / "file" / "runs")]) == 1
    assert "Not a directory" in capsys.readouterr().err
