"""What every pattern keeps to: causal rows that sum to one, one draw for a seed and a head, compact where it can be."""

from dataclasses import replace

import pytest
import torch

from saf.errors import InputError
from saf.fit import fit_compact, fit_kl, marginals
from saf.patterns import CompactPattern
from saf.targets import TARGETS, collect_for, dense_pattern, exact_pattern, target, target_of

SAMPLED = ("gaussian", "dirichlet", "structured_random")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("count", "length"), [(6, 20), (1, 20), (6, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_causal_and_sum_to_one(name, count, length, dtype, make_logits, make_statistics, heads):
    pattern = dense_pattern(make_statistics(make_logits(count, length)), heads, name, dtype=dtype)
    assert pattern.weights.shape == (3, length, length)
    assert pattern.weights.dtype == dtype
    assert not pattern.weights.triu(1).any()
    tolerance = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    assert ((pattern.weights.double().sum(-1) - 1).abs() <= tolerance).all()
    assert (pattern.weights >= 0).all()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("storage", ["dense", "compact"])
def test_collect_for_names_all_that_is_read_and_nothing_else(name, storage, make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    names = collect_for(name, storage)
    make = dense_pattern if storage == "dense" else target
    make(replace(found, collected={key: found.collected[key] for key in names}), heads, name)
    for key in names:
        lacking = {other: tensor for other, tensor in found.collected.items() if other != key}
        with pytest.raises(InputError, match=rf"no '{key}' of heads .*collect=\('{key}',\)"):
            make(replace(found, collected=lacking), heads, name)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_draw_depends_on_seed_layer_and_head_alone(name, make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    state = torch.get_rng_state()
    whole = dense_pattern(found, heads, name, dtype=torch.float64, seed=5).weights
    for number, head in enumerate(heads):
        assert torch.equal(dense_pattern(found, [head], name, dtype=torch.float64, seed=5).weights[0], whole[number])
    other = dense_pattern(found, heads, name, dtype=torch.float64, seed=6).weights
    assert (other - whole).abs().amax((1, 2)).min() > 1e-3
    assert (whole[0] - whole[1]).abs().max() > 1e-3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_generator_draws_one_seed_for_all_heads(name, make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    generator, twin, third, fourth = (torch.Generator().manual_seed(7) for _ in range(4))
    state = torch.get_rng_state()
    whole = dense_pattern(found, heads, name, dtype=torch.float64, seed=generator).weights
    # A head draws the same alone as with the others, from a generator in the same state.
    last = list(heads)[-1]
    assert torch.equal(dense_pattern(found, [last], name, dtype=torch.float64, seed=twin).weights[0], whole[-1])
    if (exact := exact_pattern(found, heads, name, seed=fourth)) is not None:
        torch.testing.assert_close(exact.dense(), whole, rtol=0, atol=1e-12)
    for one, other in zip(target(found, heads, name, seed=third), target_of(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # The generators have moved on alike, the global one has not.
    assert torch.equal(generator.get_state(), twin.get_state())
    assert torch.equal(generator.get_state(), third.get_state())
    again = dense_pattern(found, heads, name, dtype=torch.float64, seed=generator).weights
    assert (again - whole).abs().amax((1, 2)).min() > 1e-3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TARGETS)
def test_the_compact_target_is_that_of_the_dense_pattern(name, make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    dense = dense_pattern(found, heads, name, dtype=torch.float64, seed=2).weights
    if (exact := exact_pattern(found, heads, name, seed=2)) is not None:
        torch.testing.assert_close(exact.dense(), dense, rtol=0, atol=1e-12)
        return
    compact = target(found, heads, name, seed=2)
    for one, other in zip(compact, target_of(dense), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    fitted = fit_compact(compact.eta_abs, compact.eta_rel)
    entry = torch.xlogy(dense, dense) - torch.xlogy(dense, fitted.dense())
    torch.testing.assert_close(fit_kl(fitted, *compact), entry.sum((1, 2)) / 20, rtol=1e-4, atol=1e-6)


def test_the_target_of_a_compact_pattern_is_itself():
    pattern = CompactPattern.from_parameters(*torch.randn(2, 3, 30, dtype=torch.float64))
    goal = target_of(pattern.dense())
    for one, other in zip(goal[:2], marginals(pattern), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert fit_kl(pattern, *goal).abs().max() < 1e-6


def test_zeros_are_floored_before_marginals_are_taken():
    weights = torch.eye(6, dtype=torch.float64)[None]
    goal = target_of(weights)
    assert (goal.eta_abs > 0).all()
    assert goal.eta_rel[0, 1:].tolist() == pytest.approx([5e-9, 4e-9, 3e-9, 2e-9, 1e-9], rel=1e-6)
    assert 0 < goal.row_entropy.item() < 1e-6


@pytest.mark.parametrize("name", ["sharp_mean", "gaussian", "dirichlet"])
def test_with_one_sequence_nothing_is_left_to_sample(name, make_logits, make_statistics, heads):
    logits = make_logits(count=1)
    found = dense_pattern(make_statistics(logits), heads, name, dtype=torch.float64, seed=3)
    torch.testing.assert_close(found.weights, logits[:, 0].softmax(-1), rtol=1e-12, atol=1e-15)


def test_wrong_requests_are_refused(make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    for arguments, options, message in [
        ((heads, "median"), {}, "unknown pattern 'median'"),
        ((heads, "gaussian"), {"scale": 2}, "'gaussian' takes seed; got scale"),
        ((heads, "mean"), {"scale": 2}, "'mean' takes no options"),
        (([], "mean"), {}, "at least one head"),
        ((heads, "dirichlet"), {"scale": 0}, "scale must be above 0"),
        ((heads, "dirichlet"), {"bounds": (2, 1)}, "bounds ascending above 0"),
        ((heads, "gaussian"), {"seed": -1}, "integer from 0 on, or a torch.Generator .*; got -1"),
    ]:
        for make in (dense_pattern, target):
            with pytest.raises(InputError, match=message):
                make(found, *arguments, **options)
    with pytest.raises(InputError, match="unknown pattern"):
        collect_for("median")
