"""Arms that are finetuned: which seed varies, what their command is told, and what stands in the table."""

import shutil

import pytest

from saf.errors import InputError
from saf.experiments.columns import AGAINST, OWN, REFERENCE, Row
from saf.experiments.examples import WHOLE, find_examples, work_of, write_smoke_examples
from saf.experiments.launching import words
from saf.experiments.plan import plan
from saf.experiments.recipe import Arm, Recipe, open_recipes
from saf.experiments.render import render
from saf.experiments.rows import Rows
from saf.experiments.scales import SCALES
from saf.experiments.store import data_of
from saf.train.checkpoint import step_name
from tests.experiments.conftest import SOURCE


@pytest.fixture
def files(tmp_path):
    return find_examples(write_smoke_examples(tmp_path / "tasks"))


def recipe_of(axis):
    """An ordinary and a frozen checkpoint, each finetuned on SST-2, the frozen one like the ordinary one."""
    common = {"task": "sst2", "axis": axis, "settings": {"batch_size": 4}}
    return Recipe(
        title="Made up",
        source=SOURCE,
        columns=("accuracy", "seeds", "points"),
        arms=(
            Arm(name="ordinary", reference=None, row=False),
            Arm(name="frozen", parent="ordinary", settings={"freeze.rate": 0.25}, row=False),
            Arm(name="tuned", parent="ordinary", reference=None, **common),
            Arm(name="frozen tuned", parent="frozen", like="tuned", reference="tuned", **{**common, "settings": {}}),
        ),
    )


def planned(axis, files, *, seeds=(1, 2, 3)):
    return plan({"x": recipe_of(axis)}, SCALES["smoke"], data="data", seeds=seeds, files=files)


def test_the_two_axes_of_seeds_share_a_run_and_are_never_pooled(files):
    pretrained, tuned = (planned(axis, files) for axis in ("pretraining", "finetuning"))

    def seeds(made):
        runs = [made.runs[made.arms["x", "frozen tuned", seed]] for seed in (1, 2, 3)]
        return [(made.runs[run.parent].seed, run.flags["seed"]) for run in runs]

    assert seeds(pretrained) == [(1, 1), (2, 1), (3, 1)]
    assert seeds(tuned) == [(1, 1), (1, 2), (1, 3)]
    keys = [{made.arms["x", "frozen tuned", seed] for seed in (1, 2, 3)} for made in (pretrained, tuned)]
    assert len(keys[0] & keys[1]) == 1
    chain = planned("chain", files)
    assert seeds(chain) == [(1, 1), (2, 2), (3, 3)]
    alone = planned("chain", files, seeds=(2,))
    assert alone.arms["x", "frozen tuned", 2] == chain.arms["x", "frozen tuned", 2], "each seed by a command of its own"


def test_an_arm_without_an_axis_is_a_run_of_the_first_seed(files):
    made = planned("none", files)
    assert [seed for _, arm, seed in made.arms if arm == "tuned"] == [1]
    assert made.runs[made.arms["x", "frozen tuned", 1]].like == made.arms["x", "tuned", 1]


def test_keys_depend_on_the_examples_and_on_what_an_arm_is_like(files):
    usual = planned("finetuning", files)
    others = {"sst2": "other files"}
    other = plan({"x": recipe_of("finetuning")}, SCALES["smoke"], data="data", seeds=(1, 2, 3), examples=others)
    for arm, same in (("frozen", True), ("tuned", False), ("frozen tuned", False)):
        assert (usual.arms["x", arm, 1] == other.arms["x", arm, 1]) == same, arm
    known = {"sst2": files["sst2"].fingerprint}
    again = plan({"x": recipe_of("finetuning")}, SCALES["smoke"], data="data", seeds=(1, 2, 3), examples=known)
    assert again.arms == usual.arms, "a table is made without the files"


def test_a_command_names_the_files_or_the_run_that_it_is_like(files, store, tmp_path):
    made = planned("finetuning", files)
    tuned, like = (made.runs[made.arms["x", arm, 2]] for arm in ("tuned", "frozen tuned"))
    last = store.run_folder(like.parent) / "checkpoints" / step_name(11)
    last.mkdir(parents=True)
    (last / "manifest.json").write_text("{}")
    said = words(like, store, tmp_path)
    assert said[:3] == ["finetune", "--parent", str(last)], "a parent at matched time ends where it ends"
    assert said[said.index("--like") + 1] == str(store.run_folder(tuned.key))
    assert "--task" not in said
    said = " ".join(words(tuned, store, tmp_path))
    assert f"--data {files['sst2'].train} --test {files['sst2'].test}" in said
    assert "--batch-size 4 --task sst2 --seed 2" in said
    assert "--resume" not in said
    store.run_folder(tuned.key).mkdir(parents=True)
    assert "--resume" in words(tuned, store, tmp_path), "it may have chosen some epochs"


def test_what_is_foretold_counts_the_runs_that_choose_epochs(files):
    settings = {"batch_size": 16, "accumulation": 1}
    first, like = (work_of("sst2", settings, chooses=chooses, context=4_096) for chooses in (True, False))
    assert first.updates == 2 * like.updates == 10 * 3_789, "nine tenths of 67,349 examples in batches of 16"
    assert like.tokens == 16 * 25.4
    part = work_of("sst2", {**settings, "most_examples": 16_384, "epochs": 1}, chooses=False, context=4_096)
    assert part.updates == 922
    recall = work_of("mqar", {**settings, "updates": 1_500}, chooses=True, context=4_096)
    assert (recall.updates, recall.tokens) == (1_500, 8_192.0)
    assert recall.tested == 512 * (6 * 512 + 2_048 + 4_096)
    made = planned("finetuning", files)
    run = made.runs[made.arms["x", "frozen tuned", 1]]
    rates = SCALES["smoke"].rates
    assert run.seconds(rates) >= rates.start + run.updates * rates.launching
    assert run.updates_to_do == run.updates, "a fresh run does all of them itself"


