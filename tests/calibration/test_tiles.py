"""The Triton tile loop: exact under the interpreter, fitting Hopper when compiled for it."""

import pytest

from tests.ops.conftest import run_worker

FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")


def test_every_case_equals_the_dense_oracle():
    """One sequence scores exactly zero, and a query that is not a number reaches its own head alone."""
    errors = run_worker("calibration/tile_worker.py", "interpreted", interpret=True, CUDA_VISIBLE_DEVICES="")
    assert errors.pop("poisoned") == {field: [True, False] for field in FIELDS}
    # Marginals alone normalise blocks of rows together: with a floor of 1e-3 rows differ by up to 129 * 1e-3.
    by_blocks = errors.pop("floor-by-blocks")
    assert max(by_blocks[field] for field in ("variance", "forward_kl", "row_entropy")) <= 2e-6
    assert 1e-4 < max(by_blocks["eta_abs"], by_blocks["eta_rel"]) <= 129e-3 / 2
    assert len(errors) == 13
    assert {name: row for name, row in errors.items() if max(row[field] for field in FIELDS) > 2e-6} == {}
    assert {row["largest_score"] for name, row in errors.items() if name.startswith("N1-")} == {0}


@pytest.mark.slow
def test_fits_hopper():
    """Little is spilled, one program fits everywhere, and three on a multiprocessor at the paper's head size."""
    compiled = run_worker("calibration/tile_worker.py", "compiled", interpret=False)
    if "skip" in compiled:
        pytest.skip(compiled["skip"])
    limits = {name: 456 if name.endswith("fp32 D256") else 64 * name.startswith(("tile", "edge")) for name in compiled}
    limits |= {"tile bf16 D64": 0, "edge bf16 D64": 8}  # where the time goes at the paper's head size
    slow = {name for name, row in compiled.items() if row["matrix_units"] != "wgmma"}
    assert slow <= {name for name in compiled if name.endswith("fp32 D256")}  # of GPUs before Hopper
    assert {name: row for name, row in compiled.items() if row["stack"] > limits[name]} == {}
    assert {name: row for name, row in compiled.items() if row["shared"] > row["least"]} == {}
    for name in ("tile bf16 D64", "tile bf16 D96", "edge bf16 D64", "edge bf16 D96"):
        assert 3 * 32 * compiled[name]["warps"] * compiled[name]["registers"] <= 65536
        assert 3 * compiled[name]["shared"] <= 232448
