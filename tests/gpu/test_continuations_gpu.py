"""Likelihoods of continuations on a GPU: many lengths, frozen heads, both precisions, against float64 on the CPU."""

import copy

import pytest
import torch

import saf
from saf.models import GPT, GPTConfig
from saf.synthetic import synthetic_patterns
from saf.tasks.base import Continuation, likelihoods

pytestmark = pytest.mark.gpu
LENGTH, VOCAB = 320, 512


def test_every_length_has_the_likelihoods_of_float64():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=VOCAB, num_layers=2, num_heads=4, hidden_size=256, max_length=LENGTH))
    heads = saf.HeadSet([(0, 1), (0, 2), (1, 3)])
    saf.install_(model, heads, synthetic_patterns(3, LENGTH, torch.Generator().manual_seed(0)))
    draw = torch.Generator().manual_seed(1)
    requests = []
    for length in range(3, LENGTH - 4, 7):
        tokens = tuple(torch.randint(0, VOCAB, (length + 3,), generator=draw).tolist())
        requests += [Continuation(tokens[:length], tokens[length:]), Continuation(tokens[:length], tokens[-1:])]
    exact = likelihoods(copy.deepcopy(model).double(), requests, precision="fp32")
    for precision, tolerance in (("fp32", 1e-3), ("bf16", 5e-2)):
        actual = likelihoods(model.cuda(), requests, batch_size=4, precision=precision)
        for one, other in zip(actual, exact, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, rel=tolerance), precision
