"""Decoding of small models: arms are one model but for its heads, and a cache is as large as is told."""

import json

import pytest
import torch

from saf.adapters import adapter_for
from saf.bench.harness import shape as shapes
from saf.bench.harness.arms import Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.settings import Point
from saf.bench.kinds import BENCHMARKS, measure
from saf.bench.model.decode import DecodeKind, DecodeSettings, cached_bytes, decode_passes
from saf.bench.model.models import ModelPlan
from saf.errors import InputError
from saf.integrations.transformers import cache_bytes
from saf.machine.cuda_graphs import GraphPool

PLACES = 40
SIZES = {"num_layers": 3, "num_heads": 4, "head_dim": 16, "hidden_size": 24, "vocab_size": 50, "mlp_size": 40}
SMALL = {
    "llama-124m": shapes.ModelShape(family="Llama", num_kv_heads=4, mlp_matrices=3, **SIZES),
    "qwen3-4b": shapes.ModelShape(family="Qwen3", num_kv_heads=2, mlp_matrices=3, **SIZES),
}


@pytest.fixture(autouse=True, params=SMALL)
def model(request, monkeypatch):
    for name, shape in SMALL.items():
        monkeypatch.setitem(shapes.TRANSFORMERS, name, shape)
    return request.param


def settings(model, **changes) -> DecodeSettings:
    given = {"model": model, "device": "cpu", "compile": "off", "warmup": 0, "repeats": 1, "rates": (0.5,)}
    return DecodeSettings(**(given | changes))


@pytest.mark.parametrize("placement", ["early", "groups"])
def test_a_step_computes_what_the_model_computes_after_its_cache(model, placement):
    asked, point = settings(model, placement=placement), Point(PLACES, 2)
    for arm in (Arm("math"), Arm("math", "toeplitz", 0.5)):
        step = decode_passes(asked, point, arm, GraphPool()).model
        with torch.no_grad():
            first, again = step(), step()
        torch.testing.assert_close(first, again, msg="every step stands at the last place")
        adapter = adapter_for(step.model)
        assert len(adapter.frozen_heads()) == (6 if arm.backend else 0)
        layouts = [site.layout for site in adapter.sites()]
        assert layouts == ModelPlan.of(asked, PLACES).layouts(arm)
        shape = SMALL[model]
        assert cache_bytes(step.cache) == cached_bytes(shape, layouts, point, torch.float32)
        if placement == "groups":
            size = shape.num_heads // shape.num_kv_heads
            whole = [{head // size for head in layout.frozen} for layout in layouts]
            assert [len(groups) * size for groups in whole] == [layout.num_frozen for layout in layouts]


def test_every_arm_is_timed_beside_its_control_and_its_cache_told(model, tmp_path):
    asked = settings(model, points=(f"{PLACES}x2",), pairs=2, tolerance=1e9)
    out = tmp_path / "decode.json"
    record = measure(asked, out=out, say=lambda _: None)
    assert json.loads(out.read_text())["finished"]
    assert [row["role"] for row in record["rows"]] == ["control", "frozen", "free"]
    control, frozen, free = record["rows"]
    assert {row["variant"] for row in record["rows"]} == {"call"}
    assert control["cache_bytes"] == frozen["baseline_cache_bytes"] > frozen["cache_bytes"]
    with free_backend():
        work = {
            row["role"]: DecodeKind().work(asked, Point(PLACES, 2), Arm("auto", row["backend"], row["rate"]))
            for row in record["rows"]
        }
    assert work["control"].bytes > work["frozen"].bytes >= work["free"].bytes
    assert work["control"].flops > work["frozen"].flops > work["free"].flops
    assert free["heads"] == frozen["heads"] == 6
    table = next(part for part in BENCHMARKS["decode"].tables(record) if not isinstance(part, str))
    assert {"baseline cache", "cache"} <= set(table.columns)
    assert not record["left_out"]


def test_a_model_without_a_cache_is_refused(model):
    with pytest.raises(InputError, match=r"tiny has no cache; --model is one of transformers"):
        measure(settings("tiny"), say=lambda _: None)


def test_the_launch_of_few_rows_is_left_out_where_it_cannot_run():
    asked = DecodeSettings(
        model="llama-124m", num_layers=1, points=("32x1",), rates=(0.5,), kernels=("auto", "split"), others=(),
        free=False, pairs=2, repeats=1, warmup=1, tolerance=100.0, profile=False, graphs="off", device="cpu",
        compile="off",
    )  # fmt: skip
    record = measure(asked)
    assert {row["arm"] for row in record["rows"]} == {"control auto", "50% toeplitz auto"}
    assert all("'split' needs a CUDA device" in left["why"] for left in record["left_out"])
    assert {left["what"].rsplit(": ")[-1] for left in record["left_out"]} >= {"ordinary split", "50% toeplitz split"}
