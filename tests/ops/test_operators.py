"""Every registered operator does what it declares; a layer compiles whole, and once for several lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from saf.ops import FrozenHeads, frozen_attention, live_attention, mixed_attention
from saf.patterns import DensePattern, TrainablePattern
from tests.ops.operator_samples import check, patterns, registered, runnable, samples


def test_every_operator_has_samples():
    assert registered() == set(samples("cpu", torch.float32))


@pytest.mark.parametrize("name", sorted(runnable("cpu")))
def test_operators_do_what_they_declare(name):
    check(name, "cpu", torch.bfloat16 if name == "toeplitz" else torch.float32)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_layer_compiles_whole_with_its_gradients(backend, trainable, generator):
    """Trained patterns are read anew in every call."""
    one, two = patterns("cpu").singles()
    frozen = FrozenHeads.from_patterns([one, TrainablePattern.of(two) if trainable else two], backend=backend)
    inputs = [torch.randn(2, n, 40, 8, generator=generator, requires_grad=True) for n in (2, 2, 4)]
    compiled = torch.compile(lambda q, k, v: mixed_attention(q, k, v, frozen), fullgraph=True, backend="aot_eager")
    leaves = [*inputs, *frozen.parameters()]
    for _ in range(2):
        outputs = [run(*inputs) for run in (compiled, lambda q, k, v: mixed_attention(q, k, v, frozen))]
        gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*gradients)
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("backend", "stored"), [("toeplitz", 0), ("toeplitz", 1), ("reference", 2)])
def test_one_graph_serves_several_lengths(backend, stored, generator):
    compact = patterns("cpu")
    weights = compact.dense()
    mixture = [DensePattern(weights[slot]) if slot < stored else compact[slot] for slot in range(2)]
    frozen = FrozenHeads.from_patterns(mixture, backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda v: frozen_attention(v, frozen), fullgraph=True, backend=counter)
    for length in (33, 40, 17, 48):
        value = torch.randn(2, 2, length, 8, generator=generator)
        torch._dynamo.mark_dynamic(value, 2, min=2, max=48)
        expected = weights[:, :length, :length] @ value.double()
        torch.testing.assert_close(compiled(value).double(), expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_a_pinned_flash_kernel_compiles_whole(generator):
    operands = [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]
    compiled = torch.compile(lambda *x: live_attention(*x, kernel="flash"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), live_attention(*operands, kernel="flash"))
