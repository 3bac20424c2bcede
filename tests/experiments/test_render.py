import csv
import io
import math

import pytest

from saf.errors import CompareError
from saf.experiments.execution import execute
from saf.experiments.render import render
from saf.records.files import read_json, write_json


def carry_out(plan, store, trainer):
    execute(plan, store, store.folder, say=lambda text: None, launch=trainer)


def test_ratios_are_taken_in_each_seed_before_the_mean(recipe, make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    losses = {("ordinary", 1): 3.0, ("ordinary", 2): 3.5, ("a", 1): 3.01, ("a", 2): 3.53, ("b", 1): 3.1, ("b", 2): 3.6}
    trainer.losses = {made.arms["made_up", *arm]: [loss, loss] for arm, loss in losses.items()}
    carry_out(made, store, trainer)
    table = render("made_up", recipe, made, store)
    first, second = (100 * math.expm1(change) for change in (0.01, 0.03))
    value = table.values["a"]["delta"]
    assert value.mean == pytest.approx((first + second) / 2, rel=1e-4)
    assert value.error == pytest.approx(abs(first - second) / 2, rel=1e-4), "sd of two over sqrt(2)"
    assert table.values["b"]["difference"].mean == pytest.approx(
        50 * (math.expm1(0.09) + math.expm1(0.07)), rel=1e-4
    ), "the difference is taken from the arm that it is against"
    assert table.values["ordinary"]["delta"] is None


def test_one_seed_has_the_interval_of_its_windows(recipe, make_plan, store, trainer):
    made = make_plan(arms=("a",))
    trainer.losses = {
        made.arms["made_up", "ordinary", 1]: [3.0] * 50,
        made.arms["made_up", "a", 1]: [3.0 + 0.001 * (window % 5) for window in range(50)],
    }
    carry_out(made, store, trainer)
    value = render("made_up", recipe, made, store).values["a"]["delta"]
    low, high = value.interval
    assert value.error is None
    assert low < 100 * math.expm1(0.002) < high
    # Standard error of the mean of 50 draws from 0 to 4 thousandths: sqrt(2)/sqrt(50) thousandths.
    assert high - low == pytest.approx(2 * 1.96 * 0.1 * math.sqrt(2 / 50), rel=0.15)


def test_every_form_holds_the_numbers_beside_the_papers(recipe, make_plan, store, trainer, tmp_path):
    made = make_plan(arms=("a",))
    carry_out(made, store, trainer)
    table = render("made_up", recipe, made, store)
    files = {path.suffix: path for path in table.write(tmp_path / "out")}
    markdown, latex = files[".md"].read_text(), files[".tex"].read_text()
    assert "paper's change" in markdown
    assert "+1.0" in markdown
    assert "| b | not run |" in markdown
    assert r"\toprule" in latex
    assert r"\%" in latex
    assert "%" not in latex.replace(r"\%", "").replace("% ", "")
    assert "<table>" in files[".html"].read_text()
    lines = list(csv.DictReader(io.StringIO(files[".csv"].read_text())))
    assert [line["paper"] for line in lines if line["arm"] == "a"] == ["", "+1.0", ""]
    assert float(lines[0]["mean"]) == table.values["ordinary"]["perplexity"].mean
    assert read_json(files[".json"])["arms"]["a"]["delta"]["seeds"] == 1


def test_a_tree_that_no_commit_holds_makes_a_draft(recipe, make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    assert not render("made_up", recipe, made, store).drafts
    path = store.record_file(made.arms["made_up", "a", 1])
    record = read_json(path)
    record["provenance"]["commit"] += "+"
    write_json(path, record)
    assert "DRAFT: 1 of 3" in render("made_up", recipe, made, store).table().notes[0]


def test_runs_of_different_windows_do_not_stand_in_one_table(recipe, make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    path = store.record_file(made.arms["made_up", "a", 1])
    write_json(path, {**read_json(path), "windows_hash": "others"})
    with pytest.raises(CompareError, match="different held-out windows"):
        render("made_up", recipe, made, store)
