"""Few tokens on a CUDA device: one launch, called, compiled and in a graph, with the numbers of the other way."""

import pytest
import torch

import saf
from saf.bench.profiling import kernels_of
from saf.bench.synthetic import synthetic_patterns
from saf.heads import HeadSet
from saf.ops import FrozenHeads, few_tokens, mixed_attention
from tests.ops.hard_patterns import hard_patterns

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 129, 512, 1000])
def test_one_launch_with_the_numbers_of_the_reference(length, dtype):
    generator = torch.Generator("cuda").manual_seed(length)
    inputs = [torch.randn(1, length, n, 64, device="cuda", generator=generator).to(dtype) for n in (2, 2, 4)]
    inputs = [x.transpose(1, 2) for x in inputs]
    patterns = hard_patterns(["decay", "ripple"], 1200, "cuda")

    @torch.no_grad()
    def mix(backend: str, kind: torch.dtype) -> torch.Tensor:
        options = {"backend": backend, "dtype": kind, "device": "cuda", "kv_head": range(4)}
        frozen = FrozenHeads.from_patterns(patterns, **options)
        operands = [x.to(kind) for x in inputs]
        if backend == "toeplitz":
            names = [each["name"] for each in kernels_of(lambda: mixed_attention(*operands, frozen), CUDA)]
            assert names == ["fused_forward_kernel"]
        return mixed_attention(*operands, frozen).double()

    exact = mix("reference", torch.float64)
    found = mix("toeplitz", dtype), mix("reference", dtype), exact.to(dtype).double()
    error, sdpa, rounding = ((x - exact).norm() / exact.norm() for x in found)
    assert error <= 2 * sdpa + rounding


def test_a_prefill_of_few_tokens_agrees_with_the_other_way():
    model = saf.GPT(saf.preset("124m", num_layers=2, max_length=2048)).cuda().eval()
    heads = HeadSet([(0, 0), (0, 5), (1, 3)])
    saf.install_(model, heads, synthetic_patterns(len(heads), 2048, torch.Generator().manual_seed(0), "cuda"))
    tokens = torch.randint(0, 50_257, (1, few_tokens.LENGTH), device="cuda")
    few = saf.Prefill(model, batch_size=1, length=few_tokens.LENGTH)(tokens).float()
    for layer in model.attention_layers():
        layer.live.kernel = "cudnn"
    other = saf.Prefill(model, batch_size=1, length=few_tokens.LENGTH)(tokens).float()
    assert 0 < (few - other).norm() < 2e-2 * other.norm()
