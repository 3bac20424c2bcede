"""Groups of a benchmark's rows, compared with the invented block times by hand."""

import statistics
from fractions import Fraction

import pytest

from saf.bench.harness.measured import shape, shape_in_words
from saf.bench.harness.settings import Point
from saf.bench.harness.speed_tables import bound_notes, caveats, memory_table, speed_table, ways
from saf.bench.kinds import SPEED_KINDS, groups_of
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings
from tests.report.benchmark_records import TIMES, record


def conditions(measured: dict) -> str:
    return SPEED_KINDS[measured["kind"]].conditions(measured)


def ratio(arm: str, baseline: str = "ordinary cudnn") -> Fraction:
    """Return the median within-pair ratio: which block of the baseline meets which of the arm follows from ABBA."""
    order = [c for c in TIMES if c != baseline]
    taken = dict.fromkeys(TIMES, 0)
    ratios = []
    for number in range(4):
        for name in order:
            times = {}
            for each in (baseline, name) if number % 2 == 0 else (name, baseline):
                times[each] = Fraction(TIMES[each][taken[each] % 4])
                taken[each] += 1
            if name == arm:
                ratios.append(times[baseline] / times[name])
    return statistics.median(ratios)


def test_arms_stand_beside_their_bound_and_control():
    (group,) = groups_of(record())
    assert [arm.name for arm in group.arms] == ["25% frozen, toeplitz", "50% frozen, toeplitz"]
    assert group.control["ratio"] == pytest.approx(float(ratio("control cudnn")))
    for arm, rate in zip(group.arms, ("25%", "50%"), strict=True):
        speed, bound = ratio(f"{rate} toeplitz cudnn"), ratio(f"{rate} free cudnn")
        assert arm.ratio == pytest.approx(float(speed))
        assert arm.bound == pytest.approx(float(bound))
        assert arm.share_of_bound == pytest.approx(float((1 - 1 / speed) / (1 - 1 / bound)))


def test_the_table_tells_times_ratio_bound_and_paper():
    (group,) = groups_of(record())
    table = speed_table([group])
    first = dict(zip(table.columns, table.rows[0], strict=True))
    speed, bound = ratio("25% toeplitz cudnn"), ratio("25% free cudnn")
    assert first["point"] == "4096x8x4"
    assert first["heads"] == "36"
    # The invented work is 2e12 operations, the invented peak 1e14 of them a second.
    assert first["baseline, ms (TFLOP/s)"] == f"100 ({2 / 0.1:g})"
    assert first["arm, ms (TFLOP/s)"] == f"92.5 ({2 / 0.0925:.3g})"
    assert (first["baseline floor, ms"], first["arm floor, ms"]) == ("20", "20")
    assert first["speedup"] == f"{float(speed):.3f}×"
    assert first["control"] == f"{float(ratio('control cudnn')):.4f}"
    assert first["free bound"] == f"{float(bound):.3f}×"
    assert first["of the bound"] == f"{100 * float((1 - 1 / speed) / (1 - 1 / bound)):.0f}%"
    assert first["paper"] == "1.056×"
    assert "baseline" not in table.columns


def test_a_bad_control_leaves_no_number():
    bad = TIMES | {"control cudnn": [105.0]}
    measured = record(times=bad)
    (group,) = groups_of(measured)
    assert [arm.ratio for arm in group.arms] == [None, None]
    assert [arm.bound for arm in group.arms] == [None, None]
    assert [arm.share_of_bound for arm in group.arms] == [None, None]
    table = speed_table([group])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["speedup"] == "refused"
    assert "middle half of pairs" not in cells
    assert caveats(measured, [group]) == ["Refused: 124m, 4096x8x4: two ordinary models differ by 4.76%."]


def test_without_a_control_nothing_is_told():
    measured = record(times={name: times for name, times in TIMES.items() if "control" not in name})
    (group,) = groups_of(measured)
    assert group.control is None
    assert group.arms[0].ratio is None
    assert "the control could not be measured" in caveats(measured, [group])[0]
    assert "Left out: T=4096 B=8 x4: control cudnn: RuntimeError: no way to run control cudnn." in caveats(
        measured, [group]
    )


