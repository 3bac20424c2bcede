"""What every score keeps to: one number a head, NaN for frozen ones, and an error that says what is missing."""

import pytest
import torch

import saf
from saf.errors import InputError
from saf.scores import SCORES, required_inputs, score_name

VARIANCE = torch.tensor([[0.3, 0.1, torch.nan], [0.1, 0.5, 0.4]], dtype=torch.float64)
NEEDED = {
    "qk_gradient": "gradient",
    "rank_sum": "gradient",
    "gradient_veto": "gradient",
    "output_magnitude": "outputs",
    "redundancy": "outputs",
    "residual_cosine": "outputs",
    "relative_output_change": "outputs",
    "gate_taylor": "gates",
}
COLLECTOR = {"gradient": r"QKGradient\(model\)", "outputs": "head_outputs", "gates": "gate_gradients"}


def test_the_table_says_what_each_score_needs():
    assert {name: required_inputs(name) for name in SCORES} == {
        name: (NEEDED[name],) if name in NEEDED else () for name in SCORES
    }


@pytest.mark.parametrize(("name", "needed"), NEEDED.items())
def test_a_score_that_lacks_something_says_how_to_collect_it(name, needed, statistics):
    with pytest.raises(InputError, match=f"needs {needed}: .*{COLLECTOR[needed]}"):
        saf.score(statistics(VARIANCE), name)


def test_a_function_is_a_score(statistics):
    def halved(found, *, factor=0.5):
        return found.variance * factor

    torch.testing.assert_close(saf.score(statistics(VARIANCE), halved), VARIANCE / 2, equal_nan=True)
    torch.testing.assert_close(saf.score(statistics(VARIANCE), halved, factor=2), VARIANCE * 2, equal_nan=True)
    assert score_name(halved) == "halved"
    with pytest.raises(InputError, match=r"must be one number a head, a Tensor \[2, 3\]; got .*\[3\]"):
        saf.score(statistics(VARIANCE), lambda found: found.variance[0])
    with pytest.raises(InputError, match="needs factor: pass factor="):
        saf.score(statistics(VARIANCE), lambda found, *, factor: found.variance)


def test_frozen_heads_are_nan_whatever_a_score_returns(statistics):
    found = saf.score(statistics(VARIANCE), lambda found: torch.zeros_like(found.variance))
    assert found.isnan().tolist() == VARIANCE.isnan().tolist()


def test_unknown_names_are_refused(statistics):
    with pytest.raises(InputError, match="unknown score 'magic'"):
        saf.score(statistics(VARIANCE), "magic")
    with pytest.raises(InputError, match=r"score 'variance' takes the statistics alone; got \['seed'\]"):
        saf.score(statistics(VARIANCE), "variance", seed=1)


def test_random_scores_follow_the_seed_and_not_what_is_frozen(statistics):
    whole = saf.score(statistics(torch.ones(2, 3).double()), "random", seed=3)
    part = saf.score(statistics(VARIANCE), "random", seed=3)
    assert torch.equal(part.nan_to_num(0), whole.masked_fill(VARIANCE.isnan(), 0))
    assert not torch.equal(whole, saf.score(statistics(torch.ones(2, 3).double()), "random", seed=4))
    with pytest.raises(InputError, match=r"or a torch\.Generator to draw one from; got -3"):
        saf.score(statistics(VARIANCE), "random", seed=-3)


def test_random_scores_follow_a_generator(statistics):
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    state, found = torch.get_rng_state(), statistics(torch.ones(2, 3).double())
    first, second = (saf.score(found, "random", seed=one) for _ in range(2))
    assert torch.equal(saf.score(found, "random", seed=other), first)
    assert len(torch.cat([first, second]).unique()) == 12
    assert torch.equal(torch.get_rng_state(), state)


def test_random_scores_are_uniform_over_heads(statistics):
    found = statistics(torch.ones(4, 5).double())
    chosen = torch.zeros(4, 5)
    for seed in range(400):
        chosen.view(-1)[saf.score(found, "random", seed=seed).flatten().argmin()] += 1
    # 20 cells of expected count 20: a chi-square of 19 degrees stays below 43.8 with probability 0.999.
    assert ((chosen - 20).square() / 20).sum() < 43.8
