from dataclasses import replace

import pytest

from saf.errors import InputError
from saf.experiments.plan import plan
from saf.experiments.recipe import Arm, Recipe, open_recipes
from saf.experiments.scales import SCALES, scale_named


def test_parents_come_first_and_each_run_is_planned_once(recipe, make_plan):
    made = make_plan(seeds=(1, 2), one=recipe, two=recipe)
    assert len(made.runs) == 6, "three arms of two seeds, shared by both recipes"
    before = set()
    for run in made.runs.values():
        assert run.parent is None or run.parent in before
        before.add(run.key)
    assert made.arms["one", "a", 1] == made.arms["two", "a", 1] != made.arms["one", "a", 2]
    assert made.runs[made.arms["one", "a", 1]].tables == (("one", "a"), ("two", "a"))


def test_a_key_depends_on_what_decides_the_outcome_alone(recipe, make_plan):
    def key(settings, **changes):
        arm = Arm(name="a", parent="ordinary", settings=settings, **changes)
        other = Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], arm), columns=())
        return make_plan(other=other).arms["other", "a", 1]

    usual = make_plan().arms["made_up", "a", 1]
    assert key({"freeze.rate": 0.25}) == usual
    assert key({"freeze.pattern": "mean", "freeze.rate": 0.25}) == usual, "a default written down"
    assert key({"freeze.rate": 0.25, "log_every": 3}) == usual, "what is shown decides nothing"
    assert key({"freeze.rate": 0.25, "freeze.pattern": "sharp_mean"}) != usual
    assert key({"freeze.rate": 0.25}, at=0.25) != usual
    elsewhere = plan({"made_up": recipe}, SCALES["smoke"], data="other data", seeds=(1,))
    assert elsewhere.arms["made_up", "a", 1] != usual


def test_chosen_arms_bring_what_they_need(make_plan):
    assert {arm for _, arm, _ in make_plan(arms=("a",)).arms} == {"ordinary", "a"}
    assert {arm for _, arm, _ in make_plan(arms=("b",)).arms} == {"ordinary", "a", "b"}, "b is compared with a"


def test_a_table_of_fewer_seeds_is_run_with_as_many_unless_others_are_named(recipe):
    recipes = {"all": recipe, "one": replace(recipe, seeds=1)}
    scale = SCALES["paper"]
    made = plan(recipes, scale, data="")
    assert {(name, seed) for name, _, seed in made.arms} == {("one", 1337), *(("all", seed) for seed in scale.seeds)}
    assert {seed for _, _, seed in plan(recipes, scale, data="", seeds=(5, 6)).arms} == {5, 6}


def test_predictions_count_the_updates_that_are_a_runs_own(recipe):
    made = plan({"x": recipe}, SCALES["paper"], data="", seeds=(1,))
    ordinary, arm = (made.runs[made.arms["x", name, 1]] for name in ("ordinary", "a"))
    assert (ordinary.updates_to_do, arm.updates_to_do, arm.step) == (5_000, 2_500, 2_500)
    assert ordinary.tokens_per_update == 4_096 * 8 * 15
    # 6 FLOPs for each of 123.6M weights in products, and 6 for each of 12 * 768 * 4,096 weighted values, a token.
    flops = 2.4576e9 * (6 * (12 * 12 * 768**2 + 50_304 * 768) + 6 * 12 * 768 * 4_096)
    rates = SCALES["paper"].rates
    expected = flops / 4e14 + rates.start + rates.compilation
    assert ordinary.seconds(rates) == pytest.approx(expected, rel=1e-6)
    assert ordinary.seconds(rates, done=5_000) == rates.start + rates.compilation
    assert arm.seconds(rates) == pytest.approx(flops / 8e14 + rates.start + 2 * rates.compilation, rel=1e-6)
    assert ordinary.predicted_bytes == pytest.approx(12.52 * 2**30, rel=0.03), "measured: 12.52 GiB"


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda r: plan({"x": r}, SCALES["smoke"], data="", seeds=(1, 2, 1)), "each seed is named once; got 1, 2, 1"),
        (lambda r: open_recipes(("timin",)), "did you mean 'timing'"),
        (lambda r: open_recipes(folder=r), "holds no recipes"),
        (lambda r: scale_named("smal"), "did you mean 'small'"),
        (lambda r: Recipe(title="t", source=None, arms=(Arm(name="a"),), columns=()), "compared with 'ordinary'"),
        (lambda r: Recipe(title="t", source=None, arms=(Arm(name="a", parent="b"),), columns=()), "goes on from 'b'"),
        (lambda r: Recipe(title="t", source=None, arms=(Arm(name="a", reference=None),) * 2, columns=()), "two arms"),
        (
            lambda r: Recipe(title="t", source=None, arms=(Arm(name="a", match="a", reference=None),), columns=()),
            "gets the time of 'a'",
        ),
        (
            lambda r: Recipe(title="t", source=None, arms=(Arm(name="a", heads="a", reference=None),), columns=()),
            "has the heads of 'a'",
        ),
        (
            lambda r: Recipe(
                title="t",
                source=None,
                arms=(Arm(name="a", reference=None), Arm(name="b", heads="a", settings={"freeze.rate": 0.5})),
                columns=(),
            ),
            r"'b' has the heads of 'a'; leave freeze\.rate out",
        ),
        (lambda r: SCALES["smoke"].flags(77), "no runs of 77 tokens"),
    ],
)
def test_what_is_not_there_is_named(act, expected, tmp_path):
    with pytest.raises(InputError, match=expected):
        act(tmp_path)


def test_an_unknown_arm_or_moment_is_named(recipe, make_plan):
    with pytest.raises(InputError, match="no arm 'ordinry'; did you mean 'ordinary'"):
        make_plan(arms=("ordinry",))
    arm = Arm(name="late", parent="ordinary", at=0.3)
    with pytest.raises(InputError, match=r"late goes on from 0\.3 of its parent's updates; runs keep 0\.25"):
        make_plan(other=Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], arm), columns=()))


def test_a_file_without_a_recipe_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("RECIPE = 3\n")
    with pytest.raises(InputError, match=r"empty\.py is no recipe"):
        open_recipes(folder=tmp_path)
