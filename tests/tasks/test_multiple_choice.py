"""Examples of tasks with choices: how they are read, checked, split, turned into tokens and batches, and answered."""

import json

import pytest
import tokenizers
import torch

from saf.data.tokenizer import Tokenizer, train_bpe
from saf.errors import DataError, InputError, SafWarning
from saf.machine import Execution
from saf.models import GPT, GPTConfig
from saf.tasks import TASKS, FinetuneSettings
from saf.tasks.base import Continuation, likelihoods, summary
from saf.tasks.multiple_choice import answer_loss, encode_examples, pad, read_examples, stratified
from saf.train import TrainConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["a good film, a bad film: yes or no"] * 4, vocab_size=270)


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def own(number, answer="yes", **more):
    return {"id": f"q{number}", "text": f"film {number}", "choices": ["yes", "no"], "answer": answer, **more}


def encoded(path, records, tokenizer, layout="jsonl", **limits):
    """The examples of records as tokens, and those left out."""
    examples, left_out = read_examples(lines(path / "x.jsonl", records), layout)
    return encode_examples(examples, left_out, tokenizer, **limits), left_out


def test_only_the_answers_tokens_are_targets_as_written_out_by_hand(tmp_path, tokenizer):
    record = {"text": "ab", "question": "?", "choices": ["xyz", "w"], "answer": "xyz"}
    ((example,), _) = encoded(tmp_path, [record], tokenizer, limit=20, shorten=False)
    a, b, q, x, y, z, w = (tokenizer.encode(letter)[0] for letter in "ab?xyzw")
    end = tokenizer.eot_id
    assert example.prompt == (end, a, b, q)
    assert example.choices == ((x, y, z), (w,))
    inputs, targets = pad([example.row, ((end, a, w), 2, 3)], padding=end)
    assert inputs.tolist() == [[end, a, b, q, x, y], [end, a, end, end, end, end]]
    assert targets.tolist() == [[-100, -100, -100, x, y, z], [-100, w, -100, -100, -100, -100]]
    assert example.longest == 6


def test_examples_that_cannot_be_used_are_named_by_reason(tmp_path):
    bad = [
        own(0),
        {**own(1), "text": "  "},
        own(2, answer="maybe"),
        own(0, answer="no"),
        {**own(3), "choices": ["yes"]},
        own(4, answer=True),
        own(5, answer=1),
        {**own(6), "choices": ["yes", "yes"]},
        {**own(7), "text": "half of a pair: \ud800"},
        {**own(8), "id": None, "question": None},
        {**own(9), "id": None},
    ]
    examples, left_out = read_examples(lines(tmp_path / "x.jsonl", bad), "jsonl")
    assert [(each.id, each.answer) for each in examples] == [("q0", 0), ("q5", 1), ("line 10", 0), ("line 11", 0)]
    assert left_out == {
        "empty": ["q1"],
        "answer not among the choices": ["q2", "q4"],
        "duplicate id": ["q0"],
        "fewer than two different choices": ["q3", "q6"],
        "not Unicode": ["q7"],
    }


def test_choices_of_the_same_tokens_are_left_out(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "film": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    choices = [["gut", "schlecht"], ["film", "\u200b"], ["film", "?"]]
    records = [{**own(n), "choices": each, "answer": 0} for n, each in enumerate(choices)]
    examples, left_out = encoded(tmp_path, records, Tokenizer(backend.to_str().encode()), limit=20, shorten=False)
    assert [each.example.id for each in examples] == ["q2"]
    assert left_out == {"choices of the same tokens": ["q0", "q1"]}


@pytest.mark.parametrize(
    ("layout", "record", "words"),
    [
        ("jsonl", "{", "line 1: not JSON"),
        ("jsonl", {"text": 0, "choices": ["a"], "answer": "a"}, "line 1: no example of jsonl"),
        ("jsonl", {"text": "a", "choices": "yes", "answer": 0}, "choices must be a list, got yes"),
        ("quality", {"article": "x", "questions": [{"question": "Who?", "options": ["a"] * 11}]}, "question 1 has"),
        ("sst2", "text\tlabel\nfilm\t1", "line 2: no example of sst2"),
    ],
)
def test_a_line_that_is_no_example_is_refused_with_its_number(tmp_path, layout, record, words):
    path = tmp_path / ("x.tsv" if layout == "sst2" else "x.jsonl")
    path.write_text((record if isinstance(record, str) else json.dumps(record)) + "\n")
    with pytest.raises(DataError, match=words):
        read_examples(path, layout)


def test_long_examples_lose_text_and_nothing_else_or_are_left_out(tmp_path, tokenizer):
    record = {"id": "long", "text": "x" * 30, "question": "why", "choices": ["ab", "c"], "answer": "c"}
    ((cut,), _) = encoded(tmp_path, [record], tokenizer, limit=10, shorten=True)
    question = tuple(tokenizer.encode("why"))
    assert (cut.shortened, cut.longest) == (True, 10)
    assert cut.prompt[-len(question) :] == question
    assert cut.choices == (tuple(tokenizer.encode("ab")), tuple(tokenizer.encode("c")))
    for limits in ({"limit": 10, "shorten": False}, {"limit": 5, "shorten": True}):
        assert encoded(tmp_path, [record], tokenizer, **limits) == ([], {"too long": ["long"]})


def test_the_development_share_has_that_share_of_every_label():
    labels = [0] * 70 + [1] * 30 + [2] * 7
    drawn = stratified(labels, 0.1, seed=0)
    assert [sum(labels[place] == label for place in set(drawn)) for label in (0, 1, 2)] == [7, 3, 1]
    assert stratified(labels, 0.1, seed=0) == drawn != stratified(labels, 0.1, seed=1)


@pytest.fixture
def task(tmp_path, tokenizer):
    """A function that opens a task of 20 examples, 2 of which are development."""
    tokenizer.save(tmp_path)
    train = lines(tmp_path / "train.jsonl", [own(n, answer=["yes", "no"][n % 2]) for n in range(20)])
    test = lines(tmp_path / "test.jsonl", [own(n) for n in range(100, 106)])

    def make(**changes):
        finetuning = FinetuneSettings(test=str(test), tokenizer=str(tmp_path), **changes)
        config = TrainConfig(
            data=str(train), out="unused", task="jsonl", finetuning=finetuning, batch_size=3, accumulation=2, seed=5,
            calibration_sequences=2, heldout_sequences=1,
        )  # fmt: skip
        return TASKS[config.task](config, length=64)

    return make


def test_a_part_of_the_file_is_stratified_and_the_same_for_every_run(task):
    part = task(most_examples=10)
    assert (len(part.examples), len(part.development), len(part.test)) == (9, 1, 6)
    assert sum(each.example.answer for each in (*part.examples, *part.development)) == 5, "half, as in the file"
    assert task(most_examples=10).fingerprint == part.fingerprint != task().fingerprint


def test_every_epoch_has_every_example_once_in_an_order_of_its_own(task):
    task = task()
    assert (len(task.examples), len(task.development), len(task.test)) == (18, 2, 6)
    assert (task.updates_of(1), task.updates_of(2)) == (3, 6)
    orders = [task.numbers(position, 18) for position in (0, 18)]
    assert orders[0] == [2, 15, 10, 12, 14, 3, 13, 11, 7, 4, 6, 17, 9, 1, 0, 16, 5, 8], "runs resume by position alone"
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(18))
    assert orders[0] != orders[1]
    later = task.training(2, CPU)
    for position in (12, 15):
        assert torch.equal(torch.stack(next(later)), task.batch(position, 3))


