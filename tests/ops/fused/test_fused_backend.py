"""The fused backend behind the seam, on the interpreter: at most twice as far from float64 as PyTorch's attention."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import tests.quick_interpreter
import torch
import saf.ops.backends.fused as fused
from saf.errors import UnsupportedError
from saf.ops import FrozenHeads, mixed_attention
from saf.patterns import CompactPattern, DensePattern

fused.fused_obstacle = lambda device, dtype: None  # the interpreter stands in for a device
generator = torch.Generator().manual_seed(0)
compact = CompactPattern.from_parameters(*torch.randn(2, 1, 64, generator=generator, dtype=torch.float64))
dense = torch.rand(64, 64, generator=generator, dtype=torch.float64).tril() + 1e-3 * torch.eye(64)
patterns = [compact[0], DensePattern(dense / dense.sum(-1, keepdim=True))]
for kv_head in ((0, 1, 2, 3), (0, 0, 1, 1), (0, 1)):
    live = len(kv_head) - 2
    heads = (live, len(set(kv_head[:live])), max(kv_head) + 1)
    inputs = [torch.randn(2, 37, count, 16, generator=generator) for count in heads]
    upstream = torch.randn(2, len(kv_head), 37, 16, generator=generator)
    found = []
    for backend, dtype in (("fused", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        frozen = FrozenHeads.from_patterns(patterns, backend=backend, dtype=dtype, kv_head=kv_head)
        output = mixed_attention(*(x.transpose(1, 2) for x in leaves), frozen)
        output.backward(upstream.to(dtype))
        found.append([output] + [x.grad for x in leaves])
    for ours, theirs, exact in zip(*found):
        if exact is not None and exact.numel():
            error, sdpa, rounding = (
                ((x.double() - exact).norm() / exact.norm()).item() for x in (ours, theirs, exact.float())
            )
            assert error <= 2 * sdpa + rounding, (kv_head, error, sdpa)
print("agreed")

frozen = FrozenHeads.from_patterns(
    CompactPattern.from_parameters(torch.randn(1, 8), torch.randn(1, 8)), backend="fused", kv_head=(0, 1)
)
query, key, value = (torch.randn(1, n, 8, 16, requires_grad=True) for n in (1, 1, 2))
try:
    torch.autograd.grad(mixed_attention(query, key, value, frozen).square().sum(), value, create_graph=True)
except UnsupportedError:
    print("refused")
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the program says, in a process of its own, so that the interpreter's switch reaches no other test."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_fused_equals_the_reference_in_output_and_every_gradient(said):
    assert "agreed" in said


def test_gradients_of_gradients_are_refused(said):
    assert "refused" in said
