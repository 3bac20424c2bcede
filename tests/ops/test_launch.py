"""A compiled kernel is found again by everything that Triton may compile for, and by nothing less."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from saf.ops import launch as module  # noqa: E402
from saf.ops.launch import PreparedLaunch, launch  # noqa: E402
from tests.ops.kernel_stub import Kernel  # noqa: E402


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel("x_ptr", "N", "BLOCK", "EVEN")


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


def prepared(kernel):
    return PreparedLaunch(kernel, (3,), 8, device=torch.device("cpu"), EVEN=True, BLOCK=4, num_warps=2)


def test_a_prepared_launch_calls_the_compiled_kernel_with_other_memory(kernel):
    run, first, second = prepared(kernel), torch.zeros(64), torch.ones(64)
    run(first)
    run(second)
    assert kernel.asked == [{"EVEN": True, "BLOCK": 4, "num_warps": 2}]
    assert kernel.direct == [((3, 1, 1), (second.data_ptr(), 8, 4, True))]


def test_a_prepared_launch_shares_what_was_compiled_for_the_same_arguments(kernel):
    x = torch.zeros(64)
    call(kernel, x)
    prepared(kernel)(x)
    assert kernel.compiled == 1


@pytest.mark.parametrize("order", ["aligned first", "aligned last"])
def test_a_prepared_launch_has_triton_look_at_memory_of_another_alignment(kernel, order):
    run, calls = prepared(kernel), [torch.zeros(64), torch.zeros(65)[1:]]
    for x in calls if order == "aligned first" else calls[::-1]:
        run(x)
    assert kernel.compiled == 2
    assert not kernel.direct


def test_a_prepared_launch_without_a_compiled_kernel_asks_every_time(kernel):
    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *args, **constants: self.asked.append(args)

    kernel = Interpreted("x_ptr", "N", "BLOCK", "EVEN")
    run, x = prepared(kernel), torch.zeros(64)
    run(x)
    run(x)
    assert kernel.asked == [(x, 8), (x, 8)]


def test_descriptors_come_first(kernel):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(64, 64)
    descriptor = TensorDescriptor.from_tensor(x, [8, 8])
    kernel = Kernel("x_desc", "out_ptr", "N", "BLOCK", "EVEN")
    run = prepared(kernel)
    for _ in range(2):
        run(x, descriptors=(descriptor,))
    assert kernel.direct == [((3, 1, 1), (descriptor, x.data_ptr(), 8, 4, True))]