def test_calibration_is_on_the_tasks_own_training_examples_as_long_as_they_are(task):
    task = task()
    task.settings.calibration_sequences = 7
    batches, drawn = task.calibration(), set()
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 1]
    by_inputs = {each.sequence[:-1]: each for each in task.examples}
    for ids, mask, targets in (row for batch in batches for row in zip(*batch.values(), strict=True)):
        ids, targets = ids[: int(mask.sum())], targets[: int(mask.sum())]
        # The longest may go on behind its answer, where nothing is a target.
        starts = (tuple(ids[:end].tolist()) for end in range(len(ids), 0, -1))
        each = by_inputs[next(start for start in starts if start in by_inputs)]
        drawn.add(each.example.id)
        assert len(ids) in (len(each.sequence) - 1, task.length)
        assert targets[targets != -100].tolist() == list(each.choices[each.example.answer])
        assert int((targets != -100).nonzero()[0]) == len(each.prompt) - 1
    assert len(drawn) == 7


def test_patterns_reach_the_longest_example_though_none_is_trained_on_that_is_as_long(task, tmp_path):
    lines(tmp_path / "test.jsonl", [own(100), {**own(101), "text": "long " * 5}])
    task = task()
    assert task.length > max(len(each.sequence) - 1 for each in task.examples)
    assert max(batch["input_ids"].shape[1] for batch in task.calibration()) == task.length
    task.examples, task.length = task.examples[:2], 1000
    with pytest.raises(DataError, match="patterns must reach 1,000 tokens"):
        task.calibration()


def test_examples_that_are_left_out_are_named_in_a_warning_or_refused_where_none_remains(task, tmp_path):
    lines(tmp_path / "test.jsonl", [own(1), own(1), {**own(2), "text": "long " * 80}])
    with pytest.warns(SafWarning) as warned:
        opened = task(max_tokens=40)
    left_out, in_training = (str(each.message) for each in warned)
    assert left_out.endswith("1 duplicate id (q1); 1 too long (q2) left out of 3 examples")
    assert "1 of 1 examples are in" in in_training
    assert opened.description()["left_out"]["test"] == {"duplicate id": ["q1"], "too long": ["q2"]}
    for settings, error, words in (
        ({"max_tokens": 3}, DataError, "cannot be used"),
        ({"development": 1.0}, InputError, "development must be a share above 0 and below 1"),
        ({"judge": "tset"}, InputError, "judge must be"),
    ):
        with pytest.raises(error, match=words):
            task(**settings)


def test_a_question_is_answered_by_the_most_likely_choice_and_the_loss_is_over_answer_tokens(task):
    task = task()
    model = GPT(GPTConfig(num_layers=1, num_heads=2, hidden_size=16, vocab_size=320, max_length=64))
    answers = task.answers(model, Execution.of("cpu"), task.test)
    pairs = [Continuation(each.prompt, choice) for each in task.test for choice in each.choices]
    alone = [likelihoods(model, [pair])[0].log_prob for pair in pairs]  # whose oracle is in test_likelihoods
    assert [each for one in answers for each in one["log_probs"]] == pytest.approx(alone, rel=1e-5)
    assert all(one["taken"] == max((0, 1), key=one["log_probs"].__getitem__) for one in answers)
    facts = summary(answers)
    assert (facts["questions"], facts["answers"].get("0")) == (6, 6)
    assert facts["accuracy"] == sum(one["taken"] == 0 for one in answers) / 6
    tokens = sum(len(each.choices[0]) for each in task.test)
    assert answer_loss(answers) == pytest.approx(-sum(alone[::2]) / tokens, rel=1e-5)
