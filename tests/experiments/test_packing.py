import json
from dataclasses import replace

import pytest

from saf.cli import main
from saf.errors import InputError
from saf.experiments.packing import RESERVE, Packing, all_lost, length, packing_table
from saf.experiments.plan import plan
from saf.experiments.rates import LATER_EVENT, Measured
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import SCALES, read_tokens


def nothing_lost(run):
    return {}


def titles(command):
    return [item.run.tables[0][1] for item in command]


@pytest.fixture
def family(recipe):
    """A parent and six arms of half its length."""
    arms = tuple(Arm(name=f"arm {number}", parent="ordinary", settings={"seed": number}) for number in range(6))
    made = Recipe(title="Made up", source=recipe.source, arms=(recipe.arms[0], *arms), columns=())
    return plan({"family": made}, SCALES["small"], data="data")


def seconds(run):
    """A parent takes 240 s, an arm 120."""
    return 240.0 if run.parent is None else 120.0


def test_commands_begin_no_run_that_would_not_end(family):
    packing = Packing(seconds=seconds, command=600 + RESERVE)
    (stay,) = packing.stays(list(family.runs.values()), family, nothing_lost)
    first, second = stay.commands
    assert titles(first) == ["ordinary", "arm 0", "arm 1", "arm 2"]
    assert titles(second) == ["arm 3", "arm 4", "arm 5"]
    assert stay.seconds == length(first) + length(second) == 600 + 360
    assert not any(item.stops for item in first + second)


def test_a_run_longer_than_a_command_stops_and_goes_on(family):
    packing = Packing(seconds=seconds, command=150 + RESERVE)
    (stay,) = packing.stays(list(family.runs.values()), family, nothing_lost)
    (begun,), (finished,) = stay.commands[:2]
    assert (begun.seconds, begun.stops) == (150, True)
    assert (finished.run.key, finished.seconds, finished.stops) == (begun.run.key, 90, False)
    assert all(length(command) <= 150 for command in stay.commands)


def test_other_gpus_go_on_beside_a_run_that_stops(recipe):
    """Two seeds: both parents are longer than a command, each begins first on a GPU; then short arms fill both."""
    two = plan({"made_up": recipe}, SCALES["small"], data="data", seeds=(1, 2))
    (stay,) = Packing(seconds=seconds, lanes=2, command=200 + RESERVE).stays([*two.runs.values()], two, nothing_lost)
    told = [[(item.lane, item.begins, item.seconds, item.stops) for item in command] for command in stay.commands]
    assert told[0] == [(0, 0, 200, True), (1, 0, 200, True)]
    assert told[1] == [(0, 0, 40, False), (1, 0, 40, False), (0, 40, 120, False), (1, 40, 120, False)]
    assert told[2] == [(0, 0, 120, False), (1, 0, 120, False)]
    long = next(iter(two.runs))

    def one_long(run):
        return 500.0 if run.key == long else seconds(run) / 2

    (stay,) = Packing(seconds=one_long, lanes=2, command=200 + RESERVE).stays([*two.runs.values()], two, nothing_lost)
    first = [(titles([item])[0], item.run.seed, item.lane, item.stops) for item in stay.commands[0]]
    assert first == [("ordinary", 1, 0, True), ("ordinary", 2, 1, False), ("a", 2, 1, False)]


def test_a_family_larger_than_a_budget_trains_its_parent_again(family):
    packing = Packing(seconds=seconds, budget=600)
    runs = list(family.runs.values())
    one, two = packing.stays(runs, family, nothing_lost)
    assert [run.tables[0][1] for run in one.runs] == ["ordinary", "arm 0", "arm 1", "arm 2"]
    assert [run.tables[0][1] for run in two.runs] == ["ordinary", "arm 3", "arm 4", "arm 5"]
    assert not one.again
    assert two.again == {runs[0].key}
    assert all(stay.seconds <= 600 for stay in (one, two))


def test_a_parent_that_the_store_has_takes_no_time_and_a_lost_one_does(family):
    runs = list(family.runs.values())
    packing = Packing(seconds=seconds, budget=800)
    (kept,) = packing.stays(runs[1:], family, nothing_lost)
    assert kept.seconds == 6 * 120
    lost, more = packing.stays(runs[1:], family, all_lost)
    assert lost.runs[0].key == runs[0].key
    assert len(lost.runs) + len(more.runs) == 6 + 2
    assert runs[0].key in lost.again


def test_small_families_fill_one_budget(recipe):
    made = plan({"one": recipe}, SCALES["small"], data="data", seeds=(1, 2, 3))
    stays = Packing(seconds=seconds, budget=1_000).stays(list(made.runs.values()), made, nothing_lost)
    assert [sorted({run.seed for run in stay.runs}) for stay in stays] == [[1, 2], [3]]


