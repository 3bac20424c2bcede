"""A compiled kernel is found again by everything that Triton may compile for, and by nothing less."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from saf.ops.triton import launch as module  # noqa: E402
from saf.ops.triton.launch import launch  # noqa: E402


class Kernel:
    """Stands in for a kernel: counts compilations, and records how compiled ones are called."""

    arg_names = ("x_ptr", "N", "BLOCK", "EVEN")

    def __init__(self):
        self.compiled = 0
        self.direct = []

    def __getitem__(self, grid):
        def first(*args, **constants):
            self.compiled += 1
            return Compiled(self)

        return first


class Compiled:
    """Stands in for what Triton compiled."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.direct.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def call(kernel, x, size=8, **changes):
    constants = {"EVEN": True, "BLOCK": 4, "num_warps": 2} | changes
    launch(kernel, (3,), x, size, device=x.device, **constants)


def test_the_second_call_goes_straight_to_the_compiled_kernel_in_the_order_of_its_parameters(kernel):
    x = torch.zeros(64)
    call(kernel, x)
    call(kernel, x)
    assert kernel.compiled == 1
    assert kernel.direct == [((3, 1, 1), (x, 8, 4, True))]


def test_other_memory_of_the_same_dtype_and_alignment_needs_no_new_kernel(kernel):
    call(kernel, torch.zeros(64))
    call(kernel, torch.ones(640))
    assert kernel.compiled == 1


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},
        {"size": 9},
        {"size": 1},
        {"BLOCK": 8},
        {"EVEN": False},
        {"num_warps": 4},
        {"maxnreg": 128},
    ],
    ids=str,
)
def test_whatever_triton_may_look_at_leads_back_to_triton(kernel, change):
    call(kernel, torch.zeros(64))
    call(kernel, **{"x": torch.zeros(64)} | change)
    assert kernel.compiled == 2
    assert not kernel.direct


def test_descriptors_differ_by_their_blocks(kernel):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(64, 64)
    for block in ([8, 8], [8, 8], [16, 8]):
        launch(kernel, (1,), TensorDescriptor.from_tensor(x, block), 1, device=x.device, BLOCK=1, EVEN=True)
    assert kernel.compiled == 2
    assert len(kernel.direct) == 1


def test_the_memory_of_compiled_kernels_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for size in range(10):
        call(kernel, torch.zeros(64), size)
    assert len(module._compiled) <= 3
