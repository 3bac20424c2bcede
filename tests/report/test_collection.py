"""Of each point, arm and baseline the newest measurement stands, wherever it is; a file without any is named."""

import json
import re
from dataclasses import replace
from pathlib import Path

from saf.bench import Op, Prefill, Update
from saf.bench.protocol import Point
from saf.report.benchmarks import SPEED_KINDS
from saf.report.collection import find, newest, superseded
from saf.report.results import render_results
from tests.report.benchmark_records import POINT, TIMES, record
from tests.report.test_results import check_docs, put

LONGER = Point(16384, 2, 4)


def groups_of(record: dict) -> list:
    return SPEED_KINDS[record["kind"]].groups(record)


def dated(content: dict, day: int, **changes) -> dict:
    date = f"2026-01-{day:02d}T00:00:00+00:00"
    return content | {"provenance": content["provenance"] | {"date": date}} | changes


def arms(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the points and arms that stand, by file."""
    return {
        file.name: [(group.point["length"], arm.row["arm"]) for group in groups_of(file.record) for arm in group.arms]
        for file in newest(find(folder)[1])
    }


QUARTER, HALF = "25% toeplitz cudnn", "50% toeplitz cudnn"


def test_the_newest_of_each_point_stands_and_a_file_without_any_is_named(tmp_path):
    put(tmp_path, "old.json", dated(record(), 1))
    put(tmp_path, "both.json", dated(record(points=[POINT, LONGER]), 2))
    put(tmp_path, "new.json", dated(record(), 3))
    assert arms(tmp_path) == {
        "both": [(16384, QUARTER), (16384, HALF)],
        "new": [(4096, QUARTER), (4096, HALF)],
    }
    assert [file.name for file in superseded(find(tmp_path)[1])] == ["old"]
    both = next(file for file in newest(find(tmp_path)[1]) if file.name == "both")
    assert groups_of(both.record)[1].control is not None


def test_an_arm_that_was_not_measured_again_stays(tmp_path):
    times = {name: blocks for name, blocks in TIMES.items() if not name.startswith("50%")}
    put(tmp_path, "old.json", dated(record(times=TIMES | {"ordinary flash": [125.0]}, others=["flash"]), 1))
    put(tmp_path, "new.json", dated(record(times=times), 2))
    assert arms(tmp_path) == {"new": [(4096, QUARTER)], "old": [(4096, "ordinary flash"), (4096, HALF)]}


def test_a_refused_measurement_takes_no_place_of_an_accepted_one(tmp_path):
    put(tmp_path, "good.json", dated(record(), 1))
    put(tmp_path, "bad.json", dated(record(times=TIMES | {"control cudnn": [110.0]}), 2))
    assert list(arms(tmp_path)) == ["good"]


def test_other_devices_baselines_and_models_are_measurements_of_their_own(tmp_path):
    plain = record()
    put(tmp_path, "here.json", dated(plain, 1))
    device = plain["provenance"] | {"device": "Invented 9001"}
    put(tmp_path, "elsewhere.json", dated(plain | {"provenance": device}, 2))
    for name, field in (("flash", "baseline"), ("774m", "model")):
        rows = [row | {field: "ordinary flash" if field == "baseline" else "774m"} for row in plain["rows"]]
        put(tmp_path, f"{name}.json", dated(plain, 3, rows=rows))
    assert sorted(arms(tmp_path)) == ["774m", "elsewhere", "flash", "here"]
    told = {file.name: {group.way for group in groups_of(file.record)} for file in find(tmp_path)[1]}
    assert told["elsewhere"] == {"124m, on Invented 9001"}, "the device of most is named nowhere"
    assert told["here"] == told["flash"] == {"124m"}
    text = render_results(tmp_path, beside=tmp_path)["results.md"]
    assert "**124m, on Invented 9001**" in text
    assert "update speedup: 124m, on Invented 9001 |" in text


UNUSUAL = {
    "plain": (Update(device="cpu"), ""),
    "compiled": (Update(device="cpu", compile="on"), "compiled"),
    "layers": (Update(device="cpu", compile="layers"), "compiled by layers"),
    "again": (Update(device="cpu", activation_checkpointing=True), "layers computed again"),
    "group": (Update(device="cpu", parallel="ddp"), "ddp, 1 process"),
    "fresh": (Update(device="cpu", fresh=True), "processes of their own"),
    "even": (Update(device="cpu", placement="even"), "as many heads in every layer frozen"),
}
"""Settings by the names of files, and the words that part their measurements from those of the usual ones."""


def test_other_ways_to_measure_a_point_are_measurements_of_their_own(tmp_path):
    """A newer file of whole groups, or of a process group, takes no place of the plain one, and says what it is."""
    memory = {0.0: 2**34, 0.25: 15 * 2**30}
    for day, (name, (settings, _)) in enumerate(UNUSUAL.items(), start=1):
        put(tmp_path, f"{name}.json", dated(record(settings=replace(settings, pairs=4), memory=memory), day))
    files = find(tmp_path)[1]
    assert superseded(files) == []
    assert [len(file.record["memory"]) for file in newest(files)] == [2] * len(UNUSUAL)
    document = render_results(tmp_path, tmp_path)["results.md"]
    for name, (_, words) in UNUSUAL.items():
        model = ", ".join(filter(None, ["124m", words]))
        assert f"**{model}**" in document
        assert re.search(rf"\| {model} \| 4096x8x4 \| 25% frozen, toeplitz \| 15.00 GiB .*{name}.json", document)
    put(tmp_path, "newer.json", dated(record(settings=Update(device="cpu", pairs=4), memory=memory), 20))
    assert [file.name for file in superseded(find(tmp_path)[1])] == ["plain"]


def test_a_layer_of_other_heads_or_of_whole_groups_is_a_measurement_of_its_own(tmp_path):
    sizes = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64}
    grouped = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    cases = {"usual": (sizes, False), "grouped": (grouped, False), "groups": (grouped, True)}
    for day, (name, (layer, whole)) in enumerate(cases.items(), start=1):
        fields = {"part": "layer", "alone": None, "layer": layer, "dtype": "bfloat16"}
        asked = Op(pairs=4, device="cpu", whole_groups=whole)
        put(tmp_path, f"{name}.json", dated(record(settings=asked, fields=fields, variants=("forward call",)), day))
    files = find(tmp_path)[1]
    assert superseded(files) == []
    ways = {file.name: groups_of(file.record)[0].way for file in files}
    assert ways == {
        "usual": "whole layer, forward, called",
        "grouped": "whole layer, 32 heads of 128, 8 of keys, forward, called",
        "groups": "whole layer, 32 heads of 128, 8 of keys, whole groups frozen, forward, called",
    }


def test_the_kernel_that_pytorch_chooses_is_the_default_by_name(tmp_path):
    chosen = record()
    text = json.dumps(chosen["rows"]).replace(" cudnn", " auto")
    put(tmp_path, "named.json", dated(chosen, 1))
    put(tmp_path, "chosen.json", dated(chosen, 2, rows=json.loads(text)))
    assert list(arms(tmp_path)) == ["chosen"]


def test_few_tokens_with_a_pinned_kernel_are_not_those_without(tmp_path):
    """1 x 4,096 called takes one launch a layer unless a kernel is pinned; as a graph, and 64 prompts, take two."""
    points = [Point(4096, 1, precision="autocast"), Point(4096, 64, precision="autocast")]
    settings = Prefill(pairs=2, device="cpu", graphs="both")
    pinned = record(settings=settings, points=points, variants=("call", "graph"))
    rows = json.loads(json.dumps(pinned["rows"]).replace("cudnn", "auto"))
    put(tmp_path, "pinned.json", dated(pinned, 1))
    put(tmp_path, "chosen.json", dated(pinned, 2, rows=rows))
    stands = {
        file.name: [(group.point["batch_size"], group.variant) for group in groups_of(file.record) if group.arms]
        for file in newest(find(tmp_path)[1])
    }
    assert stands == {"pinned": [(1, "call")], "chosen": [(1, "call"), (1, "graph"), (64, "call"), (64, "graph")]}
    document = render_results(tmp_path, tmp_path)["results.md"]
    assert "| 4096x1, against cuDNN, kernel pinned |" in document
    assert "| 4096x1, against PyTorch's choice of kernel |" in document
    assert "| 25% frozen, toeplitz, kernel pinned |" in document
    assert document.count("- Kernel pinned: where tokens are few") == 1
    in_float32 = [row | {"point": row["point"] | {"precision": "fp32"}} for row in pinned["rows"]]
    assert not any(arm.apart for group in groups_of(pinned | {"rows": in_float32}) for arm in group.arms)


def test_peak_memory_analyses_and_files_of_unknown_kinds(tmp_path):
    memory = {0.0: 2**34, 0.25: 15 * 2**30}
    put(tmp_path, "memory-old.json", dated(record(memory=memory), 1, rows=[]))
    put(tmp_path, "memory-new.json", dated(record(memory=memory), 2, rows=[]))
    for day, name in enumerate(("a/fits", "b/fits", "b/fits-again"), start=1):
        content = {"schema": "saf.result/2", "kind": "fits", "settings": {}, "provenance": {}}
        put(tmp_path, f"{name}.json", dated(content, day))
    put(tmp_path, "loose.json", {"alone": 7})
    files = find(tmp_path, ["fits"])[1]
    assert [file.name for file in newest(files)] == ["a/fits", "fits-again", "loose", "memory-new"]
    assert {file.name for file in superseded(files)} == {"b/fits", "memory-old"}


def test_the_check_of_documents_names_a_file_to_remove(tmp_path, monkeypatch):
    tool = check_docs()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    put(tmp_path / "results", "bench/old.json", dated(record(), 1))
    put(tmp_path / "results", "bench/new.json", dated(record(), 2))
    assert [line for line in tool.stale_results() if not line.startswith("docs/")] == [
        "results/bench/old.json: all that it measured stands newer in other files; remove it, the history keeps it"
    ]
