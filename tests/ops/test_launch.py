"""A compiled kernel is found again by everything that Triton may specialize on, and by nothing less."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from saf.ops import launch as module
from saf.ops.launch import launch


class Kernel:
    """Stand in for a Triton kernel and for what it is compiled to: count compilations, record direct calls."""

    arg_names = ("x_ptr", "N", "BLOCK", "EVEN")

    def __init__(self):
        self.compiled, self.direct = 0, []

    def __getitem__(self, grid):
        def call(*args, **constants):
            if not constants:
                self.direct.append((grid, args))
                return None
            self.compiled += 1
            return self

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def call(kernel, x, size=8, **changes):
    constants = {"EVEN": True, "BLOCK": 4, "num_warps": 2} | changes
    launch(kernel, (3,), x, size, device=torch.device("cpu"), **constants)


def test_later_calls_go_straight_to_the_compiled_kernel_in_the_order_of_its_parameters(kernel):
    kernel.params = [SimpleNamespace(do_not_specialize=name == "N") for name in kernel.arg_names]
    x = torch.zeros(64)
    for size in (8, 9, 10):
        call(kernel, torch.ones(640) if size == 8 else x, size)
    assert (kernel.compiled, kernel.direct) == (1, [((3, 1, 1), (x.data_ptr(), n, 4, True)) for n in (9, 10)])
    call(kernel, x, 1 << 31)
    assert kernel.compiled == 2, "an int of 64 bits is another argument"


def test_whatever_triton_specializes_on_leads_back_to_triton(kernel):
    from triton.tools.tensor_descriptor import TensorDescriptor

    call(kernel, torch.zeros(64))
    for number, (x, changes) in enumerate(
        (
            (torch.zeros(64, dtype=torch.float16), {}),
            (torch.zeros(65)[1:], {}),
            (torch.zeros(64), {"size": 9}),
            (torch.zeros(64), {"BLOCK": 8}),
            (torch.zeros(64), {"EVEN": False}),
            (torch.zeros(64), {"num_warps": 4}),
            (TensorDescriptor.from_tensor(torch.zeros(64, 64), [8, 8]), {}),
            (TensorDescriptor.from_tensor(torch.zeros(64, 64), [16, 8]), {}),
        )
    ):
        call(kernel, x, **changes)
        assert (kernel.compiled, kernel.direct) == (number + 2, [])
