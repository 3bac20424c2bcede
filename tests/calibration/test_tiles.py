"""The Triton tile loop: exact under the interpreter, fitting Hopper when compiled for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")
SPILLED = {"bf16 D96": 64, "edge bf16 D64": 8, "edge fp32 D64": 64, "fp32 D256": 456}
"""Bytes of local memory a thread where registers are capped, or where Triton 3.7 spills in a tile at the edge."""


def worker(mode: str, **environment: str) -> dict:
    """Run `tile_worker.py` in a process of its own, so that the interpreter's switch reaches no other test."""
    pytest.importorskip("triton")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(FOLDER / "tile_worker.py"), mode]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted():
    return worker("interpreted", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_every_case_equals_the_dense_oracle_and_one_sequence_scores_exactly_zero(interpreted):
    cases = {name: row for name, row in interpreted.items() if name not in ("floor-by-blocks", "poisoned")}
    errors = {name: max(row[field] for field in FIELDS) for name, row in cases.items()}
    assert len(errors) == 13
    assert {name: error for name, error in errors.items() if error > 2e-6} == {}
    assert {row["largest_score"] for name, row in cases.items() if name.startswith("N1-")} == {0}


def test_only_the_marginals_depend_on_normalising_blocks_of_rows(interpreted):
    """A floor of 1e-3 makes rows of one block need different normalisers, by up to 129 * 1e-3 in all."""
    errors = interpreted["floor-by-blocks"]
    assert max(errors[field] for field in ("variance", "forward_kl", "row_entropy")) <= 2e-6
    assert 1e-4 < max(errors["eta_abs"], errors["eta_rel"]) <= 129e-3 / 2


def test_a_query_that_is_not_a_number_reaches_every_statistic_of_its_head_alone(interpreted):
    assert interpreted["poisoned"] == {field: [True, False] for field in FIELDS}


@pytest.mark.slow
def test_fits_hopper():
    """Spills stay in their limits; one program fits everywhere, three on a multiprocessor at the paper's head size."""
    compiled = worker("compiled")
    if "skip" in compiled:
        pytest.skip(compiled["skip"])
    limits = {name: next((n for end, n in SPILLED.items() if name.endswith(end)), 0) for name in compiled}
    assert {name: row for name, row in compiled.items() if row["stack"] > limits[name]} == {}
    assert {name: row for name, row in compiled.items() if row["shared"] > row["least"]} == {}
    smaller = "fp32 D256"  # of GPUs without Hopper's own matrix instructions
    assert [
        name for name, row in compiled.items() if not (row["matrix_units"] == "wgmma" or name.endswith(smaller))
    ] == []
    for name in ("tile bf16 D64", "tile bf16 D96", "edge bf16 D64", "edge bf16 D96"):
        assert 3 * 32 * compiled[name]["warps"] * compiled[name]["registers"] <= 65536
        assert 3 * compiled[name]["shared"] <= 232448
