"""The table of errors: right when execution is, failing when it is not, and about the layer that models have."""

import json

import pytest
import torch

from saf.bench import measure
from saf.bench.accuracy.errors import ErrorSettings, distance
from saf.bench.accuracy.layer import TENSORS, Layer
from saf.bench.accuracy.tables import error_tables
from saf.bench.kinds import BENCHMARKS
from saf.cli import main
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT, GPTConfig
from saf.ops.backends.toeplitz import Toeplitz
from saf.records.files import read_json
from saf.records.table import Cell
from saf.surgery import install_, prune_


def draw(seed: int = 0) -> Layer:
    shape = {"head_dim": 64, "batch_size": 2, "length": 129, "stored": 192}
    generator = torch.Generator().manual_seed(seed)
    return Layer.draw(heads=HeadLayout(4, 4, (1, 3)), **shape, generator=generator, device=torch.device("cpu"))


def test_the_papers_case_keeps_its_budgets(said):
    record = measure(ErrorSettings(device="cpu"), say=said.append)
    assert BENCHMARKS["errors"].failures(record) == []
    parts = [(row["part"], row["backend"], row["precision"], row["tensor"]) for row in record["rows"]]
    assert len(parts) == len(set(parts)) == 2 * (2 * (7 + 2) + 7)
    for part in ("layer", "pruned layer"):
        assert {row["tensor"] for row in record["rows"] if row["part"] == part} == set(TENSORS)
    assert {entry["what"] for entry in record["left_out"]} == {"fused fp32", "fused bf16"}
    for row in record["rows"]:
        assert 0 < row["relative_l2"] < (1e-6 if row["precision"] == "fp32" else 1e-2)
        assert row["beside"]["relative_l2"] > 0
        assert (row["eager"] is None) == (row["part"] == "operator")


def test_distance_is_the_papers():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert distance(exact + torch.tensor([0.0, 0.5]), exact) == {"max_abs": 0.5, "relative_l2": pytest.approx(0.1)}
    assert distance(torch.full((4,), 1e-9), torch.zeros(4))["relative_l2"] == pytest.approx(0.2)


def test_eager_in_float64_is_what_automatic_differentiation_of_the_model_gives():
    """The model's own layer, after surgery, in float32 beside the float64 answer in original head order."""
    layer = draw()
    exact = layer.eager(frozen=True, dtype=torch.float64)
    model = GPT(GPTConfig(vocab_size=64, num_layers=1, num_heads=4, hidden_size=256, max_length=192))
    attention = model.attention_layers()[0]
    for role, weight in attention.weights().items():
        weight.data.copy_(layer.weights[role])
    install_(model, HeadSet([(0, 1), (0, 3)]), layer.pattern)
    x = layer.x.clone().requires_grad_()
    output = attention(x, model.rotary(torch.arange(129)[None]), None)
    output.backward(layer.upstream)
    slots = torch.tensor(attention.layout.slots)[:, None] * 64 + torch.arange(64)
    rows, live = slots.flatten(), slots[:2].flatten()
    grads = {role: weight.grad for role, weight in attention.weights().items()}
    pairs = {"output": (output, exact["output"]), "input": (x.grad, exact["input"])}
    pairs |= {f"{role} projection": (grads[role], exact[f"{role} projection"][live]) for role in ("query", "key")}
    pairs["value projection"] = grads["value"], exact["value projection"][rows]
    pairs["output projection"] = grads["output"], exact["output projection"][:, rows]
    for name, (found, wanted) in pairs.items():
        assert distance(found.detach(), wanted)["relative_l2"] <= 1e-6, name
    frozen = torch.ones(256, dtype=torch.bool)
    frozen[live] = False
    for role in ("query projection", "key projection"):
        assert not exact[role][frozen].any()
        assert exact[role][~frozen].abs().sum(1).all()


