import json

import pytest

from saf.bench import OpSettings, PrefillSettings, UpdateSettings, measure
from saf.errors import InputError

SMALL = {"device": "cpu", "pairs": 2, "tolerance": 10.0, "warmup": 1, "repeats": 1}


def test_update(tmp_path):
    path = tmp_path / "update.json"
    settings = UpdateSettings(model="tiny", points=("32x1x2", "16x2x1"), rates=(0.25,), backends=("toeplitz",), **SMALL)
    record = measure(settings, out=path)
    assert json.loads(path.read_text()) == record
    assert (record["schema"], record["kind"], record["finished"]) == ("saf.bench/1", "update", True)
    assert UpdateSettings.from_dict(record["settings"]) == settings
    assert record["environment"]["versions"]["torch"]
    rows = record["rows"]
    assert [(row["point"]["length"], row["role"], row["heads"]) for row in rows] == [
        (32, "control", 0), (32, "frozen", 4), (32, "free", 4), (16, "control", 0), (16, "frozen", 4), (16, "free", 4),
    ]  # fmt: skip
    for row in rows:
        assert row["min"] <= row["q25"] <= row["ratio"] <= row["q75"] <= row["max"]
        assert row["control_ratio"] == next(r["ratio"] for r in rows if r["point"] == row["point"])
        assert row["arm_floor_ms"] is None  # no peak is known for a CPU
    assert [entry["arm"] for entry in record["kernels"][:2]] == ["ordinary auto", "25% toeplitz auto"]
    assert any("toeplitz" in name for name in record["kernels"][1]["attention"])


@pytest.mark.slow
def test_update_in_fresh_processes():
    settings = UpdateSettings(
        model="tiny", points=("16x1x1",), rates=(0.0,), fresh=True, profile=False, **{**SMALL, "pairs": 1}
    )
    record = measure(settings)
    assert record["left_out"] == []
    assert [(row["role"], row["pairs"]) for row in record["rows"]] == [("control", 1)]


def test_peak_memory_alone():
    settings = UpdateSettings(
        model="tiny", points=("16x1x1",), rates=(0.5,), free=False, memory=True, workers=2, **{**SMALL, "pairs": 0}
    )
    record = measure(settings)
    assert record["left_out"] == record["rows"] == []
    assert [(entry["arm"], entry["kind"]) for entry in record["memory"]] == [
        ("ordinary auto", "resident"), ("50% toeplitz auto", "resident"),
    ]  # fmt: skip
    assert all(entry["bytes"] > 50e6 for entry in record["memory"])


def test_a_process_that_fails_is_left_out(monkeypatch):
    monkeypatch.setattr("saf.bench.children.sys.executable", "/bin/false")
    settings = UpdateSettings(model="tiny", points=("16x1x1",), rates=(0.5,), memory=True, **{**SMALL, "pairs": 0})
    record = measure(settings)
    assert record["rows"] == record["memory"] == []
    assert [entry["why"] for entry in record["left_out"]] == ["its process ended with code 1: no output"] * 3


def test_prefill():
    settings = PrefillSettings(
        model="tiny", points=("32x2",), rates=(0.5,), precisions=("fp32", "bf16"), others=("math",), profile=False,
        **SMALL,
    )  # fmt: skip
    record = measure(settings)
    assert record["left_out"] == []
    assert [row["point"]["precision"] for row in record["rows"][::4]] == ["fp32", "bf16"]
    assert [row["role"] for row in record["rows"][:4]] == ["control", "kernel", "frozen", "free"]


def test_prefill_without_cuda_has_no_graphs():
    record = measure(PrefillSettings(model="tiny", points=("32x2",), rates=(0.5,), graphs="on", **SMALL))
    assert record["rows"] == []
    assert "CUDA graphs need a CUDA device" in record["left_out"][0]["why"]


def test_op():
    settings = OpSettings(
        points=("64x2",), rates=(0.25, 0.5), num_heads=4, head_dim=16, backends=("toeplitz", "reference"),
        others=("math",), profile=False, **SMALL,
    )  # fmt: skip
    record = measure(settings)
    assert record["left_out"] == []
    rows = [row for row in record["rows"] if row["variant"] == "both call"]
    assert [(row["part"], row["alone"], row["role"], row["heads"]) for row in rows] == [
        ("frozen", 1, "control", 0), ("frozen", 1, "frozen", 1), ("frozen", 1, "frozen", 1),
        ("frozen", 2, "control", 0), ("frozen", 2, "frozen", 2), ("frozen", 2, "frozen", 2),
        ("layer", None, "control", 0), ("layer", None, "kernel", 0),
        ("layer", None, "frozen", 1), ("layer", None, "frozen", 1), ("layer", None, "free", 1),
        ("layer", None, "frozen", 2), ("layer", None, "frozen", 2), ("layer", None, "free", 2),
    ]  # fmt: skip


def test_points_beyond_the_budget_are_left_out(said):
    settings = UpdateSettings(model="tiny", points=("16x1x1", "32x1x1"), seconds=1e-3, **SMALL)
    record = measure(settings, say=said.append)
    assert record["rows"] == []
    assert record["finished"] is True
    assert {entry["why"] for entry in record["left_out"]} == {"out of time"}
    assert record["left_out"][-1]["what"] == "T=32 B=1 x1"
    assert said


@pytest.mark.parametrize("names", [{"kernels": ("cudn",)}, {"others": ("fa9",)}, {"backends": ("toplitz",)}])
def test_unknown_names_are_refused_at_once(names):
    with pytest.raises(InputError, match="unknown"):
        measure(UpdateSettings(model="tiny", **names))
