"""What notebooks print: one line a pattern, whatever its size."""

import torch

import saf
from saf.patterns import TrainablePattern
from tests.freezing.small_model import make, tokens


def test_everything_that_holds_patterns_prints_in_short():
    compact = saf.CompactPattern.from_parameters(*torch.zeros(2, 3, 5, 40))
    dense = saf.DensePattern(compact.dense()[0, 0].float())
    trained = TrainablePattern(torch.zeros(40), torch.zeros(40))
    assert repr(compact) == "CompactPattern(3 x 5 of 40 tokens, float32, cpu)"
    assert repr(compact[0, 0]) == "CompactPattern(40 tokens, float32, cpu)"
    assert repr(dense) == "DensePattern(40 tokens, float32, cpu)"
    assert repr(trained) == "TrainablePattern(length=40)"
    heads = saf.FrozenHeads.from_patterns([compact[0, 0], dense, trained])
    words = "num_frozen=3, max_length=40, backend='toeplitz', stored as T x T for float32: 1 dense"
    assert repr(heads) == f"FrozenHeads(\n  {words}\n  (pattern_2): TrainablePattern(length=40)\n)"
    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(max_fit_kl=100))
    assert repr(report) == "<FreezeReport: 3 of 12 heads frozen by variance; print() shows the table>"
    assert repr(report.statistics) == "AttentionStatistics(3 x 4 heads, 6 sequences of 48 tokens)"
    assert repr(report.patterns) == "CompactPattern(3 of 48 tokens, float64, cpu)"