def test_a_slower_arm_has_no_share_and_a_bound_of_one_neither():
    slower = TIMES | {"25% toeplitz cudnn": [110.0], "50% free cudnn": [100.0, 102.0, 98.0, 100.0]}
    (group,) = groups_of(record(times=slower))
    assert group.arms[0].ratio < 1
    assert [arm.share_of_bound for arm in group.arms] == [None, None]


@pytest.mark.parametrize(("spread", "why"), [(6.0, "pairs scatter more"), (0.5, "something else differs")])
def test_an_arm_faster_than_its_bound_has_a_note_in_place_of_a_share(spread, why):
    free = [95.0 - spread, 95.0, 95.0, 95.0 + spread]
    (group,) = groups_of(record(times=TIMES | {"25% free cudnn": free}))
    quarter, half = group.arms
    assert quarter.ratio > quarter.bound > 1
    assert quarter.share_of_bound is None
    assert 0 < half.share_of_bound < 1
    table = speed_table([group])
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert first["of the bound"] == "–"
    assert second["of the bound"].endswith("%")
    (note,) = bound_notes([group])
    assert note.startswith("25% frozen, toeplitz, 4096x8x4 (124m): measured faster than its free bound")
    assert why in note
    assert bound_notes(groups_of(record())) == []


def test_unknown_peaks_leave_no_floor():
    measured = record()
    told = conditions({**measured, "provenance": measured["provenance"] | {"peak": None}})
    assert "Floors" not in told
    rows = [row | {"baseline_floor_ms": None, "arm_floor_ms": None} for row in measured["rows"]]
    table = speed_table(groups_of(measured | {"rows": rows}))
    assert not [name for name in table.columns if "floor" in name]
    peak = {"flops": 1e14, "bandwidth": 1e12, "source": "made up"}
    told = conditions({**measured, "provenance": measured["provenance"] | {"peak": peak}})
    assert "Floors are roofline bounds at 100 TFLOP/s in bfloat16 and 1 TB/s (made up)." in told


def test_other_kernels_are_arms_and_other_baselines_groups():
    times = TIMES | {"ordinary flash": [120.0]}
    (group,) = groups_of(record(times=times, others=["flash"]))
    assert [arm.name for arm in group.arms] == [
        "ordinary, flash attention",
        "25% frozen, toeplitz",
        "50% frozen, toeplitz",
    ]
    assert group.arms[0].bound is None
    assert group.arms[0].paper is None


def test_points_and_ways_part():
    settings = PrefillSettings(pairs=2, device="cpu", graphs="both")
    points = [Point(512, 64, precision="autocast"), Point(4096, 1, precision="autocast")]
    groups = groups_of(record(settings=settings, points=points, variants=("call", "graph")))
    assert list(ways(groups)) == ["124m, called, autocast", "124m, replayed as a CUDA graph, autocast"]
    quoted = {(shape(g.point), g.variant): [arm.paper and arm.paper.text for arm in g.arms] for g in groups}
    assert quoted == {
        ("512x64", "call"): ["1.092 to 1.116×", "1.200 to 1.244×"],
        ("512x64", "graph"): [None, None],
        ("4096x1", "call"): ["0.969×", "0.972×"],
        ("4096x1", "graph"): ["1.113×", "1.220×"],
    }
    assert "up to 40 calls" in conditions({**record(settings=settings, variants=("call",)), "kind": "prefill"})


@pytest.mark.parametrize(
    ("settle", "driver", "words"),
    [
        (None, "580", "after up to 400 ms of untimed"),
        (None, None, None),
        (20.0, None, "after up to 20 ms"),
        (0.0, "580", None),
    ],
)
def test_the_time_to_settle_is_told(settle, driver, words):
    plain = record(settings=PrefillSettings(pairs=2, device="cpu", settle_ms=settle), variants=("call",))
    told = conditions({**plain, "provenance": plain["provenance"] | {"driver": driver}})
    assert words in told if words else "untimed" not in told
    older = {name: value for name, value in plain["settings"].items() if name != "settle_ms"}
    assert "untimed" not in conditions({**plain, "settings": older})


