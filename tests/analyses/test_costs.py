"""Costs of single heads and of sets, against forward passes with patterns written out densely."""

import pytest
import torch

from experiments.analyses.common import CostMeter
from experiments.analyses.costs import one_head_costs
from saf.calibration import calibrate
from saf.fit import fit_compact, fit_kl
from saf.freeze_config import FreezeConfig
from saf.freezing import fit_heads
from saf.heads import HeadSet
from saf.machine import Stopwatch
from saf.patterns import CompactPattern
from saf.surgery import install_
from saf.targets import target
from tests.freezing.small_model import accepting

ALL = HeadSet((layer, head) for layer in range(3) for head in range(4))


@pytest.fixture
def statistics(model, ids):
    return calibrate(model, [ids])


@pytest.fixture
def fitted(statistics):
    """Fitted patterns of all heads, and the fits' KL."""
    goal = target(statistics, ALL)
    pattern = fit_compact(*goal[:2])
    return dict(zip(ALL, pattern, strict=True)), dict(zip(ALL, fit_kl(pattern, *goal).tolist(), strict=True))


def costs_of(model, ids, windows, **config):
    statistics, settings = calibrate(model, [ids]), FreezeConfig(backend="reference", **config)
    live = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
    fits = fit_heads(model, [ids], statistics, live, settings, Stopwatch())
    meter = CostMeter(model, windows, batch_size=4)
    return one_head_costs(meter, fits, settings.backend, tuple(statistics.variance.shape))


def test_one_head_costs_are_those_of_the_dense_model(model, ids, windows, fitted, run_dense):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patterns, kls = fitted
    by_window, fit_kl = costs_of(model, ids, windows)
    _, ordinary = run_dense(model, windows)
    for head in ALL:
        _, frozen = run_dense(model, windows, {head: patterns[head].dense()})
        assert torch.allclose(by_window[head], (ordinary - frozen).mean(1), atol=1e-6)
        assert fit_kl[head].item() == pytest.approx(kls[head], abs=1e-9)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_heads_that_are_frozen_already_stay_so_and_have_no_cost(model, ids, windows):
    flat = torch.zeros(1, 24, dtype=torch.float64)
    install_(model, HeadSet([(1, 2)]), CompactPattern.from_parameters(flat, flat), backend="reference")
    for values in costs_of(model, ids, windows, max_fit_kl=9):
        assert values.view(3, 4, -1)[..., 0].isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("storage", ["compact", "dense"])
def test_under_autocast_no_stale_weight_is_used(model, ids, windows, storage):
    """Freezing one head permutes weights in place; a copy that autocast kept would belong to another order."""
    model = model.float()
    config = {"storage": storage, **accepting(storage=storage)}
    plain = costs_of(model, ids, windows, **config)[0].mean(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = costs_of(model, ids, windows, **config)[0].mean(-1)
    assert (plain - mixed).abs().max() < 0.1 * plain.abs().max()
