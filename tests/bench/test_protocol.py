"""The paired protocol with a fake clock: ratios within pairs, controls, refusals, bounds, what is left out."""

from statistics import median
from typing import Any

import pytest

from saf.bench import Update
from saf.bench.protocol import Arm, Case, Ready, alternate, compare, summary
from saf.bench.record import Session
from saf.errors import InputError
from saf.machine import GraphPool
from saf.records.files import read_json
from saf.report.benchmarks import speed_cells
from tests.report.benchmark_records import MACHINE, TIMES, record


@pytest.fixture
def session(tmp_path) -> Session:
    return Session("update", {}, MACHINE, out=tmp_path / "bench.json")


def rows_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in content["rows"]}


def test_pairs_alternate_and_the_speedup_is_the_median_within_pairs(session):
    order = []

    def block(name: str, milliseconds: list[float]):
        return lambda: order.append(name) or milliseconds.pop(0)

    # Both drift by half; within pairs the arm is always a quarter faster.
    drifting = {"arm": (block("A", [100.0, 125.0, 150.0]), block("B", [80.0, 100.0, 120.0]))}
    numbers = summary(alternate(session, "point", drifting, 3)["arm"])
    assert "".join(order) == "ABBAAB"
    assert [numbers.pop(name) for name in ("baseline_ms", "arm_ms", "pairs")] == [125.0, 100.0, 3]
    assert numbers.pop("pair_ms") == [[100.0, 80.0], [125.0, 100.0], [150.0, 120.0]]
    assert numbers == dict.fromkeys(("ratio", "q25", "q75", "min", "max"), 1.25)


def test_all_arms_are_built_before_one_is_warmed_up(session):
    """Building a compiled update drops what the process had compiled: earlier arms would compile in a timed block."""
    steps = []

    def build(arm: Arm, _: GraphPool):
        steps.append(f"build {arm.name}")

        def warm_up() -> Ready:
            steps.append("warm up")
            return Ready({"call": lambda: 1.0}, list, {})

        return warm_up

    pair = (Arm("math"), Arm("math", control=True))
    case = Case(name="a", fields={}, comparisons=[pair], build=build, describe=lambda arm: {})
    compare(session, Update(pairs=2, profile=False, device="cpu"), case)
    assert steps == ["build ordinary math", "build control math", "warm up", "warm up"]


def test_rows_have_the_ratio_the_control_and_the_work(tmp_path):
    content = record(tmp_path / "bench.json")
    assert read_json(tmp_path / "bench.json") == content
    assert (content["schema"], content["kind"], content["finished"]) == ("saf.result/2", "update", True)
    rows = rows_of(content)
    quarter = rows["25% toeplitz cudnn"]
    # Each block of the baseline serves five comparisons, so the pairs are those of a list taken five at a time.
    assert quarter["ratio"] == median(baseline / arm for baseline, arm in quarter["pair_ms"])
    assert quarter["control_ratio"] == rows["control cudnn"]["ratio"]
    assert [quarter[name] for name in ("baseline", "role", "pairs", "heads")] == ["ordinary cudnn", "frozen", 4, 36]
    assert [each["arm"] for each in content["kernels"]] == [name for name in TIMES if "control" not in name]


@pytest.mark.parametrize(("control", "refused"), [(100.9, False), (99.2, False), (101.2, True), (98.8, True)])
def test_all_is_refused_whose_control_strays(control, refused):
    steady = {name: [100.0] for name in TIMES} | {"control cudnn": [control]}
    assert {row["refused"] for row in record(times=steady)["rows"]} == {refused}


def test_without_its_control_nothing_is_accepted():
    content = record(times={name: times for name, times in TIMES.items() if "control" not in name})
    assert {row["refused"] for row in content["rows"]} == {True}
    assert content["left_out"] == [
        {"what": "T=4096 B=8 x4: control cudnn", "why": "RuntimeError: no way to run control cudnn."}
    ]


def test_the_share_of_the_free_bound():
    times = {"ordinary cudnn": [100.0], "control cudnn": [100.0]}
    times |= {"25% toeplitz cudnn": [90.0], "25% free cudnn": [80.0], "50% toeplitz cudnn": [60.0]}
    quarter, half = ((cells["free bound"], cells["of the bound"]) for _, cells in speed_cells(record(times=times)))
    assert quarter == ("1.250×", "50%")  # ten of the twenty milliseconds that free heads save
    assert half == ("–", "–")


def test_an_arm_that_fails_later_ends_the_pairs_and_those_before_stand(session):
    blocks = iter([1.0] * 5)
    times = alternate(session, "point", {"arm": (lambda: 2.0, blocks.__next__), "other": (lambda: 3.0, lambda: 1.0)}, 9)
    assert {key: len(pairs) for key, pairs in times.items()} == {"arm": 5, "other": 5}
    assert session.record["left_out"] == [{"what": "point", "why": "pairs from 6: StopIteration: no reason given"}]


def test_one_pair_is_too_few(session):
    blocks = {"arm": (iter([2.0]).__next__, iter([1.0]).__next__)}
    assert alternate(session, "point", blocks, 9) == {}


def test_a_record_that_is_there_is_not_overwritten_and_an_interrupted_one_says_so(session, tmp_path):
    def interrupted() -> None:
        with session:
            session.add([{"arm": "a"}])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read_json(tmp_path / "bench.json")["finished"] is False
    assert read_json(tmp_path / "bench.json")["rows"] == [{"arm": "a"}]
    with pytest.raises(InputError, match="exists already"):
        Session("update", {}, MACHINE, out=tmp_path / "bench.json")


def test_every_kernel_has_its_control_and_later_ones_stand_beside_the_first():
    settings = Update(
        kernels=("cudnn", "flash"), others=("flex", "cudnn"), backends=("toeplitz",), pruned=True, device="cpu"
    )
    names = [(baseline.name, arm.name, arm.role) for baseline, arm in settings.comparisons([0.25, 0.25])]
    assert names == [
        ("ordinary cudnn", "control cudnn", "control"), ("ordinary flash", "control flash", "control"),
        ("ordinary cudnn", "ordinary flash", "kernel"), ("ordinary cudnn", "ordinary flex", "kernel"),
        ("ordinary cudnn", "25% toeplitz cudnn", "frozen"), ("ordinary cudnn", "25% free cudnn", "free"),
        ("ordinary cudnn", "25% pruned cudnn", "pruned"), ("ordinary flash", "25% toeplitz flash", "frozen"),
        ("ordinary flash", "25% free flash", "free"), ("ordinary flash", "25% pruned flash", "pruned"),
    ]  # fmt: skip
    assert Arm("cudnn", "fused", 0.25).live_kernel == "auto", "it computes live heads itself"
