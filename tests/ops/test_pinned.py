"""Pinning a kernel of live heads: PyTorch's own context, only cheaper."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saf.ops import live as flash
from saf.ops.live import KERNELS, live_attention, pinned

ALL = {name: getattr(SDPBackend, backend) for name, backend in attention._backend_names.items()}
OUTER = ([SDPBackend.MATH], [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], list(ALL.values()))
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def process(monkeypatch):
    monkeypatch.setattr(flash, "_activated", {})


def switches() -> dict[str, bool]:
    """Every kernel that PyTorch knows, and whether it may run."""
    return {name: getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ALL}


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("outer", OUTER, ids=len)
def test_sets_what_pytorch_would_and_restores_what_was(kernel, outer):
    default = switches()
    with sdpa_kernel(outer):
        before = switches()
        assert before == {name: backend in outer for name, backend in ALL.items()}
        with sdpa_kernel(KERNELS[kernel]):
            expected = switches()
        with pinned(kernel, CUDA):
            assert switches() == expected
        assert switches() == before
    assert switches() == default
    assert sum(expected.values()) == 1


@pytest.mark.parametrize("outer", OUTER, ids=len)
def test_restores_after_an_exception_and_when_nested(outer):
    with sdpa_kernel(outer):
        before = switches()
        with pinned("cudnn", CUDA):
            middle = switches()
            with pytest.raises(KeyError), pinned("math", CUDA):
                raise KeyError
            assert switches() == middle
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                assert switches() != middle
            assert switches() == middle
        assert switches() == before


def test_auto_leaves_the_callers_choice():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        before = switches()
        with pinned("auto", CUDA):
            assert switches() == before


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_what_a_pinned_kernel_cannot_do_is_pytorchs_error():
    """The CPU's flash kernel takes no values of another width; PyTorch's own order would find one that does."""
    query, value = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 4)
    assert live_attention(query, query, value).shape == value.shape
    with pytest.raises(RuntimeError) as theirs, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(query, query, value, is_causal=True)
    before = switches()
    with pytest.raises(RuntimeError) as ours:
        live_attention(query, query, value, kernel="flash")
    assert str(ours.value) == str(theirs.value)
    assert switches() == before


def test_compiled_code_takes_pytorchs_context(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert type(pinned("math", CPU)) is type(sdpa_kernel(SDPBackend.MATH))
