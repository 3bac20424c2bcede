"""The operators around a decoder's layers in plain PyTorch: the loss, GELU with its projection, picked heads."""

import pytest
import torch
from torch.nn import functional as F

from saf.errors import InputError
from saf.ops import loss_and_gelu
from saf.ops.heads import take_heads
from saf.ops.loss_and_gelu import gelu_linear, softmax_gradient_


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_cross_entropy(dtype):
    logits = (3 * torch.randn(6, 50)).to(dtype)
    labels, count = torch.tensor([0, 49, -100, 7, -100, 7]), torch.tensor(4)
    wide = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    (expected.sum() / count).backward()
    losses = softmax_gradient_(logits, labels, count)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses, expected.to(losses.dtype))
    torch.testing.assert_close(logits, wide.grad.to(dtype))
    assert not softmax_gradient_(logits, torch.full((6,), -100), torch.tensor(0)).any()
    assert not logits.any()


@pytest.mark.parametrize("label", [-1, 5, -99])
def test_labels_that_are_no_columns_are_refused(label):
    with pytest.raises(InputError, match=f"tokens 0 to 4, or -100 to leave one out; got {label}"):
        softmax_gradient_(torch.randn(2, 5), torch.tensor([1, label]), torch.tensor(2))


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
