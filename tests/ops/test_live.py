"""Kernels of live heads by name: pinning PyTorch's own, packages that users may have, and refusals."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, _registry, sdpa_kernel

from saf.errors import InputError, UnsupportedError
from saf.ops import live as flash
from saf.ops import live_attention
from saf.ops.live import KERNELS, pinned

CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def operands(generator) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]


@pytest.fixture
def process(monkeypatch):
    """A process in which nothing has been decided yet; whatever a test activates is undone."""
    monkeypatch.setattr(flash, "_activated", {})
    yield
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


class StandIn:
    """A package's kernels: what SDPA's flash operator runs on a CPU while it is active."""

    def __init__(self):
        self.calls = 0
        self.library = torch.library.Library("aten", "IMPL")

    def __call__(self) -> "StandIn":
        self.library.impl(CPU_FLASH, self.attend, "CPU")
        return self

    def attend(self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        self.calls += 1
        scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def remove(self) -> None:
        self.library._destroy()


@pytest.mark.parametrize("kernel", ["fa3", "fa4"])
@pytest.mark.usefixtures("process")
def test_a_package_is_activated_once_and_runs(kernel, operands, monkeypatch):
    stand_in = StandIn()
    name = flash.FLASH_PACKAGES[kernel].implementation
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, stand_in)
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    expected = live_attention(*operands, kernel="math")
    for _ in range(2):
        torch.testing.assert_close(live_attention(*operands, kernel=kernel), expected)
    assert stand_in.calls == 2
    assert torch.nn.attention.current_flash_attention_impl() == name
    with pytest.raises(UnsupportedError, match=f"'flash' cannot run: this process already uses '{kernel}'"):
        live_attention(*operands, kernel="flash")


@pytest.mark.usefixtures("process")
def test_after_pytorchs_own_flash_kernel_a_package_is_refused(operands, monkeypatch):
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    live_attention(*operands, kernel="flash")
    with pytest.raises(UnsupportedError, match="already uses 'flash' for flash attention"):
        live_attention(*operands, kernel="fa3")


@pytest.mark.usefixtures("process")
def test_what_keeps_a_package_from_running_is_named(operands, monkeypatch):
    with pytest.raises(UnsupportedError, match="'fa3' cannot run: it needs CUDA tensors, these are on cpu"):
        live_attention(*operands, kernel="fa3")
    assert "flash_attn_interface cannot be found" in str(flash.unsupported_reason("fa3", "cuda"))
    assert "pip install flash-attn-4" in str(flash.unsupported_reason("fa4", "cuda"))

    def broken():
        raise RuntimeError("built for another PyTorch")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", broken)
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    with pytest.raises(UnsupportedError, match="RuntimeError while activating FA3: built for another PyTorch"):
        live_attention(*operands, kernel="fa3")
    live_attention(*operands, kernel="flash")


def test_unknown_kernels_are_refused(operands):
    with pytest.raises(InputError, match=r"unknown attention kernel 'fa5'; expected 'auto' or one of \['cudnn'"):
        live_attention(*operands, kernel="fa5")


ALL = {name: getattr(SDPBackend, backend) for name, backend in attention._backend_names.items()}
OUTER = ([SDPBackend.MATH], [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], list(ALL.values()))
CUDA = torch.device("cuda")


def switches() -> dict[str, bool]:
    """Every kernel that PyTorch knows, and whether it may run."""
    return {name: getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ALL}


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("outer", OUTER, ids=len)
def test_pinning_sets_what_sdpa_kernel_would_and_restores_what_was(kernel, outer):
    with sdpa_kernel(outer):
        before = switches()
        with sdpa_kernel(KERNELS[kernel]):
            expected = switches()
        with pinned(kernel, CUDA):
            assert switches() == expected
        with pinned("auto", CUDA):
            assert switches() == before
        with pytest.raises(KeyError), pinned(kernel, CUDA):
            raise KeyError
        assert switches() == before
    assert sum(expected.values()) == 1


@pytest.mark.usefixtures("process")
def test_a_pinned_flash_kernel_compiles_whole(operands):
    compiled = torch.compile(lambda *x: live_attention(*x, kernel="flash"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), live_attention(*operands, kernel="flash"))
