import re
from pathlib import Path

import pytest
import tyro

from experiments.analyses import ANALYSES
from saf.cli import bench, main
from saf.experiments.columns import COLUMNS
from saf.experiments.launching import flag_words
from saf.experiments.measuring import Given, plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import open_recipes
from saf.experiments.scales import SCALES
from saf.freezing.config import FreezeConfig
from saf.schedules import SCHEDULES
from saf.tasks import FinetuneSettings, MQARSettings
from saf.train.config import TrainConfig

RECIPES = open_recipes()


def as_config(flags, *, matched: bool = False) -> TrainConfig:
    """The settings of a run as Python has them, so that every name and value is checked."""
    values = {name: value for name, value in flags.items() if "." not in name}
    freeze = {name.removeprefix("freeze."): value for name, value in flags.items() if name.startswith("freeze.")}
    mqar = {name.removeprefix("mqar."): value for name, value in flags.items() if name.startswith("mqar.")}
    flags = {name: value for name, value in flags.items() if not name.startswith("mqar.")}
    kind = values.pop("schedule", None)
    of_schedule = {
        name.rpartition(".")[2]: value for name, value in flags.items() if name.startswith(f"schedule.{kind}.")
    }
    assert len(values) + len(freeze) + len(of_schedule) + (kind is not None) == len(flags)
    if "freeze_at" in values:
        kind, of_schedule = "one_time", {"at": values.pop("freeze_at")}
    if kind is not None:
        values["schedule"] = SCHEDULES[kind](**of_schedule)
    values |= {"parent": "parent", "match_time": "reference"} if matched else {}
    if "task" in values:
        values.pop("epochs", None)
        own = {name: values.pop(name) for name in ("max_tokens", "most_examples") if name in values}
        values |= {"parent": "parent", "fresh": True, "mqar": MQARSettings(**mqar)}
        values |= {} if values["task"] == "mqar" else {"finetuning": FinetuneSettings(**own)}
    return TrainConfig(data="data", out="out", freeze=FreezeConfig(**freeze) if freeze else None, **values)


@pytest.mark.parametrize("scale", SCALES)
def test_every_recipe_plans_runs_whose_settings_can_be_used(scale):
    made = plan(RECIPES, SCALES[scale], data="data", seeds=(1,))
    assert made.runs
    steps = {(run.parent, run.step) for run in made.runs.values() if run.step is not None}
    for run in made.runs.values():
        settings = as_config(run.settings, matched=run.match is not None)
        assert settings.updates == run.updates
        for step in {step for parent, step in steps if parent == run.key}:
            assert step in settings.branch_updates or step == run.updates, run.title


def test_no_run_of_the_smoke_scale_depends_on_a_clock():
    """Hundredths of a second are all that it would have, which a busy machine takes to load a run."""
    made = plan(RECIPES, SCALES["smoke"], data="data", seeds=(1,))
    assert not made.clocks
    timed = {arm: made.runs[key].settings for (of, arm, _), key in made.arms.items() if of == "later_intervention"}
    given = {arm: timed[arm]["match_speed"] for arm in timed if arm.endswith(", matched time")}
    assert given == {"ordinary, matched time": 1.0, "pruning + variance, matched time": 1.25}
    assert timed["ordinary, matched time"]["match_speed_source"] == "set for the smoke scale, not measured"


def test_arms_that_take_the_heads_of_another_one_begin_where_it_began():
    for name, recipe in RECIPES.items():
        arms = {arm.name: arm for arm in recipe.arms}
        for arm in recipe.arms:
            if arm.heads is not None and arm.parent is not None:
                assert arms[arm.heads].parent == arm.parent, (name, arm.name)


CONTROLS = {"fixed_token_controls", "intervention_costs", "later_intervention", "matched_time", "pruning_downstream"}
CONTROLS |= {"recall", "recall_patterns", "trainability"}


def test_the_papers_controls_calibrate_on_held_out_text_and_its_other_runs_on_training_text():
    made = plan(RECIPES, SCALES["paper"], data="data", seeds=(1,))
    for run in made.runs.values():
        if run.work is None and any(name.startswith("freeze.") for name in run.settings):
            of = {recipe in CONTROLS for recipe, _ in run.tables}
            assert of == {run.settings["calibration_source"] == "calibration"}, run.title


