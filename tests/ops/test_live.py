"""Kernels of live heads by name: pinning PyTorch's own, packages that users may have, and refusals."""

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


class StandIn:
    """A package's kernels: what SDPA's flash operator runs on a CPU while it is active."""

    def __init__(self):
        self.calls, self.library = 0, torch.library.Library("aten", "IMPL")

    def __call__(self) -> "StandIn":
        self.library.impl("_scaled_dot_product_flash_attention_for_cpu", self.attend, "CPU")
        return self

    def attend(self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        self.calls += 1
        scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def remove(self) -> None:
        self.library._destroy()


def test_a_package_is_activated_once_and_stays_the_only_one(operands, monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", stand_in)
    monkeypatch.setattr(flash, "unsupported_reason", lambda kernel, device: None)
    expected = live_attention(*operands, kernel="math")
    for _ in range(2):
        torch.testing.assert_close(live_attention(*operands, kernel="fa3"), expected)
    assert stand_in.calls == 2
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
