"""Costs of single heads and of sets, against forward passes with patterns written out densely."""

import pytest
import torch

from saf.analysis.joint_cost import joint_cost
from saf.analysis.one_head import available_scores, fit_difference, one_head_costs, score_quality
from saf.calibration import QKGradient, calibrate
from saf.errors import InputError
from saf.estimates import target
from saf.evaluate.paired import paired_delta_ppl
from saf.fit import fit_compact, fit_kl
from saf.freezing.config import FreezeConfig
from saf.heads import HeadSet
from saf.patterns import CompactPattern
from saf.scores import SCORES
from saf.surgery import install_
from tests.freezing.small_model import accepting


@pytest.fixture
def statistics(model, ids):
    return calibrate(model, [ids], collect=("mean_rows",))


def fitted(statistics, heads):
    goal = target(statistics, heads)
    pattern = fit_compact(*goal[:2])
    return dict(zip(heads, pattern.dense(), strict=True)), dict(
        zip(heads, fit_kl(pattern, *goal).tolist(), strict=True)
    )


ALL = HeadSet((layer, head) for layer in range(3) for head in range(4))


def test_one_head_costs_are_those_of_the_dense_model(model, ids, windows, statistics, run_dense):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dense, kls = fitted(statistics, ALL)
    limit = sorted(kls.values())[7]
    config = FreezeConfig(max_fit_kl=limit + 1e-6, backend="reference")
    costs = one_head_costs(model, [ids], statistics, windows, config=config, batch_size=4)
    _, ordinary = run_dense(model, windows)
    assert costs.baseline == pytest.approx(-ordinary.mean().item(), abs=1e-6)
    for head in ALL:
        _, frozen = run_dense(model, windows, {head: dense[head]})
        expected = (ordinary - frozen).mean(1)
        assert torch.allclose(costs.by_window[head], expected, atol=1e-6)
        assert costs.change[head].item() == pytest.approx(expected.mean().item(), abs=1e-6)
        assert costs.fit_kl[head].item() == pytest.approx(kls[head], abs=1e-9)
    assert set(costs.eligible) == {head for head, kl in kls.items() if kl <= limit}
    assert len(costs.eligible) == 8
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_heads_that_are_frozen_already_stay_so_and_cost_nothing_more(model, ids, windows):
    flat = torch.zeros(1, 24, dtype=torch.float64)
    install_(model, HeadSet([(1, 2)]), CompactPattern.from_parameters(flat, flat), backend="reference")
    costs = one_head_costs(
        model, [ids], calibrate(model, [ids]), windows, config=FreezeConfig(max_fit_kl=9, backend="reference")
    )
    assert costs.change.isnan().nonzero().tolist() == [[1, 2]]
    assert len(costs.eligible) == 11


def test_scores_that_can_be_had(model, ids, heldout, statistics):
    without = {"qk_gradient", "rank_sum", "gradient_veto", "random"}
    found = available_scores(model, [ids], statistics, heldout=[heldout])
    assert found.keys() == SCORES.keys() - without
    gradient = QKGradient(model)
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradient.update()
    found = available_scores(model, [ids], statistics, needed={"gradient": gradient.scores()})
    assert found.keys() == {"variance", "forward_kl", "gate_taylor"} | without - {"random"}


def test_score_quality_over_eligible_heads(model, ids, windows, statistics):
    limit = sorted(fitted(statistics, ALL)[1].values())[7] + 1e-6
    config = FreezeConfig(max_fit_kl=limit, backend="reference")
    costs = one_head_costs(model, [ids], statistics, windows, config=config)
    values = statistics.variance.clone()
    found = score_quality(costs, {"variance": values, "itself": costs.change}, rates=(0.25, 0.0, 1.0))
    eligible = sorted(costs.eligible, key=lambda head: values[head].item())
    percent = {head: 100 * (costs.change[head].exp().item() - 1) for head in eligible}
    assert found["itself"].spearman == pytest.approx(1)
    assert found["variance"].mean_cost[0.25] == pytest.approx(sum(percent[head] for head in eligible[:3]) / 3)
    assert found["variance"].mean_cost[1.0] == pytest.approx(sum(percent.values()) / len(eligible))
    assert found["variance"].mean_cost[0.0] != found["variance"].mean_cost[0.0]


