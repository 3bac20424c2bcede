"""Heads picked out and laid out."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saf.ops.heads import _as_words, take_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test__as_words_heads_are_picked_as_they_are(dtype):
    x = torch.randn(2, 5, 4, 8).to(dtype).transpose(1, 2)  # [B, H, T, D], stored as [B, T, H, D]
    wide = _as_words(x)
    assert wide.dtype == torch.int64
    assert torch.equal(take_heads(wide, (3, 0, 2)).view(dtype), take_heads(x, (3, 0, 2)))


def test_what_does_not_lie_in_8_bytes_is_left():
    x = torch.randn(2, 4, 5, 12).to(torch.bfloat16)
    for odd in (x[..., 1:9], x[..., :6], x.transpose(2, 3), x.double(), x.flatten()[2:466].view(2, 29, 8)):
        assert _as_words(odd) is odd


class Copies(TorchDispatchMode):
    """Keep the dtypes in which heads are copied."""

    def __init__(self):
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.stack.default:
            self.dtypes.append(args[0][0].dtype)
        return operator(*args, **(kwargs or {}))


def test_heads_are_copied_in_8_bytes_where_nothing_is_derived():
    x = torch.randn(2, 4, 5, 8).to(torch.bfloat16).transpose(1, 2).requires_grad_()
    with Copies() as copies:
        derived = take_heads(x, (3, 0, 2))
        with torch.no_grad():
            taken = take_heads(x, (3, 0, 2))
    assert copies.dtypes == [torch.bfloat16, torch.int64]
    assert derived.grad_fn is not None
    assert torch.equal(derived, taken)


def test_a_tangent_stays_without_gradients():
    x = torch.randn(2, 5, 4, 8)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda one: take_heads(one, (3, 0, 2)), (x,), (2 * x,))
    assert torch.equal(tangent, 2 * x[:, [3, 0, 2]])
