import pytest

from saf.bench import OpSettings, PrefillSettings, UpdateSettings, measure
from saf.bench.harness.runner import PointRunner
from saf.bench.kinds import BENCHMARKS
from saf.errors import InputError, UnsupportedError
from saf.records.files import read_json

SMALL = {"device": "cpu", "pairs": 2, "tolerance": 1e9, "warmup": 1, "repeats": 1}


def test_update(tmp_path):
    path = tmp_path / "update.json"
    settings = UpdateSettings(model="tiny", points=("32x1x2", "16x2x1"), rates=(0.25,), backends=("toeplitz",), **SMALL)
    record = measure(settings, out=path)
    assert read_json(path) == record
    assert (record["schema"], record["kind"], record["finished"]) == ("saf.result/2", "update", True)
    assert UpdateSettings.from_dict(record["settings"]) == settings
    assert record["provenance"]["versions"]["torch"]
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
def test_every_block_in_a_fresh_process():
    """Of prompts: a first step of an optimiser would load PyTorch's compiler in each, for three seconds."""
    settings = PrefillSettings(
        model="tiny", points=("16x1",), rates=(0.0,), fresh=True, profile=False, **{**SMALL, "pairs": 1}
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


@pytest.mark.parametrize("workers", [1, 3])
def test_a_process_that_fails_alone_is_left_out(monkeypatch, said, workers):
    monkeypatch.setattr("saf.bench.model.processes.sys.executable", "/bin/false")
    settings = UpdateSettings(
        model="tiny", points=("16x1x1",), rates=(0.5,), memory=True, workers=workers, **{**SMALL, "pairs": 0}
    )
    record = measure(settings, say=said.append)
    assert record["rows"] == record["memory"] == []
    arms = ("ordinary auto", "50% toeplitz auto", "50% free auto")
    assert record["left_out"] == [
        {"what": f"T=16 B=1 x1: peak memory of {arm}", "why": "its process ended with code 1: no output"}
        for arm in arms
    ]
    assert [any(f"again, alone: {arm}" in line for line in said) for arm in arms] == [workers > 1] * 3


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
    settings = {"model": "tiny", "points": ("32x2",), "rates": (0.5,), **SMALL}
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA device; use --graphs off"):
        measure(PrefillSettings(graphs="on", **settings))
    record = measure(PrefillSettings(graphs="both", **settings))
    assert {row["variant"] for row in record["rows"]} == {"call"}


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
    assert {row["ran"] for row in record["rows"]} == {"eager"}


def test_points_beyond_the_budget_are_left_out(said):
    settings = UpdateSettings(model="tiny", points=("16x1x1", "32x1x1"), seconds=1e-3, **SMALL)
    record = measure(settings, say=said.append)
    assert record["rows"] == []
    assert record["finished"] is True
    assert {entry["why"] for entry in record["left_out"]} == {"out of time"}
    assert record["left_out"][-1]["what"] == "T=32 B=1 x1"
    assert said


@pytest.mark.parametrize(
    "settings",
    [
        OpSettings(
            points=("64x2",),
            num_heads=4,
            head_dim=16,
            others=(),
            rates=(0.5,),
            backends=("toeplitz",),
            **{**SMALL, "pairs": 9},
        ),
        PrefillSettings(model="tiny", points=("16x1",), rates=(0.5,), **{**SMALL, "pairs": 9}),
    ],
    ids=["op", "prefill"],
)
def test_two_pairs_are_kept_when_time_runs_out(settings, monkeypatch, tmp_path, said):
    rounds, whole = [], PointRunner._round

    def until_the_second(self, *arguments):
        whole(self, *arguments)
        rounds.append(1)
        if len(rounds) == 2:
            self.recorder.budget._limit = 0.0

    monkeypatch.setattr(PointRunner, "_round", until_the_second)
    path = tmp_path / "bench.json"
    record = measure(settings, out=path, say=said.append)
    assert len(rounds) == 2
    assert read_json(path) == record
    assert {row["pairs"] for row in record["rows"]} == {2}
    assert {row["role"] for row in record["rows"]} >= {"control", "frozen"}
    assert {"pairs 3 to 9: out of time", "out of time"} >= {entry["why"] for entry in record["left_out"]}
    assert any(entry["what"].endswith("kernels of 50% toeplitz auto") for entry in record["left_out"])


def test_compiling_in_advance_needs_a_compiler():
    settings = UpdateSettings(model="tiny", points=("16x1x1",), precompile=True, **SMALL)
    with pytest.raises(InputError, match="precompile has no effect where models are not compiled"):
        measure(settings)
    settings = OpSettings(parts=("frozen",), others=(), compile="on", **SMALL)
    with pytest.raises(InputError, match="compile='on' has no effect on frozen heads alone"):
        measure(settings)
    with pytest.raises(InputError, match="compile='layers' is for updates, op has none"):
        measure(OpSettings(others=(), compile="layers", **SMALL))
    with pytest.raises(InputError, match="compile='on' has no effect on calls"):
        measure(OpSettings(others=(), compile="on", **SMALL))


def test_arms_that_fail_to_compile_in_advance_are_said(monkeypatch, said):
    monkeypatch.setattr("saf.bench.model.processes.sys.executable", "/bin/false")
    settings = UpdateSettings(
        model="tiny", points=("16x1x1",), rates=(0.5,), free=False, precompile=True, compile="on", profile=False,
        **{**SMALL, "pairs": 1},
    )  # fmt: skip
    monkeypatch.setattr("saf.bench.model.update.UpdateSubject", _nothing)
    record = measure(settings, say=said.append)
    for arm in ("ordinary auto", "50% toeplitz auto"):
        message = f"T=16 B=1 x1 not compiled in advance: {arm}: its process ended with code 1: no output"
        assert sum(line.endswith(message) for line in said) == 1
    assert any("compiled in advance: 0 of 2 arms" in line for line in said)
    # What is missing is what could not be built, not what was tried beforehand.
    assert {entry["why"] for entry in record["left_out"]} == {"InputError: not built here"}


def _nothing(*_: object, **__: object):
    raise InputError("not built here")


@pytest.mark.parametrize("names", [{"kernels": ("cudn",)}, {"others": ("fa9",)}, {"backends": ("toplitz",)}])
def test_unknown_names_are_refused_at_once(names):
    with pytest.raises(InputError, match="unknown"):
        measure(UpdateSettings(model="tiny", **names))


@pytest.mark.parametrize("settings", [OpSettings(shape="124n"), PrefillSettings(model="124n")])
def test_unknown_models_are_refused_before_anything_is_written(settings, tmp_path):
    with pytest.raises(InputError, match=r"unknown model '124n'; expected one of .*qwen3-4b"):
        measure(settings, out=tmp_path / "bench.json")
    assert not (tmp_path / "bench.json").exists()


def test_activation_checkpointing_is_compared_with_keeping_everything():
    settings = UpdateSettings(
        model="tiny",
        points=("16x1x1",),
        rates=(0.5,),
        free=False,
        profile=False,
        activation_checkpointing=True,
        **SMALL,
    )
    record = measure(settings)
    assert record["left_out"] == []
    assert [(row["role"], row["baseline"], row["arm"]) for row in record["rows"]] == [
        ("control", "ordinary auto", "control auto"),
        ("frozen", "ordinary auto", "50% toeplitz auto"),
        ("keeping", "ordinary auto", "ordinary keeping auto"),
    ]
    plain = [str(part) for part in BENCHMARKS["update"].tables(record, brief=True)]
    assert any("ordinary, every activation kept" in part for part in plain)
    assert any("computed again in the backward pass" in part for part in plain)