def test_joint_cost_is_that_of_the_dense_model(model, ids, windows, statistics, run_dense):
    first, second = HeadSet([(0, 0), (0, 2), (2, 1)]), HeadSet([(0, 2), (1, 1), (2, 1)])
    config = FreezeConfig(backend="reference")
    found = joint_cost(model, [ids], statistics, windows, first, second, config=config, batch_size=3)
    dense, _ = fitted(statistics, first | second)
    _, ordinary = run_dense(model, windows)
    one, other = (run_dense(model, windows, {head: dense[head] for head in heads})[1] for heads in (first, second))
    for got, pair in (
        (found.first, (ordinary, one)),
        (found.second, (ordinary, other)),
        (found.difference, (one, other)),
    ):
        expected = paired_delta_ppl(*pair)
        assert got["delta_ppl_percent"] == pytest.approx(expected["delta_ppl_percent"], abs=1e-4)
        assert got["ci95"] == pytest.approx(expected["ci95"], abs=1e-4)
    assert found.overlap == 2


def test_joint_cost_of_heads_that_are_not_live_is_refused(model, ids, windows, statistics):
    live = HeadSet([(0, 1)])
    with pytest.raises(InputError, match=r"frozen or do not exist: \[\[0, 9\], \[3, 0\]\]"):
        joint_cost(model, [ids], statistics, windows, live, HeadSet([(0, 9), (3, 0)]))
    flat = torch.zeros(1, 24, dtype=torch.float64)
    install_(model, HeadSet([(1, 2)]), CompactPattern.from_parameters(flat, flat), backend="reference")
    with pytest.raises(InputError, match=r"frozen or do not exist: \[\[1, 2\]\]"):
        joint_cost(model, [ids], statistics, windows, HeadSet([(1, 2)]), live)


@pytest.mark.parametrize("storage", ["compact", "dense"])
def test_under_autocast_no_stale_weight_is_used(model, ids, windows, storage):
    """Freezing one head permutes weights in place; a copy that autocast kept would belong to another order."""
    model = model.float()
    config = FreezeConfig(backend="reference", storage=storage, **accepting(storage=storage))
    statistics = calibrate(model, [ids])
    plain = one_head_costs(model, [ids], statistics, windows, config=config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = one_head_costs(model, [ids], statistics, windows, config=config)
    assert (plain.change - mixed.change).abs().max() < 0.1 * plain.change.abs().max()


def test_no_windows_are_refused(model, ids, statistics):
    with pytest.raises(InputError, match="windows"):
        one_head_costs(model, [ids], statistics, torch.zeros(0, 25, dtype=torch.long))


def test_layers_take_turns_and_costs_so_far_are_those_of_heads_measured(model, ids, windows, statistics):
    seen = []

    def progress(done, so_far):
        seen.append((done, so_far() if done == 4 else None))

    config = FreezeConfig(max_fit_kl=9, backend="reference")
    whole = one_head_costs(model, [ids], statistics, windows, config=config, progress=progress)
    assert [done for done, _ in seen] == list(range(1, 13))
    part = seen[3][1]
    assert set(part.eligible) == {(0, 0), (1, 0), (2, 0), (0, 1)}
    assert int((~part.change.isnan()).sum()) == 4
    for head in part.eligible:
        assert torch.equal(part.by_window[head], whole.by_window[head])


def test_two_fits_head_by_head_on_the_same_windows(model, ids, windows, statistics):
    goal, options = target(statistics, ALL), {"alpha_constant_after": 3}
    limit = fit_kl(fit_compact(*goal[:2], **options), *goal).sort().values[7].item() + 1e-9
    free, structured = (
        one_head_costs(
            model,
            [ids],
            statistics,
            windows,
            config=FreezeConfig(max_fit_kl=limit, backend="reference", fitter_options=options),
        )
        for limit, options in ((9, {}), (limit, options))
    )
    both = [head for head in ALL if head in structured.eligible]
    assert len(both) == 8
    found = fit_difference(free, structured)
    by_window = [
        sum(float(costs.by_window[head][w]) for head in both) / len(both)
        for costs in (free, structured)
        for w in range(6)
    ]
    gaps = [after - before for before, after in zip(by_window[:6], by_window[6:], strict=True)]
    assert found.heads == len(both)
    assert found.first == pytest.approx(sum(by_window[:6]) / 6)
    assert found.second == pytest.approx(sum(by_window[6:]) / 6)
    assert found.difference == pytest.approx(sum(gaps) / 6)
    # The mean of six values redrawn: within three standard errors of it, and not a point.
    spread = torch.tensor(gaps).std().item() / 6**0.5
    low, high = found.ci95
    assert found.difference - 3 * spread < low < found.difference < high < found.difference + 3 * spread
    assert fit_difference(free, structured, both[:1]).heads == 1
    with pytest.raises(InputError, match="no head is accepted"):
        fit_difference(free, structured, [head for head in ALL if head not in both])
    other = one_head_costs(model, [ids], statistics, windows[:4], config=FreezeConfig(backend="reference"))
    with pytest.raises(InputError, match="different windows"):
        fit_difference(free, other)
