"""Heads picked out and laid out."""

import pytest
import torch

from saf.ops.heads import take_heads, widened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widened_heads_are_picked_as_they_are(dtype):
    x = torch.randn(2, 5, 4, 8).to(dtype).transpose(1, 2)  # [B, H, T, D], stored as [B, T, H, D]
    wide = widened(x)
    assert wide.dtype == torch.int64
    assert torch.equal(take_heads(wide, (3, 0, 2)).view(dtype), take_heads(x, (3, 0, 2)))


def test_what_does_not_lie_in_8_bytes_is_left():
    x = torch.randn(2, 4, 5, 12).to(torch.bfloat16)
    for odd in (x[..., 1:9], x[..., :6], x.transpose(2, 3), x.double(), x.flatten()[2:466].view(2, 29, 8)):
        assert widened(odd) is odd
