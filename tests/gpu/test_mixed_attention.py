"""On a CUDA device: which kernels run, whole models and layers compiled, captured and with dynamic lengths."""

from collections.abc import Callable

import pytest
import torch

from saf.bench.record import kernel_seen, kernels_of
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, mixed_attention
from saf.patterns import DensePattern
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns
from tests.ops.layers import relative
from tests.ops.operator_samples import check, registered, runnable

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTH = 300


def prepare(backend: str, count: int = 2, heads: int = 4) -> FrozenHeads:
    names = ["decay", "ripple"] * count
    options = {"backend": backend, "dtype": torch.bfloat16, "device": "cuda", "kv_head": range(heads)}
    return FrozenHeads.from_patterns(hard_patterns(names[:count], LENGTH, "cuda"), **options)


def operands(*heads: int, length: int = LENGTH, trained: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(4)
    drawn = [torch.randn(2, length, n, 64, device="cuda", generator=generator) for n in heads]
    return [x.to(torch.bfloat16).transpose(1, 2).detach().requires_grad_(trained) for x in drawn]


def both_ways(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of the sum of its squares."""
    output = run()
    return output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_live_heads_run_on_the_pinned_kernel_and_frozen_ones_on_the_toeplitz_product(kernel):
    frozen, inputs = prepare("toeplitz"), operands(2, 2, 4)

    def step() -> None:
        both_ways(lambda: mixed_attention(*inputs, frozen, kernel=kernel), inputs)

    step()
    kernels = kernels_of(step, CUDA)
    counts = {each["name"]: each["calls"] for each in kernels}
    assert kernel_seen(kernel, kernels, CUDA) is True, counts
    toeplitz = sum(calls for name, calls in counts.items() if name.startswith("toeplitz"))
    assert toeplitz == 2, counts  # forward and transposed, all frozen heads at once
    assert not any("fused_forward" in name or "block_kernel" in name for name in counts)


def test_the_fused_backend_is_one_launch_forward_and_three_backward():
    frozen, inputs = prepare("fused"), operands(2, 2, 4)

    def step() -> None:
        both_ways(lambda: mixed_attention(*inputs, frozen), inputs)

    step()
    counts = {each["name"]: each["calls"] for each in kernels_of(step, CUDA)}
    for name in ("fused_forward_kernel", "delta_kernel", "key_block_kernel", "query_block_kernel"):
        assert counts.get(name) == 1, counts
    assert not any(part in name.lower() for name in counts for part in ("cudnn", "flash", "toeplitz", "fmha"))


@pytest.mark.parametrize(
    ("kernel", "backend", "joined"),
    [("auto", "toeplitz", 0), ("auto", "toeplitz", 1 << 30), ("flash", "toeplitz", 0), ("auto", "fused", 0)],
)
def test_a_compiled_model_equals_the_eager_one(kernel, backend, joined, monkeypatch):
    monkeypatch.setattr("saf.ops.attention.JOINED", joined)
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=512, num_layers=3, num_heads=4, hidden_size=256, max_length=256)
    model = GPT(shape).cuda()
    heads = HeadSet([(0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)])
    install_(model, heads, hard_patterns(["decay", "ripple"] * 3, 256), backend=backend)
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
    for layer, block in enumerate(model.blocks):
        attention = block.attention
        assert list(attention.layout.frozen) == heads.in_layer(layer)
        assert attention.q_proj.weight.shape[0] == attention.k_proj.weight.shape[0] == attention.layout.num_live * 64
        rows = attention.q_proj.weight.grad
        assert not attention.layout.num_live or (rows.abs().sum(1) > 0).all()


def test_frozen_heads_made_on_one_kind_of_device_run_on_the_other():
    shape = GPTConfig(vocab_size=512, num_layers=2, num_heads=4, hidden_size=256, max_length=256)
    tokens = torch.randint(0, 512, (2, 256))
    model = GPT(shape)
    install_(model, HeadSet([(0, 1), (1, 3)]), hard_patterns(["decay", "ripple"], 256))
    with torch.no_grad():
        expected = model(tokens)
        actual = model.cuda()(tokens.cuda()).cpu()
        back = model.cpu()(tokens)
    assert relative(actual, expected.double()) <= 1e-4
    torch.testing.assert_close(back, expected)


def warm_up(call) -> None:
    """Run on a stream of its own what is then captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("backend", ["toeplitz", "fused"])
def test_a_layer_and_its_gradients_are_captured_in_a_graph(backend):
    """Replays read new operands; results equal the eager ones to the bit."""
    frozen, inputs = prepare(backend), operands(2, 2, 4)

    def step() -> tuple[torch.Tensor, ...]:
        return both_ways(lambda: mixed_attention(*inputs, frozen), inputs)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5).add_(0.125)
    graph.replay()
    torch.cuda.synchronize()
    actual = dict(zip(("output", "query", "key", "value"), (x.clone() for x in captured), strict=True))
    expected = dict(zip(actual, step(), strict=True))
    # cuDNN's query gradient sums in no fixed order.
    assert relative(actual.pop("query"), expected["query"].double()) < 5e-3
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("backend", ["toeplitz", "fused", "reference"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_grouped_layer_with_stored_patterns_is_captured_as_it_is_called(backend, trained):
    """Heads picked one by one and two kinds of patterns: the host sends nothing and waits for nothing."""
    compact = hard_patterns(["decay", "ripple"], LENGTH, "cuda")
    mixture = [compact[0], DensePattern(hard_patterns(["local"], LENGTH, "cuda")[0].dense()), compact[1]]
    options = {"backend": backend, "dtype": torch.bfloat16, "device": "cuda", "kv_head": (0, 0, 1, 0, 1, 1)}
    frozen, inputs = FrozenHeads.from_patterns(mixture, **options), operands(3, 2, 2, trained=trained)

    def call() -> torch.Tensor:
        return mixed_attention(*inputs, frozen)

    warm_up(call)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        with torch.cuda.graph(graph):
            captured = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5).add_(0.125)
    graph.replay()
    torch.cuda.synchronize()
    actual, expected = captured.detach().clone(), call().detach()
    assert actual.shape == (2, 6, LENGTH, 64)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", sorted(registered()))
def test_operators_do_what_they_declare(name):
    assert runnable("cuda") == registered()
    check(name, "cuda", torch.bfloat16)
