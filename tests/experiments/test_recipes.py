import re
from pathlib import Path

import pytest

from saf.cli import analyze, bench, main
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
        classes = bench.COMMANDS if command == "bench" else analyze.COMMANDS
        words = [str(Path("folder"))] * len(each.on)
        for name, value in each.settings.items():
            # Heads are read from a run's events when the command begins.
            words += flag_words(name, "0:1" if isinstance(value, Given) else value)
        classes[kind].from_words([*words, "--out", "record.json"])


@pytest.mark.parametrize("name", RECIPES)
def test_columns_exist_and_the_papers_numbers_are_of_columns_shown(name):
    recipe = RECIPES[name]
    assert set(recipe.headline) <= set(recipe.columns) <= set(COLUMNS)
    for arm in recipe.arms:
        assert set(arm.paper) <= set(recipe.columns), arm.name
        assert not {"difference", "relative"} & set(arm.paper) or arm.against


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_numbers_are_in_its_text(name, shared):
    (paper,) = (shared / "seeds").glob("*.txt")
    text = paper.read_text()
    recipe = RECIPES[name]
    for label in sources_of(recipe):
        assert f"label{{{label}}}" in text
    for arm in recipe.arms:
        for number in (each for numbers in arm.paper.values() for each in numbers.split(", ")):
            plain = number.replace("\u2212", "-").replace(" ± ", r"\pm").replace("%", "")
            found = [plain, plain.lstrip("+-"), _in_seconds(plain)]
            assert any(_stands_in(text, form) for form in found if form), number
    for number in (number for each in recipe.measurements for number in each.numbers):
        for plain in re.findall(r"\d[\d,.]*\d|\d", number.paper or ""):
            assert _stands_in(text, plain), f"{number.title}: {number.paper}"


CELLS = {
    # Of a table of the paper: the recipes that have its cells, and the columns of these, counted from 0.
    "tab:main-results": (("contexts", "training_systems", "downstream"), (2, 3, 4, 5, 6, 7)),
    "tab:downstream-details": (("downstream",), (2, 3, 4, 5, 6)),
    "tab:pruning-additional-training": (("later_intervention", "pruning_downstream"), (1, 2, 3, 4)),
    "tab:pruning-prefill": (("pruning_costs",), (3, 4)),
    "tab:gradient-errors": (("implementation",), (1, 2, 3, 4)),
}
PROSE = {
    # What the paper's text says beside its tables.
    "pruning_costs": ("0.933", "0.877"),
    "recovery": ("2.72", "7.99", "0.0061", "0.0123", "0.0062", "0.0086"),
    "later_intervention": ("22.683", "23.049"),
    "implementation": ("7.48e-7", "4.45e-3"),
    "selectors": ("0.126",),
    "joint_cost": ("0.126", "4.136", "5.092"),
    "trainability": ("0.010 ± 0.006",),
}


def quoted(name) -> str:
    """All that a recipe has of the paper."""
    recipe = RECIPES[name]
    papers = [text for arm in recipe.arms for text in arm.paper.values()]
    papers += [number.paper for each in recipe.measurements for number in each.numbers if number.paper]
    return "; ".join(papers).replace("\u2212", "-")


@pytest.mark.parametrize("label", CELLS)
def test_recipes_have_the_cells_of_the_papers_tables(label, shared):
    (paper,) = (shared / "seeds").glob("*.txt")
    body = paper.read_text().partition(f"\\label{{{label}}}")[2].partition("\\end{table")[0]
    names, columns = CELLS[label]
    has, seen = "; ".join(map(quoted, names)), 0
    for row in (line.split("&") for line in body.splitlines() if line.count("&") >= max(columns)):
        for cell in (row[column] for column in columns):
            cell = (
                cell.replace(r"\pm", " ± ")
                .replace(r"\times10^{", "e")
                .replace(r"1.000$\times$", "")
                .replace("0.00\\%", "")
            )
            for number in re.findall(r"\d+\.\d+(?: ± \d+\.\d+|e-\d)?", cell):
                seen += 1
                assert _stands_in(has, number), f"no recipe has {number} of {label}"
    assert seen > 8


@pytest.mark.parametrize("name", PROSE)
def test_recipes_have_what_the_papers_text_says_beside_its_tables(name):
    for number in PROSE[name]:
        assert _stands_in(quoted(name), number), number


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


def _stands_in(text: str, number: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text) is not None


def _in_seconds(number: str) -> str | None:
    """The paper gives some times in seconds that our tables give in milliseconds: 2159 ± 12 is 2.159 ± 0.012."""
    parts = number.split(r"\pm")
    return r"\pm".join(f"{int(part) / 1e3:.3f}" for part in parts) if all(p.isdigit() for p in parts) else None


def test_what_cannot_run_is_said_before_anything_runs(tmp_path, capsys):
    assert main(["run", "timing", "--store", str(tmp_path)]) == 2
    assert "needs --data" in capsys.readouterr().err
    assert main(["run", "timing", "--scale", "paper", "--dry-run"]) == 0
    assert "13 runs" in capsys.readouterr().out, "the paper's table is of one seed"
    assert main(["run", "timing", "--scale", "paper", "--dry-run", "--seeds", "1337", "1338", "1339"]) == 0
    assert "39 runs" in capsys.readouterr().out
    assert main(["run", "timing", "--jobs", "0", "--scale", "smoke", "--store", str(tmp_path / "s")]) == 2
