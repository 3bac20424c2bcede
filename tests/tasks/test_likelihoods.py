"""Likelihoods of choices against a computation one by one: exact lengths, no padding, ordinary and frozen."""

import pytest
import torch

import saf
from saf.errors import DivergenceError, InputError
from saf.models import GPT, GPTConfig
from saf.synthetic import synthetic_patterns
from saf.tasks.base import Continuation, likelihoods

LENGTH, VOCAB = 24, 40


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=VOCAB, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def pairs(rng) -> list[Continuation]:
    """Contexts of many lengths with choices of one to four tokens, and one with every token."""
    results = []
    for context in rng.integers(1, 18, size=20):
        tokens = tuple(rng.integers(0, VOCAB, size=context).tolist())
        results += [Continuation(tokens, tuple(rng.integers(0, VOCAB, size=n).tolist())) for n in (1, 1, 3, 4)]
    return [*results, *(Continuation((1, 2, 3), (token,)) for token in range(VOCAB))]


def one_by_one(model: GPT, pairs: list[Continuation]) -> tuple[list[float], list[bool]]:
    """Sums of log-probabilities, and whether each token is the most likely one, a sequence at a time in float64."""
    sums, greedy = [], []
    for one in pairs:
        ids = torch.tensor([*one.context, *one.tokens])
        with torch.no_grad():
            rows = model(ids[None, :-1])[0].log_softmax(-1)[len(one.context) - 1 :]
        sums.append(float(rows.gather(1, ids[len(one.context) :, None]).sum()))
        greedy.append(torch.equal(rows.argmax(-1), ids[len(one.context) :]))
    return sums, greedy


@pytest.mark.parametrize("frozen", [False, True], ids=["ordinary", "frozen"])
def test_batches_have_one_length_and_the_likelihoods_of_single_sequences(model, pairs, frozen):
    if frozen:
        heads = saf.HeadSet([(0, 1), (0, 2), (1, 3)])
        saf.install_(model, heads, synthetic_patterns(3, LENGTH, torch.Generator().manual_seed(0)))
    seen: list[torch.Tensor] = []
    handle = model.embed.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    results = likelihoods(model.train(), pairs, batch_size=3)
    handle.remove()
    assert model.training
    # The model reads each sequence once and whole: nothing is left for padding.
    rows = [tuple(row) for batch in seen for row in batch.tolist()]
    assert sorted(rows) == sorted({one.inputs for one in pairs})
    assert len(rows) < len(pairs)
    assert max(map(len, seen)) == 3
    sums, greedy = one_by_one(model.double().eval(), pairs)
    assert [one.log_prob for one in results] == pytest.approx(sums, rel=1e-4, abs=1e-4)
    assert [one.greedy for one in results] == greedy
    assert sum(greedy[-VOCAB:]) == 1


def test_what_has_no_likelihood_is_refused(model):
    with pytest.raises(InputError, match="must have a token or more"):
        likelihoods(model, [Continuation((1,), ())])
    with pytest.raises(InputError, match="at most 24 tokens, got 25"):
        likelihoods(model, [Continuation((1,) * 25, (2,))])
    with torch.no_grad():
        model.embed.weight[2] = torch.nan
    with pytest.raises(DivergenceError, match="not finite"):
        likelihoods(model, [Continuation((1,), (2,))])
