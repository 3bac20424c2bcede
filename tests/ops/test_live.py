"""Kernels of live heads by name: pinning PyTorch's own, packages that users may have, and refusals."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry

from saf.errors import InputError, UnsupportedError
from saf.ops import live as flash
from saf.ops import live_attention


@pytest.fixture
def operands(generator) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process in which nothing has been decided yet; whatever a test activates is undone."""
    monkeypatch.setattr(flash, "_activated", {})
    yield
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def test_a_package_is_activated_once_and_stays_the_only_one(operands, monkeypatch):
    activated = SimpleNamespace(remove=lambda: None)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: activated)
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    expected = live_attention(*operands, kernel="math")
    for _ in range(2):
        torch.testing.assert_close(live_attention(*operands, kernel="fa3"), expected)
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    with pytest.raises(UnsupportedError, match="'flash' cannot run: this process already uses 'fa3'"):
        live_attention(*operands, kernel="flash")


def test_a_package_that_is_missing_broken_or_too_late_is_refused(operands, monkeypatch):
    def broken():
        raise RuntimeError("built for another PyTorch")

    with pytest.raises(InputError, match=r"attention kernel must be one of .*got 'fa5'"):
        live_attention(*operands, kernel="fa5")
    with pytest.raises(UnsupportedError, match="'fa3' cannot run: it needs CUDA tensors"):
        live_attention(*operands, kernel="fa3")
    assert "pip install flash-attn-4" in str(flash.unsupported_reason("fa4", "cuda"))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", broken)
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    with pytest.raises(UnsupportedError, match="RuntimeError while activating FA3"):
        live_attention(*operands, kernel="fa3")
    live_attention(*operands, kernel="flash")
    with pytest.raises(UnsupportedError, match="already uses 'flash'"):
        live_attention(*operands, kernel="fa3")


def test_a_pinned_flash_kernel_compiles_whole(operands):
    compiled = torch.compile(lambda *x: live_attention(*x, kernel="flash"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), live_attention(*operands, kernel="flash"))