def test_the_rest_before_an_operators_block_is_told():
    fields = {"part": "frozen", "alone": 3, "layer": {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64}}
    settings = OpSettings(pairs=2, device="cpu", backends=("toeplitz",))
    plain = record(settings=settings, fields=fields, points=[Point(4096, 8)], variants=("both graph",))
    told = conditions({**plain, "provenance": plain["provenance"] | {"driver": "580"}})
    assert "after 200 ms of rest" in told
    assert "rest" not in conditions(plain)


def test_models_compiled_by_their_layers_say_so():
    plain = record(settings=UpdateSettings(pairs=2, device="cpu", compile="layers"), variants=("update",))
    assert ", compiled by decoder layers, in the same process" in conditions(plain)


def test_which_operators_were_compiled_is_told_row_by_row():
    fields = {"part": "layer", "alone": None, "layer": {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64}}
    settings = OpSettings(pairs=2, device="cpu", backends=("toeplitz",), others=("flex",))
    times = TIMES | {"ordinary flex": [120.0]}
    older = record(settings=settings, times=times, others=["flex"], fields=fields, points=[Point(4096, 8)])
    older["provenance"] = older["provenance"] | {"driver": "580"}
    assert ", compiled, in the same process" in conditions(older)

    def sentences_of(compiled) -> str:
        rows = [row | {"ran": "compiled" if compiled(row) else "eager"} for row in older["rows"]]
        return conditions(older | {"rows": rows})

    assert ", not compiled, in the same process" in sentences_of(lambda _: False)
    words = "not compiled but for layers with frozen heads where replayed as graphs"
    assert f", {words}, in" in sentences_of(lambda row: row["backend"])
    assert f", {words} and flex attention, in" in sentences_of(lambda row: row["backend"] or row["kernel"] == "flex")


def test_operators_are_told_by_part_and_have_a_floor():
    fields = {"part": "frozen", "alone": 8, "layer": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}}
    settings = OpSettings(pairs=2, device="cpu", backends=("toeplitz",))
    (alone,) = groups_of(record(settings=settings, fields=fields, points=[Point(4096, 8)], variants=("both graph",)))
    assert alone.way == "8 heads alone, 32 heads of 128, 8 of keys, forward and backward, replayed as a CUDA graph"
    assert alone.arms[0].paper is None
    table = speed_table([alone])
    assert float(dict(zip(table.columns, table.rows[0], strict=True))["share of time"]) == pytest.approx(
        1 / alone.arms[0].ratio, abs=1e-3
    )
    layer = fields | {"part": "layer", "alone": None}
    (whole,) = groups_of(record(settings=settings, fields=layer, points=[Point(4096, 8)], variants=("forward call",)))
    assert whole.way == "whole layer, 32 heads of 128, 8 of keys, forward, called"
    assert [arm.paper and arm.paper.text for arm in whole.arms] == [None, "1.27×"]
    table = speed_table([whole])
    assert dict(zip(table.columns, table.rows[0], strict=True))["arm floor, ms"] == "20"
    assert "paper" in table.columns
    assert "paper" not in speed_table([alone]).columns


def test_memory_stands_beside_the_ordinary_model_and_the_paper():
    measured = record(memory={0.0: 16 * 2**30, 0.25: 15 * 2**30, 0.5: 14 * 2**30})
    assert memory_table(measured, "124m", SPEED_KINDS[measured["kind"]].quoted_memory).rows == (
        ("124m", "4096x8x4", "ordinary, cuDNN", "16.00 GiB", "–", "32.21 GiB"),
        ("124m", "4096x8x4", "25% frozen, toeplitz", "15.00 GiB", "−6.25%", "−1.96%"),
        ("124m", "4096x8x4", "50% frozen, toeplitz", "14.00 GiB", "−12.50%", "−3.04%"),
    )
    few = measured | {"settings": measured["settings"] | {"num_layers": 2}}
    assert "paper" not in memory_table(few, "124m, 2 layers", SPEED_KINDS[few["kind"]].quoted_memory).columns


def test_a_shape_in_words():
    assert shape_in_words({"length": 16384, "batch_size": 1, "accumulation": 15}) == (
        "16,384 tokens × 1 sequence × 15 micro-batches"
    )
