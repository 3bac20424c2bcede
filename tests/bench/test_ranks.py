"""Two ranks share updates: where one of them fails while an arm is built, both go on without the arm, or both end."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import saf.distributed
from saf.bench import Update, measure, models
from saf.records.files import read_json
from tests.train.helpers import run_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")

SETTINGS: dict[str, Any] = {
    "model": "tiny", "points": ("16x1x2",), "rates": (0.5,), "device": "cpu", "parallel": "ddp", "others": (),
    "pairs": 2, "warmup": 1, "repeats": 1, "tolerance": 1e9, "profile": False,
}  # fmt: skip


def without_memory(rank: int, out: Path) -> None:
    """Rank 1 cannot build the model of an arm."""
    build = models.ModelPlan.build

    def fail(plan, arm, *rest):
        if rank == 1 and arm.backend == "toeplitz":
            raise RuntimeError("out of memory")
        return build(plan, arm, *rest)

    models.ModelPlan.build = fail
    record = measure(Update(**SETTINGS), out=out)
    assert [row["role"] for row in record["rows"]] == ["control", "free"]
    (left_out,) = record["left_out"]
    assert "out of memory" in left_out["why"]


def without_an_updater(rank: int, out: Path) -> None:
    """Rank 0 fails where rank 1 waits for it in an exchange of PyTorch's, and does not hear of it."""

    def fail(**_):
        raise RuntimeError("no updater")

    saf.distributed.ERROR_TIMEOUT = timedelta(seconds=1)
    if rank == 0:
        models.Updater = fail  # type: ignore[misc]
    measure(Update(**SETTINGS), out=out)


def test_an_arm_that_one_rank_cannot_build_is_left_out_on_both(tmp_path):
    run_ranks(2, without_memory, tmp_path / "bench.json")
    assert read_json(tmp_path / "bench.json")["finished"]


def test_both_ranks_end_where_one_fails_alone(tmp_path):
    run_ranks(2, without_an_updater, tmp_path / "bench.json", codes=(1, 1))
    assert not read_json(tmp_path / "bench.json")["finished"]
