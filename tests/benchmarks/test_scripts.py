"""The scripts of benchmarks/ end to end on a CPU at toy size, and what their numbers must be."""

import json
from pathlib import Path
from statistics import fmean, median, stdev

import pytest
import torch

import saf
from benchmarks import accuracy, attention, compiling, finetuning, freezing, nanogpt, placement
from saf.bench.protocol import Session
from saf.calibration import calibrate
from saf.data.tokenizer import train_bpe
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.models import GPT, GPTConfig
from saf.records.files import read_json
from saf.report.benchmarks import tables
from saf.statistics import AttentionStatistics
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig

SMALL = "--device cpu --pairs 2 --tolerance 1e9 --warmup 1 --repeats 1 --no-profile --others"
CPU = Execution.of("cpu")


def test_every_error_of_the_papers_case_is_within_its_limit(capsys):
    words = "--device cpu --backends toeplitz reference --transitions 3"
    assert accuracy.main(words.split()) == 0, capsys.readouterr().err


def test_an_operator_that_is_wrong_is_named(monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "frozen_attention", lambda value, frozen: value * 1.01)
    assert accuracy.main(["--device", "cpu", "--backends", "toeplitz", "--precisions", "fp32"]) == 1
    assert "operator toeplitz fp32 output" in capsys.readouterr().err


def test_a_state_that_undoing_leaves_wrong_is_named(monkeypatch):
    undo = accuracy.uninstall_

    def leaves_something(model, heads):
        undo(model, heads)
        model.embed.weight.data[:, 0] += 1e-4

    monkeypatch.setattr(accuracy, "uninstall_", leaves_something)
    settings = accuracy.Accuracy(device="cpu", backends=("toeplitz",), precisions=("fp32",), transitions=12)
    assert any("transitions" in line for line in accuracy.above_limits(accuracy.measure(settings)))


def test_errors_are_distances_from_float64():
    exact = torch.tensor([3.0, 4.0])
    assert accuracy.distance(exact + torch.tensor([0.0, 0.5]), exact) == {"max_abs": 0.5, "relative_l2": 0.1}
    with pytest.raises(InputError, match="length must be"):
        accuracy.measure(accuracy.Accuracy(length=200))


@pytest.fixture(scope="module")
def frozen_record(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "freezing.json"
    settings = freezing.Freezing(model="tiny", points=("48x4",), rates=(0.25, 0.5), repeats=3, device="cpu")
    record = freezing.measure(settings, out=out)
    assert read_json(out) == record
    return record


def test_freezing_is_timed_stage_by_stage(frozen_record):
    assert frozen_record["left_out"] == []
    parts = [(row["part"], row.get("rate"), row.get("heads")) for row in frozen_record["rows"]]
    assert parts == [("intervention", 0.25, 4), ("intervention", 0.5, 8), ("fit", None, 16), ("dense", None, None)]
    for row in frozen_record["rows"][:2]:
        assert list(row["stages"]) == ["capture", "statistics", "score", "select", "fit", "install", "other"]
        assert row["seconds"] == median(row["spread"]["all"])
        for number, whole in enumerate(row["spread"]["all"]):
            assert sum(stage["all"][number] for stage in row["stages"].values()) == pytest.approx(whole)
        assert row["same_each_time"] is True
        assert row["bar_seconds"] is None, "limits are for GPUs"


def test_the_dense_collection_agrees_and_is_extrapolated(frozen_record):
    row = frozen_record["rows"][-1]
    assert (row["layers"], row["of_layers"], row["extrapolated"], row["agrees"]) == (2, 4, True, True)
    assert row["seconds"] == pytest.approx(2 * sum(row["layer_seconds"]))
    assert 0 < max(row["difference"].values()) < 1e-5


def test_statistics_that_differ_are_refused():
    model = GPT(GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=32, max_length=48))
    model.reset_parameters(torch.Generator().manual_seed(0))
    ids = torch.randint(40, (4, 48), generator=torch.Generator().manual_seed(1))
    subject = freezing.Interventions(model, list(ids.split(2)), CPU)
    session = Session("calibration", {}, CPU, say=lambda _: None)
    found = calibrate(model, subject.ids)
    found.eta_rel[1, 2, 5] *= 1.1
    row = freezing.dense_collections(session, subject, found, 2)
    assert row["agrees"] is False
    worst = found.eta_rel[1, 2, 5] / 11 / calibrate(model, subject.ids).eta_rel[1, 2].max()
    assert row["difference"]["eta_rel"] == pytest.approx(worst.item(), rel=1e-3)


