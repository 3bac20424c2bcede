"""The four benchmarks end to end on a CPU at toy size: presets, a checkpoint, a folder of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import saf
from saf import bench
from saf.bench.models import FlexAttention, plan_of
from saf.bench.protocol import Arm, in_fresh_processes
from saf.bench.record import Session
from saf.errors import InputError, SafError, UnsupportedError
from saf.heads import HeadSet
from saf.machine import GraphPool
from saf.ops import frozen_attention
from saf.synthetic import MEASURED_SHARES, heads_per_layer, synthetic_patterns
from tests.transformers_models import make

TOY: dict[str, Any] = {
    "device": "cpu", "pairs": 2, "tolerance": 1e9, "warmup": 1, "repeats": 1, "others": (), "profile": False,
}  # fmt: skip
HEADS = [(0, 0), (0, 1), (2, 3)]


def patterns(count: int, length: int):
    return synthetic_patterns(count, length, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory) -> Path:
    """A saved model with frozen heads; its weights from before freezing are in `ordinary`."""
    model, folder = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=64)), tmp_path_factory.mktemp("gpt")
    saf.save(model, folder / "ordinary")
    saf.install_(model, HEADS, patterns(3, 64))
    saf.save(model, folder / "frozen")
    return folder / "frozen"


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    model = make("llama-grouped")
    saf.install_(model, [(0, 1), (0, 2), (1, 0), (1, 1)], patterns(4, 32))
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return folder


def run(kind: str, model: object, **settings: Any) -> dict[str, Any]:
    return bench.measure(bench.KINDS[kind](model=str(model), **settings))


def roles(record: dict[str, Any]) -> list[tuple[str, int]]:
    assert record["left_out"] == [], record["left_out"]
    assert record["finished"]
    return [(row["role"], row["heads"]) for row in record["rows"]]


def test_flex_attention_is_causal_attention():
    query, key, value = torch.randn(3, 2, 4, 200, 16).unbind()
    (output,) = FlexAttention(200, torch.device("cpu"))(query, key, value, None, None)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (36, 8), (1, 3)])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 1.0])
def test_layers_have_the_shares_that_selection_takes(layers, heads, rate):
    counts = heads_per_layer(num_layers=layers, num_heads=heads, rate=rate)
    assert (sum(counts), max(counts) <= heads) == (round(rate * layers * heads), True)
    if (layers, rate) == (12, 0.25):
        assert counts == [round(12 * share) for share in MEASURED_SHARES]


def test_update():
    record = run("update", "tiny", points=("16x1x2",), rates=(0.25,), pruned=True, **TOY | {"profile": True})
    assert roles(record) == [("control", 0), ("frozen", 4), ("free", 4), ("pruned", 4)]
    assert record["rows"][0]["point"] == {"length": 16, "batch_size": 1, "accumulation": 2}
    assert record["rows"][1]["per_layer"] == [2, 1, 1, 0]
    kernels = {entry["arm"]: entry["attention"] for entry in record["kernels"]}
    assert any("toeplitz" in name for name in kernels["25% toeplitz auto"])


def test_prefill():
    settings = {"points": ("32x2",), "rates": (0.5,), "precisions": ("fp32", "bf16")}
    record = run("prefill", "tiny", **settings, **TOY | {"others": ("math",)})
    assert roles(record) == 2 * [("control", 0), ("kernel", 0), ("frozen", 8), ("free", 8)]
    assert [row["point"]["precision"] for row in record["rows"][::4]] == ["fp32", "bf16"]


def test_op():
    settings = {"points": ("64x2",), "rates": (0.25, 0.5), "backends": ("toeplitz", "linear")}
    record = run("op", "tiny", **settings, **TOY | {"others": ("math",)})
    rows = [row for row in record["rows"] if row["variant"] == "both call"]
    assert [(row["part"], row["alone"], row["role"], row["heads"]) for row in rows] == [
        ("frozen", 1, "control", 0), ("frozen", 1, "frozen", 1), ("frozen", 1, "frozen", 1),
        ("frozen", 2, "control", 0), ("frozen", 2, "frozen", 2), ("frozen", 2, "frozen", 2),
        ("layer", None, "control", 0), ("layer", None, "kernel", 0),
        ("layer", None, "frozen", 1), ("layer", None, "frozen", 1), ("layer", None, "free", 1),
        ("layer", None, "frozen", 2), ("layer", None, "frozen", 2), ("layer", None, "free", 2),
    ]  # fmt: skip
    assert record["left_out"] == []


def test_a_layer_whose_heads_are_all_frozen_takes_values_alone():
    record = run("op", "tiny", points=("64x2",), rates=(1.0,), **TOY)
    assert record["left_out"] == []
    rows = [row for row in record["rows"] if (row["part"], row["variant"]) == ("layer", "both call")]
    assert [(row["role"], row["heads"]) for row in rows] == [("control", 0), ("frozen", 4), ("free", 4)]


def test_an_operator_whose_gradient_is_wrong_is_not_timed(monkeypatch):
    def wrong(value, frozen):
        output = frozen_attention(value, frozen)
        return output.detach() / 2 + output / 2  # the right output, half its gradient

    monkeypatch.setattr("saf.bench.layer.frozen_attention", wrong)
    record = run("op", "tiny", points=("64x2",), rates=(0.5,), **TOY)
    assert "of the gradient" in record["left_out"][0]["why"]
    assert {row["role"] for row in record["rows"] if row["alone"]} == {"control"}


def test_decode():
    one = {"num_layers": 1, "points": ("16x2",), "rates": (0.5,), "compile": "off", "free": False}
    record = run("decode", "llama-124m", **one, **TOY)
    assert roles(record) == [("control", 0), ("frozen", 6)]
    ordinary, frozen = (row["cache_bytes"] for row in record["rows"][:2])
    assert ordinary == 2 * 16 * 2 * 768 * 4  # keys and values, 16 positions of 2 sequences, 768 channels in fp32
    assert frozen == ordinary - 6 * 16 * 2 * 64 * 4, "frozen heads keep no keys"


@pytest.mark.parametrize("kind", ["prefill", "update"])
def test_a_checkpoint_has_its_own_heads(gpt, kind):
    record = run(kind, gpt, points=("16x2",), **TOY)
    frozen = [row for row in record["rows"] if row["role"] == "frozen"]
    assert [(row["rate"], row["per_layer"], row["backend"]) for row in frozen] == [(3 / 16, [2, 0, 1, 0], "toeplitz")]
    assert (frozen[0]["model"], record["left_out"]) == (str(gpt), [])


@pytest.mark.parametrize("kind", ["update", "decode"])
def test_a_folder_of_transformers_has_its_own_heads(hf, kind):
    record = run(kind, hf, points=("16x2",), **TOY | ({"compile": "off"} if kind == "decode" else {}))
    assert roles(record) == [("control", 0), ("frozen", 4), ("free", 4)]
    assert record["rows"][1]["per_layer"] == [2, 2, 0]
    if kind == "decode":
        sizes = [row["cache_bytes"] for row in record["rows"][:2]]
        assert sizes[1] < sizes[0], "a group that is wholly frozen keeps no keys"


def test_the_baseline_of_a_folder_has_the_weights_from_before_freezing(gpt):
    plan, tokens = plan_of(bench.Prefill(model=str(gpt), device="cpu"), 16), torch.randint(64, (1, 16))
    for arm, folder in ((Arm("auto"), gpt.parent / "ordinary"), (Arm("auto", "toeplitz", 3 / 16), gpt)):
        model, saved = plan.build(arm).eval(), saf.load(folder).eval()
        torch.testing.assert_close(model(tokens), saved(tokens), rtol=0, atol=0)


def test_a_pruned_folder_is_compared_with_what_it_was(tmp_path):
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=64))
    saf.prune_(model, HeadSet(HEADS))
    saf.save(model, tmp_path)
    assert roles(run("prefill", tmp_path, points=("16x1",), **TOY)) == [("control", 0), ("pruned", 3)]


@pytest.mark.slow
def test_fresh_blocks_are_of_processes_of_their_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prefill = bench.Prefill(model="tiny", points=("16x1",), **TOY)
    (case,) = prefill.cases(Session("prefill", {}, prefill.execution))
    ready = in_fresh_processes(prefill, case.build, Arm("auto"), GraphPool())()
    assert ready.blocks["call"]() > 0
    with pytest.raises(SafError, match="nothing"):
        in_fresh_processes(prefill, case.build, Arm("nothing"), GraphPool())()


FOLDER, ORDINARY = "a folder with frozen heads", "a folder without"
REFUSALS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("update", {"model": "124n"}, InputError, "model must be"),
    ("update", {"points": ("4096",)}, InputError, "4096x8x15"),
    ("prefill", {"points": ("4096x8x4",)}, InputError, "like 4096x8,"),
    ("prefill", {"rates": (1.5,)}, InputError, "rates"),
    ("prefill", {"kernels": ("cudn",)}, InputError, "attention kernel"),
    ("prefill", {"backends": ("toepliz",)}, InputError, "backend"),
    ("prefill", {"pairs": 0}, InputError, "pairs"),
    ("prefill", {"memory": True}, InputError, "CUDA alone"),
    ("prefill", {"graphs": "on"}, UnsupportedError, "CUDA"),
    ("update", {"parallel": "ddp"}, InputError, "group"),
    ("prefill", {"model": FOLDER, "rates": (0.5,)}, InputError, "rates"),
    ("prefill", {"model": FOLDER, "points": ("128x1",)}, InputError, "at most 64"),
    ("op", {"model": FOLDER}, InputError, "must be a preset"),
    ("op", {"pruned": True}, InputError, "whole models"),
    ("prefill", {"model": "tiny", "num_layers": 0}, InputError, "at least 1"),
    ("decode", {"model": FOLDER}, InputError, "no cache"),
    ("prefill", {"model": ORDINARY}, InputError, "no frozen or pruned heads"),
]


@pytest.mark.parametrize(("kind", "changes", "error", "words"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_is_refused_before_anything_is_written(kind, changes, error, words, gpt, tmp_path):
    settings = {"model": "tiny", "points": ("16x1",), **TOY, **changes}
    folders = {FOLDER: str(gpt), ORDINARY: str(gpt.parent / "ordinary")}
    settings["model"] = folders.get(settings["model"], settings["model"])
    with pytest.raises(error, match=words):
        bench.measure(bench.KINDS[kind](**settings), out=tmp_path / "bench.json")
    assert not (tmp_path / "bench.json").exists()
