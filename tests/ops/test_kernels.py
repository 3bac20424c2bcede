"""Every kernel against float64, in the interpreter or on a device, inside memory of NaN where it takes strides."""

import pytest

from tests.ops.kernels import flash_decode, layers, linear, logits, loss_and_gelu, recurrent, toeplitz

AREAS = (toeplitz, linear, recurrent, flash_decode, loss_and_gelu, logits, layers)
CASES = [(area.__name__.rpartition(".")[2], name) for area in AREAS for name in area.CASES]


@pytest.mark.parametrize(("area", "name"), CASES)
def test_results_keep_their_limits(kernel_results, area, name):
    wrong = kernel_results[area][name]
    if wrong is None:
        pytest.skip("the interpreter's products of bfloat16 are wrong; needs a GPU")
    assert wrong == []
