import json

import pytest
import torch

from saf.bench.harness.arms import Arm, plan
from saf.bench.harness.recorder import Recorder
from saf.bench.harness.runner import PointRunner
from saf.bench.harness.work import Work
from saf.bench.model.update import UpdateSettings
from saf.errors import InputError
from saf.machine.peaks import Peak

COMPARISONS = plan(kernels=["auto"], others=[], backends=["toeplitz"], rates=[0.5], free=False)
FROZEN = "50%_toeplitz_auto"


def run(recorder: Recorder, build, *, pairs=2, profile=False, comparisons=COMPARISONS, variants=("update",)):
    settings = UpdateSettings(pairs=pairs, profile=profile)
    device, peak = torch.device("cpu"), Peak(1e12, 1e12, "made up")
    runner = PointRunner(recorder, settings, name="here", fields={"point": {"length": 8}}, device=device, peak=peak)
    runner.run(comparisons, build, variants=variants, work=lambda arm, _: Work(2e9 * (1 - arm.rate), 1e6))
    return recorder.record


def test_arms_are_interleaved_in_abba_order(make_recorder, build, log):
    run(make_recorder(), build())
    ordinary, control, frozen = "ordinary auto", "control auto", "50% toeplitz auto"
    assert log[:3] == [f"warm {name}" for name in (ordinary, control, frozen)]
    assert log[3:] == [ordinary, control, ordinary, frozen, control, ordinary, frozen, ordinary]


def test_rows_hold_ratio_control_and_bound(make_recorder, build, said):
    record = run(make_recorder(), build(**{FROZEN: [4.0], "control_auto": [10.05]}))
    control, row = record["rows"]
    assert (row["baseline"], row["arm"], row["role"]) == ("ordinary auto", "50% toeplitz auto", "frozen")
    assert (row["baseline_ms"], row["arm_ms"], row["ratio"], row["pairs"]) == (10.0, 4.0, 2.5, 2)
    assert row["control_ratio"] == control["ratio"] == pytest.approx(10 / 10.05)
    assert not row["refused"]
    assert (row["baseline_tflops"], row["arm_tflops"]) == pytest.approx((0.2, 0.25))
    assert (row["baseline_floor_ms"], row["arm_floor_ms"]) == pytest.approx((2.0, 1.0))
    assert any("2.500×" in line for line in said)


def test_a_bad_control_refuses_the_whole_point(make_recorder, build, said):
    record = run(make_recorder(), build(**{FROZEN: [4.0], "control_auto": [10.2]}))
    assert [row["refused"] for row in record["rows"]] == [True, True]
    assert sum("refused" in line for line in said) == 2


def test_each_variant_has_its_own_control(make_recorder, build):
    # Blocks alternate between the two variants.
    record = run(make_recorder(), build(control_auto=[10.0, 10.0, 12.0, 12.0]), pairs=1, variants=("call", "graph"))
    assert [(row["variant"], row["refused"]) for row in record["rows"]] == [
        ("call", False), ("call", False), ("graph", False), ("graph", False),
    ]  # fmt: skip
    record = run(make_recorder(), build(control_auto=[10.0, 12.0]), pairs=1, variants=("call", "graph"))
    assert [(row["variant"], row["refused"]) for row in record["rows"]] == [
        ("call", False), ("call", False), ("graph", True), ("graph", True),
    ]  # fmt: skip


def test_an_arm_that_cannot_run_is_left_out_with_its_reason(make_recorder, build):
    def failing(arm: Arm):
        if arm.backend:
            raise InputError("no such thing\nsecond line")
        return build()(arm)

    record = run(make_recorder(), failing)
    assert [row["role"] for row in record["rows"]] == ["control"]
    assert record["left_out"] == [{"what": "here: 50% toeplitz auto", "why": "InputError: no such thing"}]


def test_pairs_that_do_not_fit_are_left_out(make_recorder, build, monkeypatch):
    recorder = make_recorder(seconds=100.0)
    spent = iter([0.0, 0.0, 0.0, 10.0, 20.0] + [1000.0] * 50)
    monkeypatch.setattr(type(recorder.budget), "left", property(lambda _: 100.0 - next(spent)))
    record = run(recorder, build(), pairs=9)
    assert [row["pairs"] for row in record["rows"]] == [2, 2]
    assert record["left_out"] == [{"what": "here", "why": "pairs 3 to 9: out of time"}]


def test_a_single_pair_is_not_recorded_and_that_is_said(make_recorder, build, monkeypatch):
    recorder = make_recorder(seconds=100.0)
    spent = iter([0.0, 0.0, 0.0, 10.0] + [1000.0] * 50)
    monkeypatch.setattr(type(recorder.budget), "left", property(lambda _: 100.0 - next(spent)))
    record = run(recorder, build(), pairs=9)
    assert record["rows"] == []
    assert record["left_out"] == [
        {"what": "here", "why": "pairs 2 to 9: out of time"},
        {"what": "here", "why": "2 comparisons of one pair; 2 are the fewest recorded"},
    ]


def test_kernels_are_recorded_after_timing(make_recorder, build):
    record = run(make_recorder(), build(), profile=True)
    assert [entry["arm"] for entry in record["kernels"]] == ["ordinary auto", "50% toeplitz auto"]
    assert record["kernels"][1]["kernels"][0]["name"] == "kernel of 50% toeplitz auto"


def test_the_file_is_valid_after_an_interruption(make_recorder, build, tmp_path, monkeypatch):
    monkeypatch.setattr("saf.bench.harness.recorder.SAVE_EVERY", 0.0)
    path = tmp_path / "bench.json"

    def interrupted(arm: Arm):
        subject = build()(arm)
        block = subject.timed_block

        def stop(variant: str) -> float:
            if subject.blocks == 3:
                on_disk = json.loads(path.read_text())
                assert on_disk["rows"][0]["pairs"] == 3
                raise KeyboardInterrupt
            return block(variant)

        subject.timed_block = stop if arm.backend else block
        return subject

    with pytest.raises(KeyboardInterrupt), make_recorder(path) as recorder:
        run(recorder, interrupted, pairs=9)
    record = json.loads(path.read_text())
    assert record["schema"] == "saf.result/2"
    assert record["finished"] is False
    assert [row["pairs"] for row in record["rows"]] == [3, 3]


def test_an_existing_file_is_kept(make_recorder, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="exists already"):
        make_recorder(path)