@pytest.mark.parametrize("scale", SCALES)
def test_every_measurement_is_a_command_whose_settings_can_be_used(scale):
    measured = {name: recipe for name, recipe in RECIPES.items() if recipe.measurements}
    made = plan(measured, SCALES[scale], data="data", seeds=(1,))
    for each in plan_measurements(measured, made).planned.values():
        command, kind = each.does.split()
        words = [str(Path("folder"))] * len(each.on)
        for name, value in each.settings.items():
            # Heads are read from a run's events when the command begins.
            words += flag_words(name, "0:1" if isinstance(value, Given) else value)
        words += ["--out", "record.json"]
        if command == "bench":
            bench.COMMANDS[kind].from_words(words)
        else:
            tyro.cli(ANALYSES[kind].Settings, args=list(map(str, words)))


@pytest.mark.parametrize("name", RECIPES)
def test_columns_exist_and_the_papers_numbers_are_of_columns_shown(name):
    recipe = RECIPES[name]
    assert set(recipe.headline) <= set(recipe.columns) <= set(COLUMNS)
    for arm in recipe.arms:
        assert set(arm.paper) <= set(recipe.columns), arm.name
        assert not {"difference", "relative"} & set(arm.paper) or arm.against


def test_the_paper_has_what_recipes_name_as_their_sources(shared):
    (paper,) = (shared / "seeds").glob("*.txt")
    text = paper.read_text()
    for name, recipe in RECIPES.items():
        assert all(f"label{{{label}}}" in text for label in sources_of(recipe)), name


@pytest.mark.parametrize("name", ["selectors", "joint_cost", "trainability"])
def test_the_papers_relative_differences_stand_under_percent_and_not_under_points(name):
    """The paper resamples perplexities against one another there: 24.052 is 0.010% below 24.055, not points."""
    numbers = {column: text for arm in RECIPES[name].arms for column, text in arm.paper.items()}
    assert numbers["relative"] in ("+0.126", "\u22120.010 ± 0.006")
    assert COLUMNS["relative"].title == "difference, %"


DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"


def listed() -> dict[str, set[str]]:
    """The recipes that the document names for each label of the paper."""
    rows = re.findall(r"^\| `((?:tab|fig):[\w-]+)` \|.*\|(.*)\|$", DOCUMENT.read_text(), flags=re.M)
    assert len(rows) == len(dict(rows)), "a label stands once"
    return {label: set(re.findall(r"`(\w+)`", names)) for label, names in rows}


def test_the_document_of_tables_names_every_recipe_where_it_belongs():
    found = listed()
    assert set().union(*found.values()) == set(RECIPES), "every recipe makes a table or figure"
    for name, recipe in RECIPES.items():
        for label in sources_of(recipe):
            if label.startswith(("tab:", "fig:")):
                assert name in found[label], f"docs/recipes.md does not name {name} beside {label}"


def test_the_document_has_every_table_and_figure_of_the_paper(shared):
    (paper,) = (shared / "seeds").glob("*.txt")
    assert set(listed()) == set(re.findall(r"\\label\{((?:tab|fig):[\w-]+)\}", paper.read_text()))


def sources_of(recipe) -> set[str]:
    """The labels that a recipe says it answers."""
    of_measurements = (each.source.label for each in recipe.measurements if each.source)
    return {recipe.source.label, *recipe.also, *of_measurements}


def test_what_cannot_run_is_said_before_anything_runs(tmp_path, capsys):
    assert main(["run", "timing", "--store", str(tmp_path)]) == 2
    assert "needs --data" in capsys.readouterr().err
    assert main(["run", "timing", "--scale", "paper", "--dry-run"]) == 0
    assert "13 runs" in capsys.readouterr().out, "the paper's table is of one seed"
    assert main(["run", "timing", "--scale", "paper", "--dry-run", "--seeds", "1337", "1338", "1339"]) == 0
    assert "39 runs" in capsys.readouterr().out
    assert main(["run", "timing", "--jobs", "0", "--scale", "smoke", "--store", str(tmp_path / "s")]) == 2