def test_timed_freezings_leave_the_model_as_it_was():
    model = GPT(GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=32, max_length=48))
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(40, (4, 48), generator=torch.Generator().manual_seed(1))
    freezing.Interventions(model, list(ids.split(2)), CPU).once(0.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_heads_of_a_file_are_fitted(tmp_path):
    model = GPT(saf.preset("tiny", vocab_size=40, max_length=32))
    found = calibrate(model, [torch.randint(40, (2, 32))])
    found.save(tmp_path / "statistics.safetensors")
    settings = freezing.Freezing(rates=(), statistics=tmp_path / "statistics.safetensors", repeats=3, device="cpu")
    (row,) = freezing.measure(settings)["rows"]
    assert (row["heads"], row["length"]) == (16, 32)
    exact = AttentionStatistics.load(tmp_path / "statistics.safetensors")
    fitted = saf.fit_compact(exact.eta_abs.flatten(0, 1).double(), exact.eta_rel.flatten(0, 1).double())
    goals = freezing.Goals.of(exact)
    kl = saf.fit_kl(fitted, *(each.double() for each in goals[:3]))
    assert row["worst_kl"] == pytest.approx(kl.max().item(), rel=1e-6)
    with pytest.raises(InputError, match="statistics must"):
        freezing.measure(freezing.Freezing(rates=(), statistics=tmp_path / "none.npz"))


def test_attention_layers_of_a_model_of_transformers(tmp_path):
    words = f"--model llama-124m --num-layers 2 --points 16x1 --rates 0.5 {SMALL} --out {tmp_path}/attention.json"
    assert attention.main(words.split()) == 0
    record = read_json(tmp_path / "attention.json")
    assert record["left_out"] == []
    assert [row["role"] for row in record["rows"]] == ["control", "frozen", "free"]
    with pytest.raises(InputError, match="compile must be off"):
        attention.measure(attention.Attention(compile="on", device="cpu"))


def test_attention_layers_run_on_what_the_first_is_given():
    model = GPT(saf.preset("tiny", vocab_size=40, max_length=32)).eval()
    tokens = torch.randint(40, (2, 16))
    layers = attention.AttentionLayers(model, tokens)
    with torch.no_grad():
        last = model.attention_layers()[-1](*layers.inputs[0], **layers.inputs[1])
        assert torch.equal(layers(), last)


def test_placements_stand_side_by_side(tmp_path):
    words = f"--model tiny --points 16x1x1 --rates 0.5 --no-free {SMALL} --out {tmp_path}/placement.json"
    assert placement.main(words.split()) == 0
    early, even = (read_json(tmp_path / f"placement-{each}.json")["rows"][1] for each in ("early", "even"))
    assert even["per_layer"] == [2, 2, 2, 2]
    assert early["per_layer"][0] > 2
    assert sum(early["per_layer"]) == 8


MODEL = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)
    def configure_optimizers(self, decay, rate, betas, kind):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas, weight_decay=decay)
    def forward(self, inputs, targets):
        logits = self.embed(inputs) @ self.embed.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_updates_beside_nanogpts(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    words = f"--nanogpt {tmp_path} --model tiny --points 16x1x2 --out {tmp_path}/nanogpt.json {SMALL}"
    assert nanogpt.main(words.split()) == 0
    record = read_json(tmp_path / "nanogpt.json")
    control, ours = record["rows"]
    assert (control["control"], ours["control"]) == (True, False)
    assert ours["control_ratio"] == control["ratio"]
    assert ours["arm_tokens_per_second"] == pytest.approx(1e3 * 32 / ours["arm_ms"])
    with pytest.raises(InputError, match=r"model\.py does not exist"):
        nanogpt.compare_updates(nanogpt.BesideNanoGPT(nanogpt=Path("nowhere")))


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> dict[str, str]:
    """A tokenizer and a user's own examples of two to nine words."""
    folder = tmp_path_factory.mktemp("finetuning")
    words = ["the", "of", "head", "loss", "rate", "token", "window", "layer", "update"]
    texts = [" ".join(words[: 2 + number % 8]) + f" {number}" for number in range(60)]
    train_bpe(texts, vocab_size=300).save(folder / "tokenizer.json")
    for name, some in (("train", texts[:48]), ("test", texts[48:])):
        lines = [json.dumps({"text": text, "choices": [" yes", " no"], "answer": len(text) % 2}) for text in some]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {"data": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"), "tokenizer": str(folder)}


def finetuning_of(examples: dict[str, str], **changes) -> finetuning.Finetuning:
    sizes = {"length": 64, "batch_size": 4, "accumulation": 2, "repeats": 2, "orders": (5, 6), "rates": (0.5,)}
    toy = {"device": "cpu", "pairs": 2, "warmup": 1, "tolerance": 1e9, "profile": False}
    return finetuning.Finetuning(**{"task": "jsonl", "model": "tiny", **sizes, **toy, **examples, **changes})


def test_every_order_of_examples_is_timed_by_itself(examples):
    settings = finetuning_of(examples)
    record = finetuning.measure(settings)
    assert record["left_out"] == []
    assert [(row["variant"], row["role"]) for row in record["rows"]] == [
        (order, role) for order in ("jsonl order-5", "jsonl order-6") for role in ("control", "frozen", "free")
    ]
    widths = [inputs.shape[1] for batches in settings.batches().values() for inputs, _ in batches]
    assert {row["point"]["length"] for row in record["rows"]} == {max(widths)}
    ratios = [row["ratio"] for row in record["rows"] if row["role"] == "frozen"]
    shown = "\n".join(map(str, tables(record)))
    assert f"{fmean(ratios):.3f}× ± {stdev(ratios) / 2**0.5:.3f}" in shown


def test_orders_are_those_of_finetuning(examples):
    own = FinetuneSettings(test=examples["test"], tokenizer=examples["tokenizer"])
    config = TrainConfig(data=examples["data"], out="none", task="jsonl", finetuning=own, batch_size=4, seed=6)
    expected = TASKS["jsonl"](config, length=64).training(0, torch.device("cpu"))
    for inputs, targets in finetuning_of(examples).batches()["jsonl order-6"]:
        found = expected.take()
        assert inputs.equal(found[0])
        assert targets.equal(found[1])


@pytest.mark.parametrize(
    ("changes", "words"), [({"orders": (5, 5)}, "orders"), ({"points": ("8x1",)}, "points must be left out")]
)
def test_finetuning_that_is_refused(examples, changes, words):
    with pytest.raises(InputError, match=words):
        finetuning.measure(finetuning_of(examples, **changes))


@pytest.fixture
def uncompiled(monkeypatch) -> None:
    """Compiling on two processor cores takes minutes: both forms are the model itself."""
    monkeypatch.setattr(compiling, "FORMS", {"whole": "off", "layers": "off"})


def test_forms_of_compilation_are_timed_as_pairs(uncompiled):
    settings = {"device": "cpu", "model": "tiny", "points": ("16x1x1",), "repeats": 1, "pairs": 2, "tolerance": 1e9}
    record = compiling.measure(compiling.Compiling(**settings, only="pairs"))
    assert record["left_out"] == []
    assert [(row["rate"], row["control"], row["pairs"]) for row in record["rows"]] == [
        (0.0, True, 2), (0.0, False, 2), (0.25, True, 2), (0.25, False, 2),
    ]  # fmt: skip
    for control, layers in (record["rows"][:2], record["rows"][2:]):
        assert control["control_ratio"] == layers["control_ratio"] == control["ratio"]
        assert layers["busy"]["whole"]["kernels"] > 0
    assert "control ratio" in str(tables(record))


def test_what_an_event_costs_is_beyond_the_updates_that_follow(uncompiled, monkeypatch):
    settings = compiling.Compiling(device="cpu", model="tiny", points=("16x1x1",))
    found = compiling.events(settings, "layers")
    assert [event["frozen"] for event in found.values()] == [0, 4, 5]
    ticks = iter([9e3, 2e3, 1e3, 1e3, 1e3, 1e3])
    monkeypatch.setattr(compiling, "updates_in_a_row", lambda updater, count: next(ticks))

    class Updater:
        def compile_(self) -> None:
            pass

    lost = compiling.stand_still(Updater())
    assert (lost["first_s"], lost["update_s"]) == (9.0, 1.0)
    assert lost["lost_s"] == pytest.approx(9.0, abs=0.01)
