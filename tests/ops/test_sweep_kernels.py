"""The seam with the kernels in place, on the interpreter or a device: budgets, bounds, properties."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.ops.sweep_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_budgets_bounds_and_properties_hold(sweep_results, name):
    assert sweep_results[name]["problems"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_ran(sweep_results, name):
    """Frozen heads went through the backend's own kernels, forward and backward, and through nothing else's."""
    launched = set(sweep_results[name]["launched"])
    if "fused" in name:
        assert {"fused_forward_kernel", "key_block_kernel"} <= launched
        assert not any(kernel.startswith("toeplitz") for kernel in launched)
    else:
        assert launched & {"toeplitz_kernel", "toeplitz_descriptor_kernel"}
        assert not launched & {"fused_forward_kernel", "key_block_kernel"}
