"""`gelu_linear`: the operators' plain PyTorch form, what they keep, and that they compile into one graph."""

import pytest
import torch
from torch.nn import functional as F

from saf.ops import decoder as module
from saf.ops.decoder import gelu, gelu_backward_, gelu_linear


@pytest.fixture
def recomputing(monkeypatch):
    """Take the path that CUDA takes, with the operators' PyTorch form."""
    monkeypatch.setattr(module, "recomputes", lambda x: True)


def loss_of(x, weight, target):
    return (gelu_linear(x, weight) * target).sum()


def gradients(function, *tensors):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def test_gradients_are_those_of_gelu_and_linear(recomputing):
    x, weight, target = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 5, 8), (3, 8), (2, 5, 3)))
    expected = gradients(lambda x, w: (F.linear(F.gelu(x), w) * target).sum(), x, weight)
    torch.testing.assert_close(gradients(lambda x, w: loss_of(x, w, target), x, weight), expected)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    assert torch.autograd.gradcheck(gelu_linear, leaves)


def test_only_the_input_and_the_weight_are_kept(recomputing):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        gelu_linear(x, weight)
    assert [tensor.shape for tensor in kept] == [x.shape, weight.shape]


def test_compiles_as_one_graph(recomputing):
    x, weight, target = torch.randn(2, 5, 8), torch.randn(3, 8), torch.randn(2, 5, 3)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    found = gradients(lambda x, w: compiled(x, w, target), x, weight)
    torch.testing.assert_close(found, gradients(lambda x, w: loss_of(x, w, target), x, weight))


def test_autocast_runs_the_product_in_its_dtype():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert gelu_linear(x, weight).dtype == torch.bfloat16


def test_operators_are_registered_as_they_behave():
    x = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(gelu, (x.detach(),))
    torch.library.opcheck(gelu_backward_, (x.detach(), torch.randn(3, 8)))
