"""Flash kernels of packages that users may have: one for a process, and refusals; test_attention.py has the others."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry

from saf.errors import InputError, UnsupportedError
from saf.ops import live, live_attention


@pytest.fixture
def operands(generator) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process with FlashAttention-3, in which nothing has been activated yet."""
    monkeypatch.setattr(live, "_activated", [])
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: SimpleNamespace(remove=lambda: None))
    yield
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize(("first", "other"), [("fa3", "flash"), ("flash", "fa3")])
def test_the_first_flash_kernel_of_a_process_stays_the_only_one(operands, first, other, monkeypatch):
    monkeypatch.setattr(live, "unsupported_reason", lambda kernel, device: None)
    expected = live_attention(*operands, kernel="math")
    for _ in range(2):
        torch.testing.assert_close(live_attention(*operands, kernel=first), expected)
    with pytest.raises(UnsupportedError, match=f"{other!r} cannot run: this process already uses {first!r}"):
        live_attention(*operands, kernel=other)


def test_unknown_and_missing_kernels_are_refused(operands):
    with pytest.raises(InputError, match=r"attention kernel must be one of .*got 'fa5'"):
        live_attention(*operands, kernel="fa5")
    with pytest.raises(UnsupportedError, match="'fa3' cannot run: it needs CUDA tensors"):
        live_attention(*operands, kernel="fa3")
    assert "pip install flash-attn-4" in str(live.unsupported_reason("fa4", "cuda"))


def test_a_pinned_flash_kernel_compiles_whole(operands):
    compiled = torch.compile(lambda *x: live_attention(*x, kernel="flash"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), live_attention(*operands, kernel="flash"))
