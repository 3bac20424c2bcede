"""Gradients of key and distance logits on CUDA: other blocks, 16-bit operands with float32 sums, compiled models."""

import pytest
import torch

from saf.heads import HeadSet
from saf.models import GPT, preset
from saf.ops import BACKENDS
from saf.ops.toeplitz import trainable_product
from saf.patterns import CompactPattern
from saf.surgery import install_, pattern_parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 4e-6), (torch.bfloat16, 3 * 2**-8)])
@pytest.mark.parametrize("length", [64, 1000, 4096])
def test_gradients_match_the_dense_form(length, dtype, budget):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = torch.randn(2, 2, 3, length, 64, generator=generator, device="cuda").to(dtype)
    logits = torch.randn(2, 3, length, generator=generator, device="cuda")
    value, alpha, rho = (x.detach().clone().requires_grad_() for x in (draw[0], *logits))
    trainable_product(value, alpha, rho)[0].backward(draw[1])
    exact = [x.detach().double().requires_grad_() for x in (value, alpha, rho)]
    BACKENDS["reference"].forward_trainable(*exact).backward(draw[1].double())
    for actual, expected in zip((value, alpha, rho), exact, strict=True):
        error = (actual.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error.item() <= budget


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 4e-6), (torch.bfloat16, 3 * 2**-8)])
def test_logits_out_of_range_are_executed_or_nan_and_the_host_never_waits(dtype, budget):
    """The tables hold the first head's 50 nats, and not the second one's 200."""
    generator = torch.Generator("cuda").manual_seed(0)
    value, upstream = torch.randn(2, 2, 2, 300, 64, generator=generator, device="cuda").to(dtype)
    alpha, rho = torch.randn(2, 2, 300, generator=generator, device="cuda")
    alpha[0, :10], alpha[1, 0] = -50, -200
    inputs = [x.detach().clone().requires_grad_() for x in (value, alpha, rho)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    actual = []
    try:
        for mode in ("default", "error"):  # the first call compiles
            torch.cuda.set_sync_debug_mode(mode)
            output = trainable_product(*inputs)[0]
            actual = [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    output = BACKENDS["reference"].forward_trainable(*exact)
    expected = [output.detach(), *torch.autograd.grad(output, exact, upstream.double())]
    for one, other, heads in zip(actual, expected, (1, 1, 0, 0), strict=True):
        one, other = one.double().select(heads, 0), other.select(heads, 0)
        assert ((one - other).norm() / other.norm()).item() <= budget
    assert actual[0][:, 1].isnan().all()


def test_a_compiled_model_trains_its_patterns_as_the_eager_one_does():
    generator = torch.Generator().manual_seed(0)
    pattern = CompactPattern.from_parameters(*torch.randn(2, 3, 256, generator=generator))
    tokens = torch.randint(0, 512, (2, 257), generator=generator).cuda()
    losses, moved = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = GPT(preset("tiny", vocab_size=512, max_length=256))
        model.reset_parameters(torch.Generator().manual_seed(1))
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
        install_(model, HeadSet([(0, 0), (0, 1), (1, 0)]), pattern, optimizer=optimizer, trainable=True)
        start = torch.cat(pattern_parameters(model)).detach()
        run = torch.compile(model, fullgraph=True) if compiled else model
        actual = []
        for _ in range(8):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            actual.append(loss.item())
        losses.append(actual)
        moved.append(torch.cat(pattern_parameters(model)).detach() - start)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0][-1] < losses[0][0]
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.8
