from dataclasses import replace

from saf.experiments.document import render_document
from saf.experiments.execution import execute
from saf.experiments.measurement import Measurement
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import SCALES
from saf.experiments.store import Store
from saf.records.files import write_json
from saf.records.result import result_header
from tests.experiments.conftest import FACTS, SOURCE


def made(recipes, tmp_path, trainer, plan) -> str:
    """Carry out a plan in a store among the results, and return the document."""
    store = Store(tmp_path / "results" / "experiments").open(write=True)
    execute(plan, store, store.folder, say=lambda text: None, launch=trainer)
    return render_document(tmp_path / "results", tmp_path / "docs", recipes=recipes)["results.md"]


def test_stores_are_tables_of_the_arms_that_were_run(recipe, make_plan, trainer, tmp_path):
    plan = make_plan(arms=("a",))
    trainer.losses = {plan.arms["made_up", "a", 1]: [3.01, 3.21]}
    text = made({"made_up": recipe}, tmp_path, trainer, plan)
    assert "### made_up, smoke" in text
    assert "| a | 22.42" in text
    assert "| b |" not in text
    assert "Not run, 1 of 3 arms: b." in text
    assert "saf run made_up --scale smoke --store results/experiments --data DATA --seeds 1" in text
    assert plan.arms["made_up", "a", 1] not in text, "a record is no result of its own"


def test_what_trains_nothing_stands_once_without_a_length(trainer, tmp_path):
    """A store of runs of two lengths has one measurement that reads none, drawn; its command is quoted for a shell."""
    store = Store(tmp_path / "results" / "my store").open(write=True)
    measured = Measurement(name="two", does="analyze stability", on=("one", "another"))
    arms = tuple(Arm(name=name, reference=None, settings={"peak_lr": lr}) for name, lr in (("a", 1e-3), ("b", 1e-4)))
    recipe = Recipe(title="Made up", source=SOURCE, arms=arms, columns=("perplexity",))
    recipes = {"made_up": recipe, "timed": Recipe(title="Timed", source=SOURCE, measurements=(measured,))}
    for tokens in (60_000_000, 75_000_000):
        scale = SCALES["small"].resized(tokens)
        made = plan({"made_up": recipe}, scale, data="data", seeds=(1,))
        execute(made, store, store.folder, say=lambda text: None, launch=trainer)
    (key,) = plan_measurements(recipes, plan(recipes, SCALES["small"], data="data", seeds=(1,))).planned
    write_json(store.measurement_file(key), {**result_header("stability", {}), "key": key, **FACTS})
    written = render_document(tmp_path / "results", tmp_path / "docs", recipes=recipes)
    text = written["results.md"]
    assert "![two](images/my%20store-timed-two.svg)" in text
    assert "3 heads in both selections, of 4 and 4" in written["images/my store-timed-two.svg"]
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["### made_up, small-60M", "### timed, small", "### made_up, small-75M"]
    assert "saf run timed --scale small --store 'results/my store' --data DATA --seeds 1" in text
    assert "saf run made_up --scale small --tokens 75M --store 'results/my store' --data DATA --seeds 1" in text


def test_a_recipe_has_the_seeds_that_it_was_run_with(recipe, make_plan, trainer, tmp_path):
    arms = tuple(replace(arm, settings={**arm.settings, "peak_lr": 1e-4}) for arm in recipe.arms)
    recipes = {"made_up": recipe, "another": replace(recipe, arms=arms)}
    store = Store(tmp_path / "results" / "experiments").open(write=True)
    for name, seeds in (("made_up", (1, 2)), ("another", (2,))):
        plan = make_plan(seeds=seeds, **{name: recipes[name]})
        execute(plan, store, store.folder, say=lambda text: None, launch=trainer)
    text = render_document(tmp_path / "results", tmp_path / "docs", recipes=recipes)["results.md"]
    assert [line.split("--seeds ")[1] for line in text.splitlines() if line.startswith("saf run")] == ["1 2", "2"]
    assert "fewer seeds" not in text


def test_a_table_whose_runs_all_stand_in_another_one_is_left_out(recipe, make_plan, trainer, tmp_path):
    """Recipes share arms: of two with the same runs the first one stays."""
    fewer = replace(recipe, arms=recipe.arms[:2])
    plan = make_plan()
    text = made({"fewer": fewer, "made_up": recipe, "same": replace(recipe)}, tmp_path, trainer, plan)
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### made_up, smoke"]


def test_a_parent_alone_is_no_table(recipe, make_plan, trainer, tmp_path):
    plan = make_plan(arms=("a",))
    other = Recipe(
        title="Another", source=SOURCE, columns=("perplexity",),
        arms=(
            Arm(name="ordinary", reference=None, row=False),
            Arm(name="a", parent="ordinary", settings={"freeze.rate": 0.25}, row=False),
            Arm(name="c", parent="ordinary", settings={"freeze.rate": 0.1}),
        ),
    )  # fmt: skip
    lesser = replace(recipe, headline=("difference",))  # which no arm that was run has
    text = made({"made_up": recipe, "another": other, "lesser": lesser}, tmp_path, trainer, plan)
    assert "### made_up, smoke" in text
    assert "### another" not in text
    assert "### lesser" not in text


def test_arms_that_would_stand_beside_one_that_was_not_run_have_a_table(recipe, make_plan, trainer, tmp_path):
    """As those of the raw clock in a store that has none of the other one."""
    ordinary, tokens, b = recipe.arms
    arms = (ordinary, tokens, replace(b, beside={"tokens": tokens.name}))
    both = replace(recipe, arms=arms, headline=("delta",))
    plan = make_plan(made_up=both, arms=(tokens.name,))
    text = made({"made_up": both}, tmp_path, trainer, plan)
    assert "### made_up, smoke" in text
    assert f"| {tokens.name} |" in text


def test_the_summary_has_the_newer_of_two_trainings_at_matched_time(trainer, tmp_path):
    """The newer one lies in the folder that comes first."""
    plain = {"parent": "reference", "match": "reference"}
    arms = (
        Arm(name="reference", reference=None),
        Arm(name="ordinary", reference=None, **plain),
        Arm(name="a", settings={"freeze.rate": 0.25}, **plain),
    )
    recipe = Recipe(title="Made up", source=SOURCE, arms=arms, columns=("delta",), headline=("delta",))
    made = plan({"made_up": recipe}, SCALES["smoke"], data="data", seeds=(1,))
    for name, date, loss in (("last", "2026-01-01", 3.2), ("first", "2026-02-02", 3.1)):
        trainer.date = {"date": f"{date}T00:00:00+00:00"}
        trainer.losses = {made.arms["made_up", "a", 1]: [loss, loss]}
        store = Store(tmp_path / "results" / name).open(write=True)
        execute(made, store, store.folder, say=lambda text: None, launch=trainer)
    text = render_document(tmp_path / "results", tmp_path / "docs", recipes={"made_up": recipe})["results.md"]
    (row,) = [line for line in text.splitlines() if line.startswith("| perplexity, %, matched time |")]
    assert row.endswith("| [first](../results/first) |"), row
