"""`saf inspect` counts the patterns of each kind, and the bytes of their parameters."""

import torch

from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern, DensePattern
from saf.saving import save
from saf.surgery import install_
from tests.ops.exponential_patterns import exponential_patterns

LENGTH = 64


def test_patterns_are_counted_by_kind(saf_json, tmp_path):
    model = GPT(GPTConfig(vocab_size=40, num_layers=2, num_heads=5, hidden_size=40, max_length=LENGTH))
    soft = CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH))
    fast = exponential_patterns(1, LENGTH, band=16, sinks=8)[0]
    install_(model, HeadSet([(0, 0), (0, 1)]), [fast, soft])
    install_(model, HeadSet([(1, 2)]), [DensePattern(soft.dense())])
    save(model, tmp_path)
    inspected = saf_json("inspect", tmp_path)
    assert [layer["kinds"] for layer in inspected["patterns"]] == [{"exponential": 1, "compact": 1}, {"dense": 1}]
    sizes = [tensor.nbytes for one in (fast, soft, DensePattern(soft.dense())) for tensor in one.state().values()]
    assert inspected["storage"]["parameters"] == sum(sizes)
