"""A model compiled by its layers: how many programs an event compiles, and the same loss and gradients."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import saf
from saf.models import by_layer
from saf.ops import attention as seam

LENGTH = 16


@pytest.fixture
def counted(monkeypatch):
    """Compile with a backend that counts, and with nothing compiled before."""
    graphs = EagerAndRecordGraphs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    monkeypatch.setattr(by_layer, "_programs", {})
    return graphs


@pytest.fixture
def model():
    config = saf.preset("tiny", vocab_size=40, num_layers=4, num_heads=4, hidden_size=32, max_length=LENGTH)
    model = saf.GPT(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def freeze(model, *heads, **options):
    generator = torch.Generator().manual_seed(len(heads))
    alpha, rho = (torch.randn(len(heads), LENGTH, generator=generator) for _ in range(2))
    saf.install_(model, heads, saf.CompactPattern.from_parameters(alpha, rho), **options)


def check_equal(model):
    """Check loss and every gradient against the model itself; return how many programs are new."""
    compiled = by_layer.CompiledByLayer(model)
    ids = torch.randint(0, 40, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    found = []
    for call in (compiled, model):
        model.zero_grad(set_to_none=True)
        loss = call(ids[:, :-1], targets=ids[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    return compiled.num_new_programs


def test_an_event_compiles_the_layouts_that_are_new(model, counted):
    """One program for all layers of a layout, one for all MLPs, one for the loss; the choice of heads is no layout."""

    def programs(new):
        before = len(counted.graphs)
        assert check_equal(model) == new
        return len(counted.graphs) - before

    assert programs(3) == 3
    freeze(model, (0, 1), (2, 3))
    assert programs(1) == 1
    freeze(model, (1, 0), (3, 2))
    assert programs(0) == 0
    freeze(model, (0, 0), (0, 2), (0, 3))
    assert programs(1) == 1
    saf.uninstall_(model)
    assert programs(0) == 0


def test_the_sum_of_both_products_is_left_to_the_program_that_norms_it(model, counted, monkeypatch):
    """Of many tokens live and frozen heads are projected apart: the layer's MLP has a program that adds both."""
    monkeypatch.setattr(seam, "JOINED", 0)
    freeze(model, (0, 1), (2, 3))
    check_equal(model)
    assert len(counted.graphs) == 5, "attention with and without a frozen head, the MLP behind each, the loss"


def test_trained_patterns_are_inputs_of_the_program(model, counted):
    freeze(model, (0, 1), (1, 2), trainable=True)
    check_equal(model)
    compiled = len(counted.graphs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.linspace(0, 1, len(parameter)) if "pattern" in name else 0
    assert check_equal(model) == 0
    assert len(counted.graphs) == compiled


def test_under_autocast_the_first_layer_is_the_same_program(model, counted):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check_equal(model) == 3
    assert len(counted.graphs) == 3
