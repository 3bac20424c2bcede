"""QuALITY's real articles from end to end: read, cut at the context, trained on at the answer alone, and judged."""

import gzip
import json

import pytest
import torch

from saf.cli import main
from saf.data import prepare
from saf.errors import SafWarning
from saf.records.files import read_json, read_lines
from saf.tasks import TASKS
from saf.tasks.multiple_choice import read_examples
from saf.train import TrainConfig, latest, load_model, pretrain
from saf.train.run_config import recorded_config
from tests.train.conftest import SMALL

LENGTH = 4_352
"""Tokens of the model's context, within which the shortest article fits with its questions and no other one does."""


@pytest.fixture(scope="module")
def run(shared, tmp_path_factory):
    """The folder of a run finetuned on four questions of the shortest article and judged by two of the next one."""
    folder = tmp_path_factory.mktemp("quality")
    with gzip.open(shared / "data" / "tasks" / "quality" / "quality.htmlstripped.jsonl.gz", "rt") as stream:
        articles = sorted(map(json.loads, stream), key=lambda each: len(each["article"]))
    for name, article, count in (("train", articles[0], 4), ("test", articles[1], 2)):
        some = {**article, "questions": article["questions"][:count]}
        (folder / f"{name}.jsonl").write_text(json.dumps(some) + "\n")
    (folder / "text.txt").write_text("".join(each["article"] for each in articles))
    prepare(
        [str(folder / "text.txt")], folder / "data", vocab_size=3_000, split_characters=2_000, heldout_fraction=0.2,
        workers=1, progress=False,
    )  # fmt: skip
    one = {"num_layers": 1, "num_heads": 2, "hidden_size": 16}
    small = {
        **SMALL,
        "model_overrides": one,
        "batch_size": 1,
        "calibration_sequences": 1,
        "eval_every": 0,
        "save_every": 0,
    }
    parent = TrainConfig(data=str(folder / "data"), out=str(folder / "parent"), length=LENGTH, updates=1, **small)
    pretrain(parent)
    named = ["--data", str(folder / "train.jsonl"), "--test", str(folder / "test.jsonl"), "--development", "0.25"]
    start = ["finetune", "--task", "quality", *named, "--parent", str(latest(folder / "parent" / "checkpoints"))]
    size = ["--epochs", "2", "--batch-size", "3", "--accumulation", "1", "--peak-lr", "1e-3"]
    assert main([*start, "--out", str(folder / "run"), *size, "--quiet"]) == 0
    return folder / "run"


@pytest.fixture
def task(run):
    """The run's examples."""
    with pytest.warns(SafWarning, match=r"the text of 2 of 2 examples is shortened to 4353 tokens in all"):
        return TASKS["quality"](recorded_config(run), length=LENGTH)


def test_articles_are_cut_at_the_context_and_nothing_else_is(run, task):
    assert (len(task.examples), len(task.development), len(task.test)) == (3, 1, 2)
    assert task.length == LENGTH
    read = [
        example
        for name in ("train", "test")
        for example in read_examples(run.parent / f"{name}.jsonl", "quality").examples
    ]
    texts = {each.id: each for each in read}
    for each in (*task.examples, *task.development, *task.test):
        assert each.shortened == (each in task.test)
        text, mark, asked = task.tokenizer.decode(each.prompt[1:]).rpartition("\nQuestion:")
        assert mark + asked == texts[each.example.id].question
        article = texts[each.example.id].text
        assert article.startswith(text)
        assert (len(text) == len(article)) != each.shortened
        assert (len(each.sequence) == LENGTH + 1) == each.shortened


def test_the_answers_letter_alone_is_trained_on(run, task):
    inputs, targets = task.training(0, torch.device("cpu")).take()
    lengths = set()
    for row, number in enumerate(task.numbers(0, 3)):
        example = task.examples[number]
        (place,) = (targets[row] != -100).nonzero().flatten().tolist()
        assert task.tokenizer.decode([int(targets[row, place])]) == " " + "ABCD"[example.example.answer]
        assert task.tokenizer.decode(inputs[row, : place + 1].tolist()).endswith("\nAnswer:")
        assert inputs[row, place + 1 :].eq(task.tokenizer.eot_id).all()
        lengths.add(place + 1)
    assert max(lengths) == inputs.shape[1] > min(lengths)


def test_its_accuracy_is_that_of_the_letters_told_one_question_after_another(run, task):
    result = read_json(run / "result.json")
    model = load_model(result["checkpoint"]).eval()
    right = []
    for each, record in zip(task.test, read_lines(run / "answers.jsonl"), strict=True):
        with torch.no_grad():
            log_probs = model(torch.tensor([each.prompt]))[0, -1].double().log_softmax(0)
        told = [float(log_probs[choice[0]]) for choice in each.choices]
        assert record["log_probs"] == pytest.approx(told, abs=1e-4)
        right.append(max(range(4), key=told.__getitem__) == each.example.answer)
    assert result["accuracy"] == sum(right) / 2
    assert (result["questions"], result["shortened"], result["updates"]) == (2, 2, 2)
