"""Measurements that read examples to finetune on, or questions: these decide by their sums, wherever they lie."""

from pathlib import Path

from saf.experiments.examples import find_examples, write_smoke_examples
from saf.experiments.execution import Outcome
from saf.experiments.measurement import (
    DataFolder,
    FileOf,
    Measurement,
    QuestionFolder,
)
from saf.experiments.measuring import carry_out, plan_measurements, words
from saf.experiments.plan import plan
from saf.experiments.scales import SCALES
from tests.experiments.conftest import measured_recipe
from tests.zero_shot_files import write_tasks

FINETUNED = Measurement(
    name="updates",
    does="benchmarks finetuning",
    settings={
        "task": "sst2",
        "data": FileOf("sst2", "train"),
        "test": FileOf("sst2", "test"),
        "tokenizer": DataFolder(),
    },
)


def test_examples_and_tokenizer_are_told_where_they_are_and_decide_by_their_sums(store, command, tmp_path):
    recipe = measured_recipe(FINETUNED)

    def measured(folder, **others):
        files = find_examples(write_smoke_examples(folder))
        made = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=(1, 2), files=files, **others)
        made.folder = tmp_path / "data"
        return plan_measurements({"x": recipe}, made)

    found = measured(tmp_path / "tasks")
    assert found.planned.keys() == measured(tmp_path / "elsewhere").planned.keys(), "where they lie decides nothing"
    (one,) = found.planned.values()
    assert one.seed is None, "updates are timed once for all seeds"
    told = " ".join(words(one, store, Path("o.json")))
    for part in ("--data {0}/tasks/sst2/train.tsv", "--test {0}/tasks/sst2/dev.tsv", "--tokenizer {0}/data"):
        assert part.format(tmp_path) in told
    (tmp_path / "data").mkdir()
    outcome = Outcome()
    carry_out(found, store, outcome, say=lambda text: None, launch=command)
    assert outcome.ended == [one.key]
    # Tables are made of the records alone, which tell whose examples were timed.
    again = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=(1,), examples=store.examples())
    assert list(plan_measurements({"x": recipe}, again).planned) == [one.key]
    for name, changes in (("data", {"data": "other"}), ("examples", {"data": "data", "examples": {"sst2": "other"}})):
        other = plan({"x": recipe}, SCALES["smoke"], seeds=(1,), **{"examples": store.examples(), **changes})
        assert list(plan_measurements({"x": recipe}, other).planned) != [one.key], name


def test_examples_that_are_nowhere_are_asked_for(store, command):
    made = plan({"x": measured_recipe(FINETUNED)}, SCALES["smoke"], data="data", seeds=(1,))
    outcome = Outcome()
    carry_out(plan_measurements({"x": measured_recipe(FINETUNED)}, made), store, outcome, say=print, launch=command)
    (problem,) = outcome.failed.values()
    assert "it needs examples of sst2 (--tasks); name the folder" in problem
    assert not command.calls


ASKED = Measurement(
    name="asked",
    does="analyze zero-shot",
    on=("MODEL",),
    settings={"task_data": QuestionFolder()},
    scaled={"smoke": {"task_data": "made_up"}},
)


def test_questions_are_those_of_a_folder_or_the_hubs(store, command, tmp_path):
    recipe = measured_recipe(ASKED)

    def asked(folder, scale="small", **others):
        made = plan({"x": recipe}, SCALES[scale], data="data", seeds=(1, 2), **others)
        made.questions = folder
        (one,) = plan_measurements({"x": recipe}, made).planned.values()
        return one, words(one, store, Path("o.json")) if folder or not others else [], made.notes

    folder, elsewhere = (write_tasks(tmp_path / name) for name in ("tasks", "elsewhere"))
    one, told, notes = asked(folder)
    assert told == ["analyze", "zero-shot", "MODEL", "--out", "o.json", "--task-data", str(folder)]
    assert one.seed is None
    assert not notes
    assert asked(elsewhere)[0].key == one.key, "where they lie decides nothing"
    assert asked(folder, "smoke")[1][-2:] == ["--task-data", "made_up"], "the scale says where"
    assert not find_examples(folder), "nothing to finetune on"
    hubs, told, _ = asked(None)
    assert "--task-data" not in told
    outcome = Outcome()
    made = plan({"x": recipe}, SCALES["small"], data="data", seeds=(1,))
    made.questions = folder
    carry_out(plan_measurements({"x": recipe}, made), store, outcome, say=lambda text: None, launch=command)
    assert outcome.ended == [one.key]
    assert asked(None, examples=store.examples())[0].key == one.key, "tables are made of the records alone"
    (elsewhere / "sst2" / "dev.tsv").write_text("sentence\tlabel\nanother film \t1\n")
    assert asked(elsewhere)[0].key not in (one.key, hubs.key)
    (elsewhere / "piqa" / "valid.jsonl").unlink()
    less, told, notes = asked(elsewhere)
    assert less.key == hubs.key
    assert notes == [f"x asks the hub's questions: {elsewhere} has none of piqa."]
