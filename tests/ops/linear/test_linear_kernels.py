"""The linear product's kernels against float64: tiles, stretches, both directions, awkward shapes."""

import pytest
import torch

from saf.errors import InputError
from saf.ops.linear.operator import linear_tables
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.linear.product_cases import CASES

TOLERANCE = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4.5e-3}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_float64(linear_results, name):
    """With NaN beyond T, between heads and in scalings not to be read; and what is later in time never matters."""
    result = linear_results[name]
    if "skip" in result:
        pytest.skip(result["skip"])
    assert result.pop("error") <= TOLERANCE[CASES[name].dtype]
    assert all(result.values()), result


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ({"x": lambda x: x.bfloat16()}, "tables must be contiguous and torch.bfloat16"),
        ({"x": lambda x: x.mT.contiguous().mT}, "stride 1"),
        ({"before": lambda scale: scale[:, :10]}, r"before must be float32 \[2, >=33\]"),
        ({"after": lambda scale: scale.double()}, "after must be float32"),
        ({"x": lambda x: x[:, :1]}, "out must be"),
    ],
)
def test_operands_that_do_not_fit_are_refused(spoil, text):
    pytest.importorskip("triton")
    from saf.ops.linear.launch import linear_matmul

    tables, before, after = linear_tables(
        exponential_patterns(2, 40, band=8).singles(), torch.float32, torch.device("cpu")
    )
    operands = {"x": torch.randn(1, 2, 33, 8), "before": before, "after": after}
    for name, change in spoil.items():
        operands[name] = change(operands[name])
    with pytest.raises(InputError, match=text):
        linear_matmul(operands["x"], tables, operands["before"], operands["after"], transpose=False)
