"""What every kind of pattern answers alike."""

import pytest
import torch

from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.patterns import (
    CompactPattern,
    DensePattern,
    ExponentialPattern,
    TrainablePattern,
    pattern_for_each_head,
    pattern_from_state,
    trained_logits,
)

COMPACT = CompactPattern.from_parameters(
    torch.linspace(0, 1, 6, dtype=torch.float64), torch.linspace(0, -2, 6, dtype=torch.float64)
)
# rho falls by 2/5 a distance: a band of two, and one decay.
EXPONENTIAL = ExponentialPattern(
    COMPACT.alpha, COMPACT.rho[:2], torch.full((1,), 0.4).double(), torch.zeros(1).double(), COMPACT.rho[2:3].exp(),
    torch.zeros(1).double(), 6,
)  # fmt: skip
SINGLES = {
    "compact": COMPACT,
    "dense": DensePattern(COMPACT.dense()),
    "exponential": EXPONENTIAL,
    "trainable": TrainablePattern(COMPACT.alpha, COMPACT.rho),
}


@pytest.mark.parametrize("kind", SINGLES)
def test_a_pattern_is_read_back_from_its_state(kind):
    pattern = SINGLES[kind]
    read = pattern_from_state(pattern.state(), trainable=pattern.trainable)
    assert type(read) is type(pattern)
    assert tuple(pattern.state()) == pattern.parts
    assert torch.equal(read.dense(), pattern.dense())


@pytest.mark.parametrize("kind", SINGLES)
def test_prefix_device_and_heads_of_a_pattern(kind):
    pattern = SINGLES[kind]
    assert pattern.length == 6
    assert torch.allclose(pattern.dense(), COMPACT.dense())
    assert torch.allclose(pattern.prefix(4).dense(), COMPACT.dense()[:4, :4])
    assert torch.equal(pattern.to(device="cpu").dense(), pattern.dense())
    assert pattern_for_each_head(pattern) == [pattern]
    for length in (0, 7):
        with pytest.raises(InputError, match="prefix must have 1 to 6 positions"):
            pattern.prefix(length)


def test_a_list_may_mix_kinds_and_batches():
    batch = CompactPattern.stack([COMPACT, COMPACT])
    singles = pattern_for_each_head([batch, *SINGLES.values()])
    assert [single.kind for single in singles] == ["compact", "compact", *SINGLES]
    assert [logits.shape for logits in trained_logits(singles)] == [(6,), (6,)]
    with pytest.raises(InputError, match="one leading dimension"):
        CompactPattern.stack([batch, batch]).singles()


def test_tensors_that_no_kind_has_are_refused():
    with pytest.raises(CheckpointError, match=r"expected the tensors of a pattern .*got \['alpha'\]"):
        pattern_from_state({"alpha": COMPACT.alpha})
    with pytest.raises(CheckpointError, match="trainable: alpha, rho"):
        pattern_from_state({"weights": COMPACT.dense()}, trainable=True)


def test_a_dense_pattern_owns_its_memory_and_has_no_logits_to_train():
    part = DensePattern(torch.stack([COMPACT.dense()] * 3)).singles()[1]
    assert part.weights.untyped_storage().nbytes() == part.weights.nbytes
    for pattern in (part, EXPONENTIAL):
        with pytest.raises(UnsupportedError, match="only key and distance logits can be trained"):
            TrainablePattern.of(pattern)
