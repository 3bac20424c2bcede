"""A compiled kernel is launched again for all that Triton would compile alike, and for nothing else."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from saf.ops.launch import launch


class Kernel:
    """Stand in for a Triton kernel and for what it is compiled to: count compilations, record direct launches."""

    arg_names = ("x_ptr", "N", "BLOCK", "EVEN")
    params = tuple(SimpleNamespace(do_not_specialize=name == "N") for name in arg_names)

    def __init__(self):
        self.compiled, self.direct = 0, []

    def __getitem__(self, grid):
        def call(*args, **constants):
            if constants:
                self.compiled += 1
                return self
            self.direct.append((grid, args))

        return call

    def launch(self, x, size=8, **changes):
        constants = {"EVEN": True, "BLOCK": 4, "num_warps": 2} | changes
        launch(self, (3,), x, size, device=torch.device("cpu"), **constants)


def test_later_calls_launch_the_compiled_kernel_with_arguments_in_the_order_of_its_parameters():
    kernel, x = Kernel(), torch.zeros(64)
    kernel.launch(torch.ones(640))
    for size in (9, 10):
        kernel.launch(x, size)
    assert (kernel.compiled, kernel.direct) == (1, [((3, 1, 1), (x.data_ptr(), n, 4, True)) for n in (9, 10)])
    kernel.launch(x, 1 << 31)
    assert kernel.compiled == 2, "an int of 64 bits is another argument"


def test_whatever_triton_specializes_on_is_compiled_anew():
    kernel, x, table = Kernel(), torch.zeros(64), torch.zeros(64, 64)
    kernel.params = ()  # every number counts
    operands = [x, x.half(), torch.zeros(65)[1:]]
    operands += [TensorDescriptor.from_tensor(table, [rows, 8]) for rows in (8, 16)]
    for operand in operands:
        kernel.launch(operand)
    for changes in ({"size": 9}, {"BLOCK": 8}, {"EVEN": False}, {"num_warps": 4}):
        kernel.launch(x, **changes)
    assert (kernel.compiled, kernel.direct) == (9, [])