def test_two_gpus_begin_arms_together_once_their_parent_ended(family):
    (stay,) = Packing(seconds=seconds, lanes=2).stays(list(family.runs.values()), family, nothing_lost)
    (command,) = stay.commands
    assert {item.begins for item in command[1:3]} == {240.0}
    assert {item.lane for item in command[1:3]} == {0, 1}
    assert stay.seconds == 240 + 3 * 120
    shown = packing_table([stay], Packing(seconds=seconds, lanes=2), family)
    assert "GPU" in shown.columns
    assert "budget" not in shown.columns


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"budget": 300.0}, "takes 6m 00s with the runs that it goes on from"),
        ({"budget": 0.0}, "a budget must be above 0"),
        ({"command": 20.0}, "leaves no time beside"),
    ],
)
def test_limits_that_leave_no_time_are_refused(family, limits, expected):
    with pytest.raises(InputError, match=expected):
        Packing(seconds=seconds, **limits).stays(list(family.runs.values()), family, nothing_lost)


@pytest.mark.parametrize(("scale", "advice"), [("small", ", or ask for shorter runs (--tokens)"), ("smoke", "")])
def test_shorter_runs_are_advised_where_a_scale_has_them(recipe, scale, advice):
    made = plan({"one": recipe}, SCALES[scale], data="data", seeds=(1,))
    with pytest.raises(InputError) as caught:
        Packing(seconds=seconds, budget=300.0).stays(list(made.runs.values()), made, nothing_lost)
    assert str(caught.value).endswith(f"a budget of 5m 00s; allow more minutes{advice}")


def test_a_run_of_several_events_is_compiled_by_layers(recipe):
    """Its first event compiles a model's layouts, later ones new layouts alone; runs beside it are those of others."""
    gradual = {"freeze.rate": 0.25, "schedule": "gradual", "schedule.gradual.groups": 10}
    several = replace(recipe, arms=(*recipe.arms, Arm(name="gradual", parent="ordinary", settings=gradual)))
    made = plan({"several": several, "one": recipe}, SCALES["small"], data="", seeds=(1,))
    run = made.runs[made.arms["several", "gradual", 1]]
    assert run.settings["compile"] == run.flags["compile"] == "layers"
    for arm in recipe.arms:
        assert made.arms["several", arm.name, 1] == made.arms["one", arm.name, 1]
        assert "compile" not in made.runs[made.arms["one", arm.name, 1]].settings
    rates = SCALES["small"].rates
    updates = run.updates_to_do * run.flops_per_update / rates.flops
    assert run.seconds(rates) == pytest.approx(rates.start + updates + (2 + 9 * LATER_EVENT) * rates.compilation)
    whole = replace(run, settings={**run.settings, "compile": "auto"})
    assert whole.seconds(rates) == pytest.approx(rates.start + updates + 11 * rates.compilation)
    off = replace(run, settings={**run.settings, "compile": "off"})
    assert off.seconds(rates) == pytest.approx(rates.start + rates.uncompiled * updates)
    smallest = plan({"several": several}, SCALES["smoke"], data="", seeds=(1,), arms=("gradual",))
    assert all("compile" not in run.settings for run in smallest.runs.values()), "where nothing is compiled"


def test_shorter_runs_are_runs_of_their_own(recipe):
    small = SCALES["small"]
    shorter = small.resized(read_tokens("60M"))
    assert shorter.name == "small-60M"
    updates = {context: settings["updates"] for context, settings in shorter.contexts.items()}
    assert updates == {1_024: 916, 4_096: 916, 8_192: 916, 16_384: 458}
    one, other = (plan({"x": recipe}, scale, data="", seeds=(1,)) for scale in (small, shorter))
    assert not set(one.runs) & set(other.runs)
    assert small.resized(None) is small


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda: SCALES["small"].resized(1_000), "leaves 0 updates of 65,536 tokens"),
        (lambda: SCALES["paper"].resized(60_000_000), "one length; leave --tokens out, or name small"),
        (lambda: read_tokens("sixty"), "such as 60M"),
        (lambda: read_tokens("nan"), "such as 60M"),
        (lambda: Measured(tokens_per_second=0.0), "above 0"),
        (lambda: Measured(compile_seconds=-1.0), "at least 0"),
    ],
)
def test_sizes_and_rates_that_cannot_be_used_are_refused(act, expected):
    with pytest.raises(InputError, match=expected):
        act()


def test_named_rates_take_the_place_of_the_scales():
    rates = SCALES["small"].rates
    assert Measured().applied(rates, flops_per_token=3e8) is rates
    named = Measured(tokens_per_second=1e6, start_seconds=3.0).applied(rates, flops_per_token=3e8)
    assert named == replace(rates, flops=3e14, start=3.0, source="flops, start as named")


def test_a_plan_counts_parents_that_are_trained_again_beside_its_runs(tmp_path, capsys):
    words = ["run", "later_intervention", "--dry-run", "--store", str(tmp_path), "--budget-minutes", "20"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    trained = [key for stay in told["budgets"] for command in stay for key, _ in command]
    assert told["runs"] == len(set(trained)) < len(trained) == told["runs"] + told["again"]
    assert main(words) == 0
    shown, runs = " ".join(capsys.readouterr().out.split()), told["runs"]
    assert f"{runs} of {runs} runs, and {told['again']} parents again for their checkpoints, to train, 0 done;" in shown
