"""The exponential pattern against its definition, written out entry by entry."""

import math

import pytest
import torch

from saf.errors import InputError
from saf.patterns import ExponentialPattern
from tests.ops.exponential_patterns import exponential_patterns


def written_out(pattern: ExponentialPattern) -> torch.Tensor:
    """P of a single pattern by its definition, Eq. (S.31), row by row."""
    size, width, keys = pattern.length, pattern.band.shape[-1], pattern.alpha.shape[-1]
    d, later = torch.arange(size - width).double(), torch.arange(size - keys).double()
    turned = pattern.frequency * d[:, None]
    waves = pattern.cosine * turned.cos() + pattern.sine * turned.sin()
    g = torch.cat([pattern.band.exp(), ((-pattern.damping * d[:, None]).exp() * waves).sum(1)])
    trend = (pattern.trend * (-pattern.trend_damping * later[:, None]).exp()).sum(1)
    weights = torch.cat([pattern.alpha, trend]).exp()
    entries = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        row = weights[: i + 1] * g[: i + 1].flip(0)
        entries[i, : i + 1] = row / row.sum()
    return entries


@pytest.mark.parametrize(("length", "width"), [(1, 1), (7, 7), (20, 1), (40, 16)])
@pytest.mark.parametrize("sinks", [None, 4])
def test_dense_is_the_definition(length, width, sinks):
    pattern = exponential_patterns(1, length, band=width, sinks=sinks and min(sinks, length))[0]
    torch.testing.assert_close(pattern.dense(), written_out(pattern), rtol=1e-12, atol=1e-15)


def test_prefixes_and_longer_forms_are_the_same_pattern():
    pattern = exponential_patterns(3, 60, band=8, sinks=4)
    for length in (1, 5, 59):
        torch.testing.assert_close(pattern.prefix(length).dense(), pattern.dense()[:, :length, :length])
        torch.testing.assert_close(pattern.extended(130).dense()[:, :60, :60], pattern.dense())
    with pytest.raises(InputError, match="a logit of its own, so the pattern ends at 60; got 61"):
        exponential_patterns(1, 60, band=8).to_compact(61)


def test_weights_must_stay_positive_where_they_are_used():
    one = torch.ones(1, dtype=torch.float64)
    none = one[:0]
    # 1 + 1.1 cos(d pi / 100) is below 0 around distance 100.
    two = ExponentialPattern(none, one, 0 * torch.ones(2).double(), torch.tensor([0, math.pi / 100]).double(),
                             torch.tensor([1, 1.1]).double(), torch.zeros(2).double(), 70)  # fmt: skip
    assert two.to_compact().length == 70
    with pytest.raises(InputError, match="positive over 200 positions"):
        two.extended(200)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"damping": -1e-3}, "damping must be at least 0"),
        ({"band": math.inf}, "must be finite"),
        ({"length": 8}, "alpha must have at most 8 keys"),
    ],
)
def test_patterns_that_grow_or_do_not_fit_together_are_refused(change, words):
    pattern = exponential_patterns(1, 60, band=16)[0]
    values = pattern.state()
    for name, value in change.items():
        values[name].view(-1)[0] = value
    with pytest.raises(InputError, match=words):
        ExponentialPattern.from_state(values)


def test_poles_keep_their_precision():
    pattern = exponential_patterns(1, 40, band=8).to(dtype=torch.bfloat16)
    assert pattern.cosine.dtype == pattern.alpha.dtype == torch.bfloat16
    assert pattern.frequency.dtype == torch.float64
