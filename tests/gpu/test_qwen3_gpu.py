"""Qwen3 of transformers on a CUDA device: grouped queries in 16 bits, compiled whole, replayed as a graph."""

import pytest
import torch

import saf
from saf.bench.record import kernel_seen, kernels_of
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from saf.synthetic import synthetic_patterns

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu
CUDA, LENGTH, VOCAB = torch.device("cuda"), 300, 512
HEADS = HeadSet([(0, 1), (0, 2), (1, 0), (1, 1), (1, 5), (2, 7)])
"""In layer 1 the whole first group of two."""


def make(dtype: torch.dtype) -> torch.nn.Module:
    from saf.hf.families import random_model

    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    generator = torch.Generator("cuda").manual_seed(0)
    return random_model("Qwen3", max_length=LENGTH, device=CUDA, dtype=dtype, generator=generator, **sizes).eval()


def freeze_(model: torch.nn.Module, backend: str, kernel: str) -> None:
    patterns = synthetic_patterns(len(HEADS), LENGTH, torch.Generator().manual_seed(0), "cuda")
    saf.install_(model, HEADS, patterns, backend=backend)
    for site in adapter_for(model).sites():
        site.pin(kernel)


@pytest.mark.parametrize("backend", ["toeplitz", "fused"])
def test_sixteen_bits_agree_with_the_reference_in_float32(backend):
    exact, model = make(torch.float32), make(torch.bfloat16)
    freeze_(exact, "reference", "math")
    freeze_(model, backend, "auto")
    tokens = torch.randint(0, VOCAB, (2, LENGTH - 7), device="cuda")
    with torch.no_grad():
        expected, actual = (each(tokens, use_cache=False).logits.float() for each in (exact, model))
    assert (actual - expected).norm() < 3e-2 * expected.norm()


def test_it_compiles_whole_and_runs_on_the_pinned_kernel():
    model = make(torch.bfloat16)
    freeze_(model, "toeplitz", "cudnn")
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits.float()
        actual = compiled(tokens, use_cache=False).logits.float()
        assert (actual - expected).norm() < 2e-2 * expected.norm()
        kernels = kernels_of(lambda: compiled(tokens, use_cache=False), CUDA)
    assert kernel_seen("cudnn", kernels, CUDA) is True, [kernel["name"] for kernel in kernels]
    assert any(kernel["name"].startswith("toeplitz") for kernel in kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prefill_is_replayed(dtype):
    """Under autocast rotated queries and keys stay float32 beside bfloat16 values."""
    autocast = dtype == torch.float32
    model = make(dtype)
    freeze_(model, "toeplitz", "auto")
    prefill = saf.Prefill(model, batch_size=1, length=200, autocast=autocast)
    for seed in (0, 1):
        tokens = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            expected = model(tokens, use_cache=False).logits[:, -1:].float()
        assert (prefill(tokens).float() - expected).norm() < 2e-2 * expected.norm()
