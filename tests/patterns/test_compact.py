import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InputError
from saf.patterns import CompactPattern, DensePattern


def normal(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_pattern(*shape, scale=1.0, seed=0):
    return CompactPattern.from_parameters(normal(*shape, scale=scale, seed=seed), normal(*shape, seed=seed + 1))


def by_rows(alpha, rho):
    """Eq. (3) written out."""
    weights = torch.zeros(len(alpha), len(alpha), dtype=torch.float64)
    for i in range(len(alpha)):
        weights[i, : i + 1] = (alpha[: i + 1] + rho[: i + 1].flip(0)).softmax(0)
    return weights


def same(one, other, tolerance=1e-10):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [1, 2, 130])
def test_dense_is_equation_3(length):
    pattern = random_pattern(2, length)
    assert pattern.dense().shape == (2, length, length)
    same(pattern.dense(), torch.stack([by_rows(*pair) for pair in zip(pattern.alpha, pattern.rho, strict=True)]))
    assert pattern.dense().triu(1).count_nonzero() == 0
    same(pattern.dense().sum(-1), torch.ones(2, length, dtype=torch.float64))


@given(
    length=st.sampled_from([1, 2, 3, 17, 255, 256, 300]),
    a=st.floats(-50, 50),
    b=st.floats(-50, 50),
    c=st.floats(-1, 1),
    seed=st.integers(0, 2**31),
)
def test_gauges_of_one_pattern_share_their_canonical_and_balanced_form(length, a, b, c, seed):
    pattern = random_pattern(length, seed=seed)
    position = torch.arange(length, dtype=torch.float64)
    moved = CompactPattern.from_parameters(pattern.alpha + a + c * position, pattern.rho + b + c * position)
    same(moved.dense(), pattern.dense())
    for form in (CompactPattern.canonical, CompactPattern.balanced):
        for name in ("alpha", "rho", "log_z"):
            same(getattr(form(moved), name), getattr(form(pattern), name))
            same(getattr(form(form(pattern)), name), getattr(form(pattern), name))
        same(form(moved).dense(), pattern.dense())
        changed = form(pattern)
        same(changed.log_z, CompactPattern.from_parameters(changed.alpha, changed.rho).log_z)
        assert form(moved).rho.max() == 0


def test_canonical_alpha_has_no_slope_and_ignores_sinks():
    position = torch.arange(1024, dtype=torch.float64)
    alpha = normal(1024, scale=0.2)
    alpha[:4] += 25
    alpha[1020:] -= 10
    flat = CompactPattern.from_parameters(alpha + 0.3 * position, 0.3 * position - position.log1p())
    canonical = flat.canonical()
    slope = ((canonical.alpha[544:] - canonical.alpha[64:544]) / 480).median()
    assert abs(slope) < 1e-4
    assert canonical.alpha[64:].max() == 0
    assert canonical.alpha[:4].min() > 20
    torch.testing.assert_close(canonical.rho - canonical.rho[0], -position.log1p(), rtol=0, atol=1024 * 2e-4)


@pytest.mark.parametrize("slope", [0.25, -0.25])
def test_balanced_log_z_is_level_for_rising_and_falling_rho(slope):
    rho = slope * torch.arange(4096, dtype=torch.float64)
    balanced = CompactPattern.from_parameters(torch.zeros(4096, dtype=torch.float64), rho).balanced()
    assert balanced.log_z.max() - balanced.log_z.min() < 10
    assert balanced.log_z.abs().max() < 60
    assert balanced.alpha.max() == balanced.rho.max() == 0


def test_rounding_recomputes_the_normaliser():
    pattern = random_pattern(2, 40)
    rounded = pattern.to(dtype=torch.bfloat16)
    same(rounded.dense().sum(-1), torch.ones(2, 40, dtype=torch.float64), 1e-12)
    assert (rounded.log_z - pattern.log_z).abs().max() > 1e-5
    widened = rounded.to(dtype=torch.float32)
    assert torch.equal(widened.log_z, rounded.log_z)


def test_leading_dimensions_are_indexed_and_positions_are_not():
    pattern = random_pattern(2, 3, 10)
    assert (pattern.shape, pattern.length, len(pattern)) == ((2, 3), 10, 2)
    assert torch.equal(pattern[1, 2].alpha, pattern.alpha[1, 2])
    assert pattern[0].shape == (3,)
    assert pattern[:, torch.tensor([True, False, True])].shape == (2, 2)
    for index in [(0, 0, 0), (0, 0, slice(0, 5)), (slice(None), slice(None), slice(5))]:
        with pytest.raises(InputError, match="leading dimensions"):
            pattern[index]
    assert torch.equal(CompactPattern.stack([pattern[0], pattern[1]]).log_z, pattern.log_z)
    for patterns in ([], [random_pattern(3), random_pattern(4)]):
        with pytest.raises(InputError, match="at least one pattern, all of one shape"):
            CompactPattern.stack(patterns)


@pytest.mark.parametrize(
    ("alpha", "rho", "message"),
    [
        (torch.zeros(3), torch.zeros(4), r"\[3\] and rho \[4\]"),
        (torch.zeros(2), torch.tensor([0.0, -torch.inf]), "finite"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "floating"),
        (torch.zeros(2, 0), torch.zeros(2, 0), "T >= 1"),
    ],
)
def test_unusable_parameters_are_refused(alpha, rho, message):
    with pytest.raises(InputError, match=message):
        CompactPattern.from_parameters(alpha, rho)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dense_pattern_accepts_rounded_rows(dtype):
    weights = random_pattern(2, 64).dense()
    pattern = DensePattern(weights).to(dtype=dtype)
    assert (pattern.shape, pattern.length) == ((2,), 64)
    assert torch.equal(pattern.dense(), weights.to(dtype))
    assert torch.equal(pattern[1].prefix(5).dense(), weights[1, :5, :5].to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:, :3], "T, T"),
        (lambda w: w.long(), "floating"),
        (lambda w: w * 1.001, "sum to 1"),
        (lambda w: w.roll(1, -1), "causal"),
        (lambda w: w - 2 * torch.eye(4), "non-negative"),
    ],
)
def test_dense_pattern_names_what_is_wrong(change, message):
    weights = random_pattern(4).dense()
    with pytest.raises(InputError, match=message):
        DensePattern(change(weights))
