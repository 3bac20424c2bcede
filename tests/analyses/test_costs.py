"""Costs of single heads and of sets, against forward passes with patterns written out densely."""

import pytest
import torch

from experiments.analyses.common import CostMeter
from experiments.analyses.costs import one_head_costs
from saf.calibration import calibrate
from saf.fit import fit_compact
from saf.fit import fit_kl as fit_kl_of
from saf.freeze_config import FreezeConfig
from saf.freezing import fit_heads
from saf.heads import HeadSet
from saf.machine import Stopwatch
from saf.patterns import CompactPattern
from saf.surgery import install_
from saf.targets import target
from tests.surgery.test_install import by_hand

ALL = HeadSet((layer, head) for layer in range(3) for head in range(4))


def costs_of(model, ids, windows, **config):
    statistics, settings = calibrate(model, [ids]), FreezeConfig(backend="reference", **config)
    live = HeadSet((layer, head) for layer, head in statistics.measured.nonzero().tolist())
    fits = fit_heads(model, [ids], statistics, live, settings, Stopwatch())
    meter = CostMeter(model, windows, batch_size=4)
    return one_head_costs(meter, fits, settings.backend, tuple(statistics.variance.shape))


@torch.no_grad()
def losses(model, windows, heads, fixed):
    """Mean loss of each window, heads' patterns replaced by `fixed [F, T, T]`."""
    logits = by_hand(model, windows[:, :-1], heads, fixed)
    return torch.nn.functional.cross_entropy(logits.mT, windows[:, 1:], reduction="none").mean(1)


def test_one_head_costs_are_those_of_the_dense_model(model, ids, windows):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    goal = target(calibrate(model, [ids]), ALL)
    patterns = fit_compact(*goal[:2])
    by_window, fit_kl = costs_of(model, ids, windows)
    ordinary = losses(model, windows, HeadSet(), None)
    for head, pattern, kl in zip(ALL, patterns, fit_kl_of(patterns, *goal).tolist(), strict=True):
        frozen = losses(model, windows, HeadSet([head]), pattern.dense()[None])
        assert torch.allclose(by_window[head], frozen - ordinary, atol=1e-6)
        assert fit_kl[head].item() == pytest.approx(kl, abs=1e-9)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_heads_that_are_frozen_already_have_no_cost(model, ids, windows):
    flat = torch.zeros(1, 24, dtype=torch.float64)
    install_(model, HeadSet([(1, 2)]), CompactPattern.from_parameters(flat, flat), backend="reference")
    for values in costs_of(model, ids, windows, max_fit_kl=9):
        assert values.view(3, 4, -1)[..., 0].isnan().nonzero().tolist() == [[1, 2]]
