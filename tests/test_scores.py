"""Scores on statistics written by hand: one number a head, NaN for frozen ones, errors that name missing inputs."""

import re

import pytest
import torch

import saf
from saf.errors import InputError
from saf.scores import HOW_TO_MEASURE, SCORES, HeadOutputs, head_score, required_inputs
from saf.selection import ranking
from saf.statistics import AttentionStatistics
from tests.calibration.test_calibrate import model, tokens

NAN = torch.nan
VARIANCE = torch.tensor([[0.3, 0.1, NAN], [0.1, 0.5, 0.4]], dtype=torch.float64)
GRADIENT = torch.tensor([[1.0, 2.0, NAN], [0.5, 0.7, 3.0]], dtype=torch.float64)
NEEDED = {
    **dict.fromkeys(("qk_gradient", "rank_sum", "gradient_veto"), "gradient"),
    **dict.fromkeys(("output_magnitude", "redundancy", "residual_cosine", "relative_output_change"), "outputs"),
    "gate_taylor": "gates",
}


def statistics(variance: torch.Tensor = VARIANCE) -> AttentionStatistics:
    """Statistics whose `[L, H]` tensors differ, forward KL in the opposite order of the variance."""
    eta, shape = torch.ones(*variance.shape, 5), {"length": 5, "num_sequences": 2, "sequences_hash": ""}
    each = {"variance": variance, "forward_kl": 1 - variance, "row_entropy": 2 + variance}
    return AttentionStatistics(**each, eta_abs=eta, eta_rel=eta, **shape)


def test_every_score_names_its_inputs_and_how_to_measure_them():
    assert {name: required_inputs(name) for name in NEEDED} == {name: (needed,) for name, needed in NEEDED.items()}
    for name, needed in NEEDED.items():
        with pytest.raises(InputError, match=f"needs {needed}: {re.escape(HOW_TO_MEASURE[needed])}"):
            saf.score(statistics(), name)


def test_rank_sum_adds_places_and_the_veto_sends_heads_above_the_median_to_the_end():
    actual = saf.score(statistics(), "rank_sum", gradient=GRADIENT)
    expected = torch.tensor([[2.0 + 2, 0 + 3, NAN], [1 + 0, 4 + 1, 3 + 4]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, equal_nan=True)  # ties by layer and head
    actual = saf.score(statistics(), "gradient_veto", gradient=GRADIENT)
    # The median is 1.0: (0, 1) and (1, 2) lie above it and follow all others, by variance.
    assert ranking(actual) == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]
    incomplete = GRADIENT.where(GRADIENT != 0.7, NAN)
    for name in ("qk_gradient", "rank_sum", "gradient_veto"):  # frozen heads need no gradient, all live ones do
        one, other = (saf.score(statistics(), name, gradient=each) for each in (GRADIENT, GRADIENT.nan_to_num(99.0)))
        assert torch.equal(one[1], other[1])
        with pytest.raises(InputError, match=r"no value for live heads \[\[1, 1\]\]: .*QKGradient"):
            saf.score(statistics(), name, gradient=incomplete)


