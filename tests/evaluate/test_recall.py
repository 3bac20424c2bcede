"""Which queries count as answered, and what is told of them."""

import pytest
import torch
from torch.nn import functional as F

from saf.errors import DivergenceError, InputError
from saf.evaluate.answers import paired_answers
from saf.evaluate.compare_recall import paired_tests
from saf.evaluate.recall import answer_queries
from saf.models import GPT, preset


@pytest.fixture
def model():
    model = GPT(preset("tiny", vocab_size=64, num_layers=1, hidden_size=32, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def test_a_query_is_answered_by_the_most_likely_of_all_tokens(model, generator):
    inputs = torch.randint(64, (5, 12), generator=generator)
    targets = torch.full_like(inputs, -100)
    with torch.no_grad():
        logits = model(inputs)
    best = logits.argmax(2)
    targets[:, 3], targets[:, 9] = best[:, 3], best[:, 9]
    targets[2, 9] = (best[2, 9] + 1) % 64
    targets[4, 5] = best[4, 5]
    found = answer_queries(model, inputs, targets, batch_size=2)
    assert found["hits"] == [2, 2, 1, 2, 3]
    assert (found["examples"], found["queries"]) == (5, 11)
    assert found["accuracy"] == pytest.approx(10 / 11)
    asked = targets != -100
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits[asked], targets[asked])), rel=1e-5)
    assert answer_queries(model, inputs, targets, batch_size=5)["hits"] == found["hits"]


def test_what_cannot_be_asked_is_refused(model):
    inputs = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(InputError, match="a query, a target that is not -100, in each"):
        answer_queries(model, inputs, torch.full_like(inputs, -100))
    with pytest.raises(InputError, match=r"\[2, 8\] and \[2, 7\]"):
        answer_queries(model, inputs, inputs[:, 1:])
    model.embed.weight.data.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="the loss at queries is nan"):
        answer_queries(model, inputs, inputs)


def test_a_change_is_over_examples_whose_queries_may_go_together():
    """With one query an example it is what questions have, and an interval has a width where nothing changed."""
    hits = [[1, 1, 1, 0, 0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1, 1, 0, 0, 1]]
    told = {"length": 16, "examples": 10, "queries": 10}
    runs = [[{**told, "pairs": 1, "accuracy": sum(each) / 10, "hits": each}] for each in hits]
    (test,) = paired_tests(*runs)
    asked = [[{"id": n, "answer": 0, "right": bool(hit)} for n, hit in enumerate(each)] for each in hits]
    expected = paired_answers(*asked)
    for name in ("difference", "standard_error"):
        assert test[name] == pytest.approx(expected[name])
    assert test["ci95"] == pytest.approx(expected["ci95"])
    assert (test["better"], test["worse"]) == (expected["gained"], expected["lost"])
    low, high = paired_tests(runs[0], runs[0])[0]["ci95"]
    assert low < 0 < high
    # Queries of an example that change together say no more than one of them.
    wide = [
        [
            {
                **told,
                "pairs": 4,
                "queries": 40,
                "accuracy": one[0]["accuracy"],
                "hits": [4 * hit for hit in one[0]["hits"]],
            }
        ]
        for one in runs
    ]
    assert paired_tests(*wide)[0]["ci95"] == pytest.approx(test["ci95"])
