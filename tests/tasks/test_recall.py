"""Which queries count as answered, and what is told of them."""

import pytest
import torch
from torch.nn import functional as F

from saf.errors import DivergenceError, InputError
from saf.models import GPT, preset
from saf.tasks.mqar import answer_queries


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
    with pytest.raises(InputError, match="a query in each"):
        answer_queries(model, inputs, torch.full_like(inputs, -100))
    with pytest.raises(InputError, match=r"\[2, 8\] and \[2, 7\]"):
        answer_queries(model, inputs, inputs[:, 1:])
    model.embed.weight.data.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="the loss at queries is nan"):
        answer_queries(model, inputs, inputs)
