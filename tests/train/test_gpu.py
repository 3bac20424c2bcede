from pathlib import Path

import pytest
import torch
from torch import distributed

from saf.freeze_config import FreezeConfig
from saf.records.files import read_lines
from saf.train import TrainConfig, open_checkpoint, pretrain

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture
def on_gpu(settings):
    """Return a function that makes settings whose shapes suit the CUDA kernels."""

    def make(name: str, **changes) -> TrainConfig:
        shape = {"num_layers": 2, "num_heads": 4, "hidden_size": 256}
        return settings(name, device="cuda", model_overrides=shape, length=128, updates=16, **changes)

    return make


@pytest.mark.parametrize("rate", [0.25, 1.0], ids=["quarter", "all"])
def test_compiled_run_freezes_in_the_middle(on_gpu, rate):
    """bf16 autocast, compiled, recompiled after the event; close to the eager run, and resumable."""
    freeze = FreezeConfig(rate=rate, max_fit_kl=10.0)
    eager = pretrain(on_gpu("eager", compile="off", freeze=freeze))
    config = on_gpu("compiled", compile="on", freeze=freeze)
    compiled = pretrain(config)
    assert len(compiled["intervention"]["heads"]) == round(rate * 8)
    assert compiled["report_loss"] == pytest.approx(eager["report_loss"], rel=0.01)
    assert compiled["peak_memory_bytes"] > 0
    weights = open_checkpoint(compiled["checkpoint"]).model("cuda").state_dict()
    floats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    assert floats == {torch.float32}, "weights stay float32; a layout is of integers"
    assert pretrain(config, resume=True)["report_loss"] == pytest.approx(compiled["report_loss"], rel=1e-3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_group_of_one_by_nccl_trains_as_the_plain_run(on_gpu, parallel, tmp_path):
    """Across a freezing event; kernels of attention add up in no fixed order, so plain runs differ by as much."""
    common = {"freeze": FreezeConfig(rate=0.5, max_fit_kl=10.0), "compile": "layers"}
    plain, grouped = on_gpu("plain", **common), on_gpu(parallel, parallel=parallel, **common)
    expected = pretrain(plain)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        found = pretrain(grouped)
    finally:
        distributed.destroy_process_group()
    assert found["intervention"]["heads"] == expected["intervention"]["heads"]
    losses = [[line["loss"] for line in read_lines(Path(run.out, "metrics.jsonl"))] for run in (grouped, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert found["report_loss"] == pytest.approx(expected["report_loss"], rel=1e-3)
