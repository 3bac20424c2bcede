"""A compiled kernel is found again by everything that Triton may specialize on, and by nothing less."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from saf.ops import launch as module  # noqa: E402
from saf.ops.launch import launch  # noqa: E402


class Kernel:
    """Stand in for a Triton kernel: count compilations, and record how compiled ones are called."""

    def __init__(self, *arg_names: str):
        self.arg_names, self.compiled, self.direct = arg_names, 0, []

    def __getitem__(self, grid):
        def first(*args, **constants):
            self.compiled += 1
            return Compiled(self)

        return first


class Compiled:
    """What Triton compiled."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.direct.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel("x_ptr", "N", "BLOCK", "EVEN")


def call(kernel, x, size=8, **changes):
    constants = {"EVEN": True, "BLOCK": 4, "num_warps": 2} | changes
    launch(kernel, (3,), x, size, device=x.device, **constants)


def test_later_calls_go_straight_to_the_compiled_kernel_in_the_order_of_its_parameters(kernel):
    x = torch.zeros(64)
    call(kernel, torch.ones(640))
    call(kernel, x)
    assert kernel.compiled == 1
    assert kernel.direct == [((3, 1, 1), (x.data_ptr(), 8, 4, True))]


def test_numbers_that_triton_does_not_specialize_on_find_the_same_kernel(kernel):
    kernel.params = [SimpleNamespace(do_not_specialize=name == "N") for name in kernel.arg_names]
    for size in (8, 9, 10):
        call(kernel, torch.ones(64), size)
    assert (kernel.compiled, [args[1] for _, args in kernel.direct]) == (1, [9, 10])
    call(kernel, torch.ones(64), 1 << 31)
    assert kernel.compiled == 2, "an int of 64 bits is another argument"


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
    ],
    ids=str,
)
def test_whatever_triton_specializes_on_leads_back_to_triton(kernel, change):
    call(kernel, torch.zeros(64))
    call(kernel, **{"x": torch.zeros(64)} | change)
    assert kernel.compiled == 2
    assert not kernel.direct


def test_descriptors_differ_by_their_blocks_and_come_first(kernel):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(64, 64)
    for block in ([8, 8], [8, 8], [16, 8]):
        launch(kernel, (1,), TensorDescriptor.from_tensor(x, block), 1, device=x.device, BLOCK=1, EVEN=True)
    assert (kernel.compiled, len(kernel.direct)) == (2, 1)
