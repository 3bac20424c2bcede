"""Attention kernels by name: what is refused, and what compiles; test_attention.py has the rest of live heads."""

import pytest
import torch

from saf.errors import InputError, UnsupportedError
from saf.ops import live_attention


@pytest.fixture
def operands(generator) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]


def test_unknown_kernels_and_those_that_need_cuda_are_refused(operands):
    with pytest.raises(InputError, match=r"attention kernel must be one of .*got 'fa5'"):
        live_attention(*operands, kernel="fa5")
    with pytest.raises(UnsupportedError, match="'cudnn' needs a CUDA device"):
        live_attention(*operands, kernel="cudnn")


def test_a_pinned_flash_kernel_compiles_whole(operands):
    compiled = torch.compile(lambda *x: live_attention(*x, kernel="flash"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), live_attention(*operands, kernel="flash"))
