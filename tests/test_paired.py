"""Statistics of pairs, against cases whose interval or p-value is known."""

import math

import pytest
import torch
from scipy.stats import binom

from saf.errors import CompareError
from saf.paired import block_length, bootstrap_means, delta_of_windows, holm, mcnemar, paired_answers


def arms(windows: int = 400, cost: float = 0.01, spread: float = 0.02) -> tuple[torch.Tensor, torch.Tensor]:
    """Two models on windows of very different hardness; the second is `cost` +- `spread` nats dearer a window."""
    generator = torch.Generator().manual_seed(0)
    hardness = 3 + torch.randn(windows, generator=generator, dtype=torch.float64)
    extra = cost + spread * torch.randn(windows, generator=generator, dtype=torch.float64)
    return hardness, hardness + extra


def test_the_change_is_the_formula_and_its_interval_near_the_normal_approximation():
    ordinary, frozen = arms()
    result, extra = delta_of_windows(ordinary, frozen), frozen - ordinary
    ratio = float(frozen.mean().exp() / ordinary.mean().exp())
    assert result["ppl_ordinary"] == pytest.approx(math.exp(ordinary.mean()))
    assert result["delta_ppl_percent"] == pytest.approx(100 * (ratio - 1))
    half = 1.96 * float(extra.std(correction=0)) / math.sqrt(len(extra))
    expected = [100 * math.expm1(float(extra.mean()) + sign * half) for sign in (-1, 1)]
    assert result["ci95"] == pytest.approx(expected, rel=0.02)
    constant = delta_of_windows(*arms(spread=0.0))["ci95"]
    assert constant == pytest.approx([100 * math.expm1(0.01)] * 2, abs=1e-9), "a constant cost has no uncertainty"


def shared(windows: int, of: int, generator: torch.Generator) -> torch.Tensor:
    """Differences of mean 0 of which so many neighbours, those of one document, have most in common."""
    documents = torch.randn(-(-windows // of), generator=generator, dtype=torch.float64)
    return documents.repeat_interleave(of)[:windows] + 0.5 * torch.randn(windows, generator=generator).double()


@pytest.mark.parametrize(("of", "least"), [(1, 178), (6, 164)], ids=["apart", "in documents of six windows"])
def test_the_interval_covers_the_truth_about_95_times_in_100(of, least):
    generator = torch.Generator().manual_seed(4)
    covered = 0
    for _ in range(200):
        low, high = delta_of_windows(torch.zeros(120).double(), shared(120, of, generator), resamples=500)["ci95"]
        covered += low <= 0.0 <= high
    assert least <= covered <= 198, "few documents leave an interval a little narrow; single draws cover 128 of 200"


def test_windows_are_drawn_alone_unless_neighbours_go_together():
    generator = torch.Generator().manual_seed(0)
    alone = [block_length(torch.randn(105, generator=generator)) for _ in range(100)]
    assert alone.count(1) >= 95
    together = [block_length(shared(300, 6, generator)) for _ in range(20)]
    assert 5 <= sorted(together)[10] <= 15
    alternating = torch.tensor([0.0, 1.0]).repeat(50)
    assert block_length(alternating) == 1, "blocks would make the interval narrower"
    assert [block_length(torch.ones(windows)) for windows in (1, 2, 3, 50)] == [1, 1, 1, 1]
    assert all(1 <= block_length(torch.arange(float(count))) <= max(1, count // 3) for count in range(1, 40))


def test_a_block_is_so_many_neighbours_and_the_first_follow_the_last():
    values = torch.tensor([0.0, 0.0, 6.0, 6.0])
    assert set(bootstrap_means(values, block=2).tolist()) == {0.0, 1.5, 3.0, 4.5, 6.0}
    assert set(bootstrap_means(values, block=4).tolist()) == {3.0}
    draws = [bootstrap_means(torch.arange(50.0), resamples=9, seed=seed).tolist() for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_what_cannot_be_compared_is_refused():
    losses = torch.zeros(3).double()
    with pytest.raises(CompareError, match="3 and 2 windows"):
        delta_of_windows(losses, losses[1:])


def answered(rights: list[int]) -> list[dict]:
    return [{"id": str(number), "answer": 0, "right": bool(right)} for number, right in enumerate(rights)]


def test_equal_answers_still_have_an_interval():
    ordinary = answered([1] * 70 + [0] * 30)
    change = paired_answers(ordinary, ordinary)
    low, high = change["ci95"]
    assert (change["difference"], change["standard_error"], change["p_value"]) == (0.0, 0.0, 1.0)
    assert low == -high
    assert high == pytest.approx(1.96 / 102), "half a question changed either way, of two more"


def test_the_interval_of_many_changes_is_that_of_their_standard_error():
    ordinary, frozen = answered([0, 1] * 4_000 + [1] * 2_000), answered([1, 0] * 3_000 + [0, 1] * 1_000 + [0] * 2_000)
    change = paired_answers(ordinary, frozen)
    assert (change["gained"], change["lost"]) == (3_000, 5_000)
    assert change["standard_error"] == pytest.approx((0.8 - 0.2**2) ** 0.5 / 100)
    ends = [change["difference"] + sign * 1.96 * change["standard_error"] for sign in (-1, 1)]
    assert change["ci95"] == pytest.approx(ends, rel=1e-3)
    with pytest.raises(CompareError, match="same questions"):
        paired_answers(ordinary, frozen[:-1])


def test_intervals_are_over_examples_whose_queries_may_go_together():
    """With one query an example they equal questions; four queries that change together say no more than one."""
    hits = [[1, 1, 1, 0, 0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1, 1, 0, 0, 1]]
    expected = paired_answers(*map(answered, hits))
    fourfold = ([{"id": n, "right": 4 * hit, "queries": 4} for n, hit in enumerate(each)] for each in hits)
    change = paired_answers(*fourfold)
    assert change["ci95"] == pytest.approx(expected["ci95"])
    assert (change["gained"], change["lost"]) == (expected["gained"], expected["lost"]) == (1, 3)
    assert (change["questions"], "p_value" in change) == (40, False)


def test_p_values_are_those_computed_by_hand():
    # Two-sided binomial test of 2 against 8 at one half: twice the lower tail.
    assert mcnemar(2, 8) == pytest.approx(2 * binom.cdf(2, 10, 0.5)) == pytest.approx(112 / 1024)
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    # Holm: 5 × 0.01; 4 × 0.02 = 0.08; 3 × 0.03 = 0.09; 2 × 0.04 = 0.08, no less than before; 1 × 0.9.
    assert holm([0.9, 0.02, 0.01, 0.04, 0.03]) == pytest.approx([0.9, 0.08, 0.05, 0.09, 0.09])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
