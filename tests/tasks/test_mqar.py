"""Associative recall: what its examples are, which queries count as answered, and the task of a run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from saf.compare import unlearnt_reason
from saf.errors import DivergenceError, InputError
from saf.machine import Execution
from saf.models import GPT, preset
from saf.records.files import read_lines
from saf.tasks import TASKS, MQARSettings, MQARTask
from saf.tasks.mqar import Stream, answer_queries
from saf.train import TrainConfig

CPU = torch.device("cpu")
PAPER = MQARSettings()
SMALL = MQARSettings(
    length=24, pairs=3, vocabulary=64, test_lengths=(24, 32), test_pairs=(4, 3), test_examples=6, development=8
)


def looked_up(inputs: torch.Tensor, pairs: int) -> torch.Tensor:
    """The value of every token that is a key of its own example's pairs, -100 for others and for the pairs."""
    found = torch.full_like(inputs, -100)
    for row, tokens in enumerate(inputs.tolist()):
        values = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        for at in range(2 * pairs, len(tokens)):
            found[row, at] = values.get(tokens[at], -100)
    return found


@pytest.mark.parametrize(
    ("length", "pairs", "random_fill"), [(512, 8, True), (512, 64, True), (1_024, 8, False), (16, 4, False)]
)
def test_every_query_is_answered_by_a_lookup(length, pairs, random_fill):
    settings = replace(PAPER, random_fill=random_fill)
    inputs, targets = settings.examples(Stream.TRAINING, range(20), seed=3, length=length, pairs=pairs)
    queried = targets != -100
    assert (queried.sum(1) == pairs).all()
    assert torch.equal(looked_up(inputs, pairs)[queried], targets[queried])
    keys, values = inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2]
    for row in range(len(inputs)):
        assert len(set(keys[row].tolist())) == len(set(values[row].tolist())) == pairs
        assert sorted(inputs[row, queried[row]].tolist()) == sorted(keys[row].tolist()), "each key is queried once"
        assert (queried[row].nonzero() % 2 == 0).all()
        assert int(queried[row].nonzero().min()) >= 2 * pairs
    assert 1 <= int(keys.min()) <= int(keys.max()) < 4_096 <= int(values.min()) <= int(values.max()) < 8_192
    others = ~queried
    others[:, : 2 * pairs] = False
    if not random_fill:
        assert not inputs[others].any()
        assert torch.equal(looked_up(inputs, pairs), targets), "nothing else is a key"
    else:  # uniform over all tokens: its mean has a standard error of 8192 / sqrt(12 n)
        filled = inputs[others].double()
        assert float(filled.mean()) == pytest.approx(4_095.5, abs=5 * 8_192 / math.sqrt(12 * len(filled)))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_distances_have_the_distribution_of_the_definition(power):
    length, pairs, examples = 64, 4, 3_000
    settings = replace(PAPER, power=power, random_fill=False)
    inputs, _ = settings.examples(Stream.TRAINING, range(examples), seed=1, length=length, pairs=pairs)
    keys = inputs[:, 0 : 2 * pairs : 2]
    at = (inputs[:, None, 2 * pairs :] == keys[:, :, None]).int().argmax(2)
    assert (at % 2 == 0).all()
    gaps = (at // 2).numpy()
    weights = np.arange(1, (length - 2 * pairs) // 2 + 1) ** (power - 1.0)
    # The first key's distance is a single draw by the weights; chi-square with 27 degrees of freedom, p = 1e-4.
    counts = np.bincount(gaps[:, 0], minlength=len(weights))
    expected = examples * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 63
    if power < 1:
        assert gaps[:, 0].mean() < gaps[:, -1].mean(), "near places are taken by the first keys"


def test_an_example_is_a_function_of_seed_stream_and_number_alone():
    """Runs resume by position alone, so the first example's tokens are part of the format."""
    inputs, targets = SMALL.examples(Stream.TRAINING, range(9), seed=7)
    assert inputs[0, :12].tolist() == [27, 63, 31, 44, 5, 53, 5, 33, 31, 43, 24, 28]
    for number in (8, 2):
        one = SMALL.examples(Stream.TRAINING, [number], seed=7)
        assert torch.equal(torch.cat(one), torch.stack([inputs[number], targets[number]]))
    assert len({tuple(row) for row in inputs.tolist()}) == 9
    for stream, seed in ((Stream.DEVELOPMENT, 7), (Stream.TRAINING, 8)):
        assert not torch.equal(SMALL.examples(stream, range(9), seed=seed)[0], inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 9}, "an even length of at least 4 tokens a pair, got 24 for 9 pairs"),
        ({"pairs": 0}, "4 tokens a pair, got 24 for 0 pairs"),
        ({"vocabulary": 24}, "must be larger than the length, 24"),
        ({"power": 0.0}, "mqar.power must be a finite number above 0"),
        ({"test_pairs": (4,)}, "must name equally many different tests"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)


@pytest.fixture
def settings():
    return TrainConfig(
        data="none", out="unused", task="mqar", mqar=SMALL, batch_size=2, accumulation=3, calibration_sequences=3,
        heldout_sequences=2, eval_windows=5, seed=3,
    )  # fmt: skip


@pytest.fixture
def task(settings):
    return TASKS[settings.task](settings, length=33)


@pytest.fixture
def model():
    return GPT(preset("tiny", vocab_size=64, num_layers=1, hidden_size=32, max_length=33))


def test_calibration_fills_the_context_and_never_sees_training_or_tests(task, settings):
    other = MQARTask(replace(settings, seed=4), length=33)
    calibration = task.calibration()
    assert [tuple(batch["input_ids"].shape) for batch in calibration] == [(2, 32), (1, 32)]
    assert [tuple(batch.shape) for batch in task.heldout()] == [(2, 32)]
    for one, same in zip(calibration, other.calibration(), strict=True):
        assert torch.equal(one["input_ids"], same["input_ids"])
        targets = one["targets"]
        assert torch.equal(looked_up(one["input_ids"], 3)[targets != -100], targets[targets != -100])
    assert not torch.equal(next(task.training(0, CPU))[0], next(other.training(0, CPU))[0])
    assert not torch.equal(calibration[0]["input_ids"], task.heldout()[0])


def test_the_report_has_every_test_and_the_gate(task, model, tmp_path):
    execution = Execution.of("cpu")
    report = task.report(model, execution, folder=tmp_path, checkpoints={})
    assert "the task is not learnt" in unlearnt_reason(report)
    tests = [(one["length"], one["pairs"], one["queries"]) for one in report["recall"]["tests"]]
    assert tests == [(24, 4, 24), (32, 3, 18)]
    written = read_lines(tmp_path / "answers.jsonl")
    own = [[one["right"] for one in written if one["task"] == test["task"]] for test in report["recall"]["tests"]]
    assert list(map(len, own)) == [6, 6]
    assert sum(own[0]) / 24 == report["recall"]["tests"][0]["accuracy"]
    # An untrained model knows nothing: every one of 64 tokens is as likely.
    assert report["report_loss"] == pytest.approx(math.log(64), abs=0.3)
    assert task.controller_loss(model, execution, 100) == report["report_loss"]
    assert task.controller_loss(model, execution, 2) != report["report_loss"]


def test_a_query_is_answered_by_the_most_likely_of_all_tokens(model, generator):
    inputs = torch.randint(64, (5, 12), generator=generator)
    targets = torch.full_like(inputs, -100)
    with torch.no_grad():
        logits = model(inputs)
    best = logits.argmax(2)
    targets[:, 3], targets[:, 9] = best[:, 3], best[:, 9]
    targets[2, 9] = (best[2, 9] + 1) % 64
    targets[4, 5] = best[4, 5]
    result = answer_queries(model, inputs, targets, batch_size=2)
    assert result["hits"] == [2, 2, 1, 2, 3]
    assert (result["examples"], result["queries"]) == (5, 11)
    assert result["accuracy"] == pytest.approx(10 / 11)
    queries = targets != -100
    assert result["loss"] == pytest.approx(float(F.cross_entropy(logits[queries], targets[queries])), rel=1e-5)


def test_a_loss_that_is_not_finite_is_refused(model):
    inputs = torch.zeros(2, 8, dtype=torch.long)
    model.embed.weight.data.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="the loss at queries is nan"):
        answer_queries(model, inputs, inputs)
