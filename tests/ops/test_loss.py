"""The loss operator in plain PyTorch: values, gradients over the logits, ignored rows."""

import pytest
import torch
from torch.nn import functional as F

from saf.errors import InputError
from saf.ops.decoder import softmax_gradient_


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_cross_entropy(dtype):
    logits = (3 * torch.randn(6, 50)).to(dtype)
    labels, count = torch.tensor([0, 49, -100, 7, -100, 7]), torch.tensor(4)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    (expected.sum() / count).backward()
    losses = softmax_gradient_(logits, labels, count)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses, expected.to(losses.dtype))
    torch.testing.assert_close(logits, wide.grad.to(dtype))
    assert not logits[[2, 4]].any()


def test_the_operator_is_registered_as_it_behaves():
    torch.library.opcheck(softmax_gradient_, (torch.randn(5, 11), torch.tensor([1, 2, -100, 0, 10]), torch.tensor(4)))


def test_rows_left_out_altogether_have_no_gradient():
    logits = torch.randn(2, 5)
    losses = softmax_gradient_(logits, torch.tensor([-100, -100]), torch.tensor(0))
    assert not losses.any()
    assert not logits.any()


@pytest.mark.parametrize("label", [-1, 5, -99])
def test_labels_that_are_no_columns_are_refused(label):
    logits = torch.randn(2, 5)
    with pytest.raises(InputError, match=f"tokens 0 to 4, or -100 to leave one out; got {label}"):
        softmax_gradient_(logits, torch.tensor([1, label]), torch.tensor(2))
    with pytest.raises(InputError, match=r"labels must be \[2\]"):
        softmax_gradient_(logits, torch.tensor([1, 2, 3]), torch.tensor(2))
