"""Compact patterns equal Eq. (3) in every gauge, and every kind of pattern has the same interface."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.patterns import (
    CompactPattern,
    DensePattern,
    ExponentialPattern,
    TrainablePattern,
    pattern_for_each_head,
    pattern_from_state,
)

COMPACT = CompactPattern.from_parameters(
    torch.linspace(0, 1, 6, dtype=torch.float64), torch.linspace(0, -2, 6, dtype=torch.float64)
)
ZERO = torch.zeros(1, dtype=torch.float64)
# The same pattern: rho falls by 2/5 a distance, so a band of two and one decay describe it.
EXPONENTIAL = ExponentialPattern(
    COMPACT.alpha, COMPACT.rho[:2], damping=ZERO + 0.4, frequency=ZERO, cosine=COMPACT.rho[2:3].exp(), sine=ZERO,
    length=6,
)  # fmt: skip
SINGLES = {
    "compact": COMPACT,
    "dense": DensePattern(COMPACT.dense()),
    "exponential": EXPONENTIAL,
    "trainable": TrainablePattern(COMPACT.alpha, COMPACT.rho),
}


def normal(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_pattern(*shape, seed=0):
    return CompactPattern.from_parameters(normal(*shape, seed=seed), normal(*shape, seed=seed + 1))


def same(one, other, tolerance=1e-10):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [1, 2, 130])
def test_dense_is_equation_3(length):
    pattern = random_pattern(length)
    for row, weights in enumerate(pattern.dense()):
        same(weights[: row + 1], (pattern.alpha[: row + 1] + pattern.rho[: row + 1].flip(0)).softmax(0))
        assert not weights[row + 1 :].any()


@given(
    length=st.sampled_from([1, 2, 3, 17, 255, 256, 300]),
    a=st.floats(-50, 50),
    b=st.floats(-50, 50),
    c=st.floats(-1, 1),
    seed=st.integers(0, 2**31),
)
def test_gauges_of_one_pattern_share_their_canonical_and_level_form(length, a, b, c, seed):
    pattern = random_pattern(length, seed=seed)
    position = torch.arange(length, dtype=torch.float64)
    moved = CompactPattern.from_parameters(pattern.alpha + a + c * position, pattern.rho + b + c * position)
    same(moved.dense(), pattern.dense())
    for form in (CompactPattern.canonical, CompactPattern.level):
        changed = form(pattern)
        for name in ("alpha", "rho", "log_z"):
            same(getattr(form(moved), name), getattr(changed, name))
            same(getattr(form(changed), name), getattr(changed, name))
        same(changed.dense(), pattern.dense())
        same(changed.log_z, CompactPattern.from_parameters(changed.alpha, changed.rho).log_z)
        assert form(moved).rho.max() == 0


def test_canonical_alpha_has_no_slope_and_ignores_sinks():
    position = torch.arange(1024, dtype=torch.float64)
    alpha = normal(1024, scale=0.2)
    alpha[:4] += 25
    alpha[1020:] -= 10
    tilted = CompactPattern.from_parameters(alpha + 0.3 * position, 0.3 * position - position.log1p())
    canonical = tilted.canonical()
    slope = ((canonical.alpha[544:] - canonical.alpha[64:544]) / 480).median()
    assert abs(slope) < 1e-4
    assert canonical.alpha[64:].max() == 0
    assert canonical.alpha[:4].min() > 20
    # The slope's error adds up over the positions.
    same(canonical.rho - canonical.rho[0], -position.log1p(), 1024 * 2e-4)


def test_log_z_is_level_for_rising_and_falling_rho():
    rho = torch.tensor([[0.25], [-0.25]]) * torch.arange(4096, dtype=torch.float64)
    level = CompactPattern.from_parameters(torch.zeros_like(rho), rho).level()
    assert (level.log_z.amax(-1) - level.log_z.amin(-1)).max() < 10
    assert level.log_z.abs().max() < 60
    assert level.alpha.max() == level.rho.max() == 0


def test_rounding_recomputes_the_normaliser():
    pattern = random_pattern(2, 40)
    rounded = pattern.to(dtype=torch.bfloat16)
    same(rounded.dense().sum(-1), torch.ones(2, 40, dtype=torch.float64), 1e-12)
    assert (rounded.log_z - pattern.log_z).abs().max() > 1e-5
    assert torch.equal(rounded.to(dtype=torch.float32).log_z, rounded.log_z)


def test_leading_dimensions_are_indexed_and_positions_are_not():
    pattern = random_pattern(2, 3, 10)
    assert (pattern.shape, pattern.length, len(pattern)) == ((2, 3), 10, 2)
    assert torch.equal(pattern[1, 2].alpha, pattern.alpha[1, 2])
    assert pattern[:, torch.tensor([True, False, True])].shape == (2, 2)
    for index in [(0, 0, 0), (0, 0, slice(0, 5)), (slice(None), slice(None), slice(5))]:
        with pytest.raises(InputError, match="leading dimensions"):
            pattern[index]
    assert torch.equal(CompactPattern.stack([pattern[0], pattern[1]]).log_z, pattern.log_z)
    for patterns in ([], [random_pattern(3), random_pattern(4)]):
        with pytest.raises(InputError, match="at least one pattern, all of one shape"):
            CompactPattern.stack(patterns)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dense_patterns_accept_rounded_rows_and_singles_own_their_memory(dtype):
    weights = random_pattern(2, 64).dense()
    pattern = DensePattern(weights).to(dtype=dtype)
    assert (pattern.shape, pattern.length) == ((2,), 64)
    assert torch.equal(pattern[1].prefix(5).dense(), weights[1, :5, :5].to(dtype))
    part = pattern.singles()[1].weights
    assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("kind", SINGLES)
def test_every_kind_has_prefixes_devices_heads_and_a_state(kind):
    pattern = SINGLES[kind]
    read = pattern_from_state(pattern.state(), trainable=pattern.trainable)
    assert type(read) is type(pattern)
    assert tuple(pattern.state()) == pattern.parts
    assert torch.equal(read.dense(), pattern.dense())
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
    with pytest.raises(InputError, match="one leading dimension"):
        CompactPattern.stack([batch, batch]).singles()


DENSE = random_pattern(4).dense()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CompactPattern.from_parameters(DENSE[0], DENSE[0, :3]), InputError, r"'alpha': \[4\], 'rho': \[3\]"),
        (lambda: CompactPattern.from_parameters(DENSE[0], DENSE[0].log()), InputError, "rho must be .* finite"),
        (lambda: CompactPattern.from_parameters(DENSE[0].long(), DENSE[0].long()), InputError, "floating"),
        (lambda: CompactPattern.from_parameters(DENSE[:, :0], DENSE[:, :0]), InputError, "T >= 1"),
        (lambda: CompactPattern.from_parameters(*(1e308 * torch.ones(2, 4).double())), InputError, "log_z .*finite"),
        (lambda: DensePattern(DENSE[:, :3]), InputError, "T, T"),
        (lambda: DensePattern(DENSE * 1.001), InputError, "sum to 1"),
        (lambda: DensePattern(DENSE.roll(1, -1)), InputError, "causal"),
        (lambda: DensePattern(DENSE - 2 * torch.eye(4)), InputError, "non-negative"),
        (lambda: TrainablePattern.of(EXPONENTIAL), UnsupportedError, "only key and distance logits"),
        (lambda: pattern_from_state({"alpha": DENSE[0]}), CheckpointError, r"tensors of a pattern .*got \['alpha'\]"),
        (lambda: pattern_from_state({"weights": DENSE}, trainable=True), CheckpointError, "trainable: alpha, rho"),
    ],
)
def test_what_is_no_pattern_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
