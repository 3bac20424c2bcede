"""On a CUDA device: the Triton product, the whole layer, compiled and captured, against float64."""

import pytest
import torch

from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, frozen_attention, mixed_attention
from saf.ops.toeplitz_operator import uses_triton
from saf.pattern import CompactPattern
from saf.surgery import install_

pytestmark = pytest.mark.gpu


def pattern(heads: int, length: int, seed: int = 0) -> CompactPattern:
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(length, dtype=torch.float64)
    alpha = 0.2 * torch.randn(heads, length, generator=generator, dtype=torch.float64)
    alpha[:, 0] += 3
    rho = -torch.linspace(0.2, 1.2, heads, dtype=torch.float64)[:, None] * torch.log1p(position)
    return CompactPattern.from_parameters(alpha, rho + 0.2 * torch.cos(0.37 * position))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("length", [1, 63, 129, 1000, 2048])
@pytest.mark.parametrize("dim", [16, 60, 64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.bfloat16, 4.5e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.usefixtures("nan_empty")
def test_output_and_gradient_match_float64(length, dim, dtype, budget):
    fixed = pattern(3, max(length, 64))
    dense = fixed.dense()[:, :length, :length].cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    packed = torch.randn(2, length, 5, dim, device="cuda", generator=generator).to(dtype).requires_grad_()
    frozen = FrozenHeads.from_patterns(fixed, dtype=dtype, device="cuda", kv_head=(0, 1, 2, 3, 4))
    value = packed.transpose(1, 2)
    upstream = torch.randn(2, 3, length, dim, device="cuda", generator=generator).to(dtype)
    output = frozen_attention(value, frozen)
    output.backward(upstream)
    assert uses_triton(value.device, dtype)
    assert relative(output, dense @ value[:, 2:].double()) <= budget
    gradient = packed.grad.transpose(1, 2)
    assert relative(gradient[:, 2:], dense.mT @ upstream.double()) <= budget
    assert not gradient[:, :2].any()


@pytest.mark.parametrize(
    ("kernel", "backend"), [("auto", "toeplitz"), ("cudnn", "toeplitz"), ("flash", "toeplitz"), ("auto", "fused")]
)
def test_a_compiled_model_equals_the_eager_one(kernel, backend):
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=512, num_layers=3, num_heads=4, hidden_size=256, max_length=256)
    model = GPT(shape).cuda()
    install_(model, HeadSet([(0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]), pattern(6, 256), backend=backend)
    for block in model.blocks:
        block.attention.live.kernel = kernel
    tokens = torch.randint(0, 512, (2, 257), device="cuda")
    losses, gradients = [], []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in model.parameters() if p.numel()])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    for one, other in zip(*gradients, strict=True):
        assert relative(one, other.double()) < 0.05
    for block in model.blocks[:2]:
        assert block.attention.q_proj.weight.shape[0] == block.attention.layout.num_live * 64


@pytest.mark.parametrize(("live", "kv_head"), [(2, (0, 1, 2, 3)), (3, (0, 0, 1, 1, 2)), (0, (0, 1)), (4, (0, 1, 2, 3))])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_fused_equals_toeplitz_in_output_and_every_gradient(live, kv_head, dtype, budget):
    length, frozen = 129, len(kv_head) - live
    fixed = pattern(max(frozen, 1), 192)
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = (live, len(set(kv_head[:live])), max(kv_head) + 1)
    packed = [torch.randn(2, length, n, 64, device="cuda", generator=generator).to(dtype) for n in shapes]
    upstream = torch.randn(2, len(kv_head), length, 64, device="cuda", generator=generator).to(dtype)
    found = {}
    for backend, wide in (("fused", dtype), ("reference", torch.float64)):
        inputs = [x.to(wide, copy=True).requires_grad_() for x in packed]
        heads = None
        if frozen:
            options = {"backend": backend, "dtype": wide, "device": "cuda", "kv_head": kv_head}
            heads = FrozenHeads.from_patterns(fixed, **options)
        output = mixed_attention(*(x.transpose(1, 2) for x in inputs), heads)
        output.backward(upstream.to(wide))
        found[backend] = [output, *(x.grad for x in inputs)]
    for one, other in zip(found["fused"], found["reference"], strict=True):
        if other is not None and other.numel():
            assert relative(one, other) <= budget


def test_a_layer_is_captured_in_a_graph():
    frozen = FrozenHeads.from_patterns(pattern(2, 300), dtype=torch.bfloat16, device="cuda")
    query, key, value = (torch.randn(2, n, 300, 64, device="cuda", dtype=torch.bfloat16) for n in (2, 2, 4))
    expected = mixed_attention(query, key, value, frozen)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mixed_attention(query, key, value, frozen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = mixed_attention(query, key, value, frozen)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
