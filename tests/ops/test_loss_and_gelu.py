"""The operators around a decoder's layers in plain PyTorch: GELU with its projection, picked heads."""

import pytest
import torch
from torch.nn import functional as F

from saf.ops import loss_and_gelu
from saf.ops.loss_and_gelu import gelu_linear
from saf.ops.tensors import take_heads


def test_gelu_before_a_projection_has_its_gradients_and_keeps_the_input_alone(monkeypatch):
    monkeypatch.setattr(loss_and_gelu, "recomputes", lambda x: True)  # as on CUDA
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 8), (3, 8)))
    target, saved = torch.randn(2, 5, 3, dtype=torch.float64), []
    compiled = torch.compile(gelu_linear, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = gelu_linear(x, weight)
    assert [tensor.shape for tensor in saved] == [x.shape, weight.shape]
    expected = torch.autograd.grad(F.linear(F.gelu(x), weight), (x, weight), target)
    for actual in (output, compiled(x, weight)):
        torch.testing.assert_close(torch.autograd.grad(actual, (x, weight), target), expected)
    assert torch.autograd.gradcheck(gelu_linear, (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert gelu_linear(x.float(), weight.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_picked_with_gradients_and_tangents(dtype):
    for x in (torch.randn(2, 5, 4, 8), torch.randn(2, 5, 4, 9)[..., 1:], torch.randn(2, 5, 4, 6)):
        heads = x.to(dtype).transpose(1, 2)  # [B, H, T, D], stored as [B, T, H, D]
        picked, leaf = heads[:, [3, 0, 2]], heads.clone().requires_grad_()
        assert torch.equal(take_heads(heads, (3, 0, 2)), picked)
        take_heads(leaf, (3, 0, 2)).sum().backward()
        assert leaf.grad.sum((0, 2, 3)).tolist() == [heads[:, 0].numel() * read for read in (1, 0, 1, 1)]
        with torch.no_grad():
            _, tangent = torch.func.jvp(lambda one: take_heads(one, (3, 0, 2)), (heads,), (2 * heads,))
        assert torch.equal(tangent, 2 * picked)
