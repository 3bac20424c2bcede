from dataclasses import replace

import pytest

from saf.errors import InputError
from saf.experiments.measurement import Checkpoint, Measurement, RecordOf
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import notes_of_data, plan
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
        (
            lambda r: plan({"x": r}, SCALES["smoke"], data="", seeds=(3, -1)),
            r"from 0 to 2\^63 - 1; got -1: name another",
        ),
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


def test_the_clocks_of_arms_at_matched_time_and_of_their_reference_must_be_undisturbed(recipe, make_plan):
    reference = Arm(name="reference", reference=None)
    timed = Arm(name="timed", parent="reference", match="reference", settings={"freeze.rate": 0.25})
    told = Arm(
        name="told",
        parent="ordinary",
        match="ordinary",
        settings={"freeze.rate": 0.5, "match_speed": 1.1, "match_speed_source": "a pair", "match_clock": "everything"},
    )
    clocked = replace(recipe, arms=(*recipe.arms, reference, timed, told))
    made = make_plan(one=clocked, own_clocks=True)
    found = {arm for (_, arm, _), key in made.arms.items() if key in made.clocks}
    assert found >= {"timed", "reference"}
    assert not make_plan(one=clocked).clocks, "nor has the smoke scale clocks of its own"
    other = make_plan(one=replace(recipe, arms=(*recipe.arms, told)))
    assert not other.clocks, "a speed that is told needs no clock"


def test_an_unknown_arm_or_moment_is_named(recipe, make_plan):
    with pytest.raises(InputError, match="no arm 'ordinry'; did you mean 'ordinary'"):
        make_plan(arms=("ordinry",))
    arm = Arm(name="late", parent="ordinary", at=0.3)
    with pytest.raises(InputError, match=r"late goes on from 0\.3 of its parent's updates; ordinary keeps 0\.25"):
        make_plan(other=Recipe(title="x", source=recipe.source, arms=(recipe.arms[0], arm), columns=()))


def test_a_file_without_a_recipe_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("RECIPE = 3\n")
    with pytest.raises(InputError, match=r"empty\.py is no recipe"):
        open_recipes(folder=tmp_path)


def with_long_arms(recipe):
    """The recipe with two more arms at 16K, and measurements of both contexts."""
    ends = {name: Checkpoint(name, 1.0) for name in ("a", "long a")}
    return replace(
        recipe,
        arms=(
            *recipe.arms,
            Arm(name="long", context=16_384, reference=None),
            Arm(name="long a", context=16_384, parent="long", reference="long", settings={"freeze.rate": 0.25}),
        ),
        measurements=(
            *(Measurement(name=f"of {name}", does="analyze profiles", on=(at,)) for name, at in ends.items()),
            Measurement(name="more", does="analyze partial-spearman", on=(RecordOf("of long a"),)),
        ),
    )


def test_tokens_too_few_for_a_context_leave_its_arms_out_and_no_others(recipe):
    scale, recipes = SCALES["small"].resized(4_000_000), {"x": with_long_arms(recipe)}
    made = plan(recipes, scale, data="")
    assert {arm for _, arm, _ in made.arms} == {"ordinary", "a", "b"}
    assert {run.updates for run in made.runs.values()} == {61}
    assert "x, left out because --tokens 4,000,000 leaves 31 updates of 65,536 tokens at 16,384" in made.notes[0]
    assert made.notes[0].endswith("name more: long.")
    assert made.notes[1] == "x, left out because it needs long: long a."
    assert {each.title for each in plan_measurements(recipes, made).planned.values()} == {"x/of a, seed 1337"}
    assert made.notes[2:] == [
        "x, not measured because it reads long a, which is left out: of long a.",
        "x, not measured because it reads of long a, which is left out: more.",
    ]
    with pytest.raises(InputError, match=r"x/long a cannot be run as the scale was changed: it needs long"):
        plan(recipes, scale, data="", arms=("long a",))
    with pytest.raises(InputError, match="nothing is left to run: --tokens 4,000,000 leaves 31 updates"):
        plan({"x": replace(recipe, arms=recipes["x"].arms[3:])}, scale, data="")


def test_every_recipe_that_trains_can_be_resized_and_no_other(tmp_path):
    scale = SCALES["small"].resized(4_000_000)
    for name, recipe in open_recipes().items():
        if recipe.arms:
            made = plan({name: recipe}, scale, data="", seeds=(1,))
            assert not set(made.runs) & set(plan({name: recipe}, SCALES["small"], data="", seeds=(1,)).runs), name
            plan_measurements({name: recipe}, made)
        else:
            with pytest.raises(InputError, match="--tokens 4M has no effect where nothing is trained; leave it out"):
                plan({name: recipe}, scale, data="")


def test_a_plan_says_that_its_data_are_few_or_of_another_vocabulary(recipe):
    made = plan({"x": recipe}, SCALES["small"], data="")
    (read,) = notes_of_data(made, tokens=1_000_000, vocabulary=16_384)
    assert "has 1,000,000 tokens and the longest run trains on 231,997,440, so that it reads each 232 times" in read
    assert "(--tokens)" in read
    assert not notes_of_data(made, tokens=60_000_000, vocabulary=16_384)
    (other,) = notes_of_data(made, tokens=10**9, vocabulary=50_257)
    assert "a vocabulary of 50,257 tokens where the scale 'small' means 16,384" in other
    paper = plan({"x": recipe}, SCALES["paper"], data="")
    assert not notes_of_data(paper, tokens=10**10, vocabulary=50_257), "GPT-2's, which the scale rounds up"