def test_gates_are_normalised_by_layer():
    gates = torch.tensor([[3.0, 4.0, NAN], [0.0, 0.0, 0.0]])
    actual = saf.score(statistics(), "gate_taylor", gates=gates)
    expected = torch.tensor([[0.6, 0.8, NAN], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert ranking(actual)[:3] == [(1, 0), (1, 1), (1, 2)]


def outputs_of(c, change, after, output) -> HeadOutputs:
    """Build from contributions and changes `[L, H, S, d]`, and the stream and output `[L, S, d]`."""
    flat = c.flatten(2)
    return HeadOutputs(
        gram=flat @ flat.mT,
        change=change.norm(dim=-1),
        residual_change=(change * after[:, None]).sum(-1),
        residual=after.norm(dim=-1),
        output=output.norm(dim=-1),
        hidden_size=c.shape[-1],
    )


def test_degenerate_rows():
    c = torch.zeros(1, 3, 2, 4, dtype=torch.float64)
    c[0, 0], c[0, 1] = 1.0, 2.0
    after = torch.ones(1, 2, 4, dtype=torch.float64)
    change = torch.stack([torch.zeros_like(after[0]), -after[0], -2 * after[0]])[None]
    outputs = outputs_of(c, change, after, torch.zeros(1, 2, 4, dtype=torch.float64))
    for name, expected in {
        "output_magnitude": [1.0, 2.0, 0.0],
        "redundancy": [-1.0, -1.0, 0.0],
        "residual_cosine": [0.0, 0.0, 2.0],
        "relative_output_change": [0.0, 2 / 1e-8, 4 / 1e-8],
    }.items():
        assert saf.score(statistics(torch.ones(1, 3)), name, outputs=outputs)[0].tolist() == pytest.approx(expected)
    alone = outputs_of(c[:, :1], change[:, :1], after, after)
    assert saf.score(statistics(torch.ones(1, 1)), "redundancy", outputs=alone).tolist() == [[1.0]]


def test_a_tiny_change_is_not_lost(generator):
    after = torch.randn(1, 6, 16, generator=generator, dtype=torch.float64)
    change = 1e-7 * torch.randn(1, 1, 6, 16, generator=generator, dtype=torch.float64)
    actual = saf.score(
        statistics(torch.ones(1, 1)), "residual_cosine", outputs=outputs_of(change, change, after, after)
    )
    along = (change[0, 0] * after[0]).sum(-1, keepdim=True) * after[0] / after[0].square().sum(-1)[:, None]
    expected = ((change[0, 0] - along).square().sum(-1) / after[0].square().sum(-1) / 2).mean()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_function_is_a_score_and_what_it_reads_is_collected():
    def spread(actual, *, row_variance, factor=2.0):
        return factor * row_variance.sum(-1)

    for name, expected in (("variance", VARIANCE), ("forward_kl", 1 - VARIANCE)):
        torch.testing.assert_close(saf.score(statistics(), name), expected, equal_nan=True)
    report = saf.freeze_(model(), [tokens()], saf.FreezeConfig(score=spread, rate=0.25, max_fit_kl=10.0))
    torch.testing.assert_close(report.scores, 2 * 4 * 40**2 / 4 * report.statistics.variance, rtol=1e-9, atol=0)
    with pytest.raises(InputError, match=r"needs row_variance: .*collect=\('row_variance',\)"):
        saf.score(statistics(), spread)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        (lambda actual: actual.variance[0], {}, "one number a head"),
        (lambda actual, *, factor: actual.variance, {}, "needs factor"),
        (lambda actual, factor: actual.variance, {}, "must take factor by keyword"),
        ("magic", {}, "score must be one of .*, got 'magic'"),
        ("gate_taylor", {"gates": GRADIENT[0]}, r"\[2, 3\]; got \[3\]"),
        ("rank_sum", {"gradient": GRADIENT[0]}, r"\[2, 3\]; got \[3\]"),
    ],
)
def test_wrong_requests_are_refused(name, inputs, message):
    with pytest.raises(InputError, match=message):
        saf.score(statistics(), name, **inputs)


def test_a_name_of_another_module_is_not_taken():
    def variance(actual):
        return actual.variance

    with pytest.raises(InputError, match=r"score 'variance' exists in saf\.scores"):
        head_score(variance)
    assert SCORES["variance"] is not variance


def test_random_scores_follow_the_seed_and_not_what_is_frozen():
    state = torch.get_rng_state()
    whole, part = (saf.score(each, "random", seed=3) for each in (statistics(torch.ones(2, 3)), statistics()))
    assert torch.equal(part.nan_to_num(0), whole.masked_fill(VARIANCE.isnan(), 0))
    assert not torch.equal(whole, saf.score(statistics(torch.ones(2, 3)), "random", seed=4))
    assert torch.equal(torch.get_rng_state(), state)
