"""Attention profiles against whole patterns, entry by entry."""

import math

import pytest
import torch

from experiments.analyses.profiles import PROFILES, attention_profiles, layer_matched
from saf.calibration import latter_half
from saf.errors import InputError
from saf.heads import HeadSet
from saf.patterns import CompactPattern
from saf.surgery import install_


@pytest.mark.parametrize("positions", [None, (1, 7, 23)])
def test_profiles_are_those_of_the_patterns(model, ids, run_dense, positions):
    found = attention_profiles(model, ids.split(2), positions=positions, local=5)
    patterns, _ = run_dense(model, torch.cat([ids, ids[:, :1]], 1))
    rows = latter_half(24) if positions is None else positions
    for layer, pattern in enumerate(patterns):
        for head in range(4):
            expected = [0.0] * 4
            for matrix in pattern[:, head].tolist():
                for i in rows:
                    row = matrix[i][: i + 1]
                    expected[0] -= sum(p * math.log(p) for p in row if p > 0) / math.log(i + 1)
                    expected[1] += sum(row[max(0, i - 4) :])
                    expected[2] += max(row)
                    expected[3] += row[0]
            count = len(ids) * len(rows)
            for name, value in zip(PROFILES, expected, strict=True):
                assert found[name][layer, head].item() == pytest.approx(value / count, abs=1e-10), name


def test_frozen_heads_have_no_profile_and_live_ones_keep_their_place(model, ids):
    heads = HeadSet([(0, 1), (2, 0), (2, 3)])
    flat = torch.zeros(3, 24, dtype=torch.float64)
    install_(model, heads, CompactPattern.from_parameters(flat, flat), backend="reference")
    found = attention_profiles(model, [ids])["entropy"]
    assert HeadSet(map(tuple, found.isnan().nonzero().tolist())) == heads
    assert not found[1].isnan().any()
    assert not model.blocks[2].attention.live._forward_hooks


def test_unselected_heads_weigh_as_their_layers():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, torch.nan], [7.0, 8.0, 9.0, 9.0]])
    chosen, others = layer_matched(values, HeadSet([(0, 0), (0, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]))
    assert chosen == pytest.approx((1 + 2 + 30) / 3)
    assert others == pytest.approx((2 * 3.5 + 15) / 3)
    with pytest.raises(InputError, match="nothing to compare"):
        layer_matched(values, HeadSet())
    with pytest.raises(InputError, match=r"3 layers of 4 heads; got \[\[1, 4\], \[3, 0\]\]"):
        layer_matched(values, HeadSet([(0, 0), (1, 4), (3, 0)]))