def test_a_pruned_layer_is_one_whose_heads_give_zero_and_what_pruning_a_model_leaves():
    """Beside the paper's largest errors of the seven tensors; rows of pruned heads have no gradient."""
    layer = draw()
    exact = layer.eager(frozen=False, pruned=True, dtype=torch.float64)
    model = GPT(GPTConfig(vocab_size=64, num_layers=1, num_heads=4, hidden_size=256, max_length=192))
    attention = model.attention_layers()[0]
    for role, weight in attention.weights().items():
        weight.data.copy_(layer.weights[role])
    prune_(model, [(0, 1), (0, 3)])
    x = layer.x.clone().requires_grad_()
    output = attention(x, model.rotary(torch.arange(129)[None]), None)
    output.backward(layer.upstream)
    rows = (torch.tensor([0, 2])[:, None] * 64 + torch.arange(64)).flatten()
    found = {"output": output.detach(), "input": x.grad}
    wanted = {name: exact[name] for name in found}
    for role, weight in attention.weights().items():
        name, whole = f"{role} projection", exact[f"{role} projection"]
        found[name], wanted[name] = weight.grad, whole[:, rows] if role == "output" else whole[rows]
        others = whole.T if role == "output" else whole
        assert not others[~torch.isin(torch.arange(256), rows)].any(), name
    for name, tensor in found.items():
        assert distance(tensor, wanted[name])["relative_l2"] <= 1e-6, name
    record = measure(ErrorSettings(device="cpu", backends=("toeplitz",)), say=lambda _: None)
    told = str(error_tables(record)[-1])
    assert "7.48e-7 in fp32, 4.45e-3 in bf16" in told
    (table, *_) = BENCHMARKS["errors"].overview([(Cell(text="errors"), record)])
    pruned = [row for row in table.rows if "a layer whose heads are pruned" in map(str, row)]
    assert [next(word for word in map(str, row) if word in ("7.48e-7", "4.45e-3")) for row in pruned]
    eager = {row["precision"]: row["eager"]["relative_l2"] for row in record["rows"] if row["part"] == "pruned layer"}
    assert 0 < eager["fp32"] < 1e-6
    assert 0 < eager["bf16"] < 1e-2


def test_a_wrong_product_is_named_and_ends_the_command(tmp_path, monkeypatch, capsys):
    right = Toeplitz.forward
    monkeypatch.setattr(Toeplitz, "forward", lambda self, value, *rest: 1.001 * right(self, value, *rest))
    path = tmp_path / "errors.json"
    words = ["--device=cpu", "--backends=toeplitz", "--precisions=fp32", "--length=20", "--stored=20"]
    assert main(["bench", "errors", "--out", str(path), *words]) == 2
    printed = capsys.readouterr()
    assert "7 of 16 rows: layer toeplitz fp32 output: " in printed.err
    assert "operator toeplitz fp32 value: 1.00e-03 above" in printed.err
    assert "above" in printed.out
    record = read_json(path)
    assert record["kind"] == "errors"
    assert record["finished"]
    assert record["provenance"]["device"].startswith("cpu")


def test_the_command_prints_tables_or_json(tmp_path, capsys):
    words = ["--device=cpu", "--length=16", "--stored=20", "--head-dim=16"]
    assert main(["bench", "errors", "--out", str(tmp_path / "one.json"), *words]) == 0
    printed = capsys.readouterr().out
    assert "a layer of live and frozen heads, toeplitz, bf16" in printed
    assert "Left out: fused fp32; fused bf16: it needs a CUDA device" in printed
    assert main(["bench", "errors", "--out", str(tmp_path / "two.json"), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read_json(tmp_path / "two.json")


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected 1 <= length <= stored"):
        ErrorSettings(length=200)
    with pytest.raises(InputError, match="an even head_dim"):
        ErrorSettings(frozen=())
    with pytest.raises(InputError, match="frozen head ids must lie in"):
        ErrorSettings(frozen=(7,))
    with pytest.raises(UnsupportedError, match="backend 'fused' cannot run"):
        measure(ErrorSettings(device="cpu", backends=("fused",)), say=print)