def record(key, right, **others):
    return {
        **{"key": key, "parent": None, "went_through": [], "right": right, "accuracy": sum(right) / len(right)},
        **{"questions_hash": "same", "report_loss": 1.0, "provenance": {"checkpoints": {"final": key}}, **others},
    }


def test_accuracies_are_paired_by_question_and_shown_by_seed():
    recipe = recipe_of("finetuning")
    one = {"tuned": {1: [record("a", [1, 0, 0, 0])]}, "frozen tuned": {1: [record("b", [1, 1, 0, 0])]}}
    value = Rows(recipe, one).values(recipe.arms[3])["points"]
    assert value.mean == 25.0
    low, high = value.interval
    assert low == 0.0, "no resampled set of questions makes the arm worse: it answers all that the other one does"
    assert high > 25.0
    two = {
        "tuned": {1: [record("a", [1, 0])], 2: [record("c", [0, 0])]},
        "frozen tuned": {1: [record("b", [1, 1])], 2: [record("d", [1, 0])]},
    }
    values = Rows(recipe, two).values(recipe.arms[3])
    assert values["seeds"].each == (100.0, 50.0)
    assert (values["points"].mean, values["points"].error) == (50.0, 0.0)


def test_a_perplexity_is_none_of_answers_and_an_accuracy_none_of_text():
    import torch

    answers, text = record("a", [1, 0]), {"key": "b", "report_perplexity": 3.0}
    row = Row({OWN: answers, REFERENCE: text, AGAINST: answers}, {role: torch.tensor(0.5) for role in (OWN, REFERENCE)})
    assert row.change() is None
    assert row.points() is None


def test_rows_of_one_run_are_of_its_reports_in_between():
    def tests(share):
        return {"recall": {"tests": [{"length": 512, "pairs": 8, "accuracy": share}]}}

    recipe = Recipe(
        title="x",
        source=SOURCE,
        columns=("recall 512 8",),
        arms=(
            Arm(name="parent", reference=None),
            Arm(name="at once", parent="parent", task="mqar", report=0, reference=None),
            Arm(name="later", parent="parent", task="mqar", report=1, reference=None),
            Arm(name="at the end", parent="parent", task="mqar", reference=None),
        ),
    )
    made = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=(1,))
    assert len({made.arms["x", arm.name, 1] for arm in recipe.arms[1:]}) == 1
    run = {"key": "a", "report_loss": 1.0, "parent": None, "went_through": [], **tests(0.9)}
    run["reports"] = {"0": tests(0.1), "50": tests(0.5), "500": tests(0.9)}
    rows = Rows(recipe, {arm.name: {1: [run]} for arm in recipe.arms[1:]})
    shown = [rows.values(arm)["recall 512 8"] for arm in recipe.arms[1:]]
    assert [value.mean for value in shown] == [10.0, 50.0, 90.0]


def test_tables_leave_parents_out_and_records_tell_text_from_tasks(files, store):
    recipe = recipe_of("none")
    made = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=(1,), files=files)
    latex = render("x", recipe, made, store).latex()
    rows = [line.partition(" & ")[0] for line in latex.splitlines() if " & " in line]
    assert rows == ["arm", "tuned", "frozen tuned"]

    def kept(fingerprint, **settings):
        return {"settings": settings, "provenance": {"data": {"train": fingerprint}}}

    assert data_of([kept("text"), kept("examples", task="sst2")]) == ["text"]


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({"task": "sst2"}, "finetunes a parent, and names none"),
        ({"task": "sst2", "parent": "a", "at": 0.5}, "finetunes its parent from its end"),
        ({"parent": "a", "axis": "finetuning"}, "is not finetuned"),
        ({"parent": "a", "task": "sst2", "like": "b"}, "is finetuned like 'b', which is no arm before it"),
    ],
)
def test_arms_that_contradict_themselves_are_refused(arm, expected):
    with pytest.raises(InputError, match=expected):
        Recipe(title="x", source=SOURCE, arms=(Arm(name="a", reference=None), Arm(name="c", reference=None, **arm)))


def test_files_of_tasks_are_found_gzipped_or_not_and_missed_by_name(tmp_path):
    folder = write_smoke_examples(tmp_path)
    found = find_examples(folder)
    assert {task: each.test.name for task, each in found.items()} == {
        "sst2": "dev.tsv", "boolq": "val.jsonl", "quality": f"{WHOLE}.gz".split("/")[1],
    }  # fmt: skip
    shutil.rmtree(folder / "boolq")
    assert find_examples(folder).keys() == {"sst2", "quality"}
    with pytest.raises(InputError, match=r"no examples of a task; expected files such as sst2/train\.tsv and"):
        find_examples(tmp_path / "nothing")


def test_a_run_that_goes_on_with_its_parents_task_is_foretold_by_the_settings_that_it_keeps():
    made = plan({"stages": open_recipes()["stages"]}, SCALES["smoke"], data="data", seeds=(1,))
    recall = [run for run in made.runs.values() if run.settings.get("task") == "mqar"]
    assert any(made.runs[str(run.parent)].settings.get("task") == "mqar" for run in recall)
    assert max(run.seconds(SCALES["smoke"].rates) for run in recall) < 5
