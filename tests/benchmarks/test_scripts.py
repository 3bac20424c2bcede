"""The scripts of benchmarks/ end to end on a CPU at toy size, and what their numbers must be."""

import json
from statistics import fmean, median, stdev

import pytest
import torch

import saf
from benchmarks import accuracy, attention, compiling, finetuning, freezing
from saf.bench.protocol import Point
from saf.data.tokenizer import train_bpe
from saf.machine import Execution
from saf.models import GPT
from saf.records.files import read_json
from saf.report.benchmarks import tables
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig

SMALL = "--device cpu --pairs 2 --tolerance 1e9 --warmup 1 --repeats 1 --no-profile --others"
CPU = Execution.of("cpu")


def test_every_error_of_the_papers_case_is_within_its_limit(capsys):
    words = "--device cpu --backends toeplitz reference --transitions 3"
    assert accuracy.main(words.split()) == 0, capsys.readouterr().err


def test_freezing_is_timed_stage_by_stage(tmp_path):
    settings = freezing.Freezing(model="tiny", points=("48x4",), rates=(0.25, 0.5), repeats=3, device="cpu")
    record = freezing.measure(settings, out=tmp_path / "freezing.json")
    assert read_json(tmp_path / "freezing.json") == record
    assert record["left_out"] == []
    parts = [(row["part"], row["rate"], row["heads"]) for row in record["rows"]]
    assert parts == [("intervention", 0.25, 4), ("intervention", 0.5, 8)]
    for row in record["rows"]:
        assert list(row["stages"]) == ["capture", "statistics", "score", "select", "fit", "install", "other"]
        assert row["seconds"] == median(row["spread"]["all"])
        for number, whole in enumerate(row["spread"]["all"]):
            assert sum(stage["all"][number] for stage in row["stages"].values()) == pytest.approx(whole)


def test_attention_layers_run_on_the_inputs_of_the_first():
    model = GPT(saf.preset("tiny", vocab_size=40, max_length=32)).eval()
    layers = attention.AttentionLayers(model, torch.randint(40, (2, 16)))
    with torch.no_grad():
        last = model.attention_layers()[-1](*layers.inputs[0], **layers.inputs[1])
        assert torch.equal(layers(), last)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> dict[str, str]:
    """A tokenizer and a user's own examples of two to nine words."""
    folder = tmp_path_factory.mktemp("finetuning")
    words = ["the", "of", "head", "loss", "rate", "token", "window", "layer", "update"]
    texts = [" ".join(words[: 2 + number % 8]) + f" {number}" for number in range(60)]
    train_bpe(texts, vocab_size=300).save(folder)
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
    widths = [inputs.shape[1] for batches in settings.batches.values() for inputs, _ in batches]
    assert {row["point"]["length"] for row in record["rows"]} == {max(widths)}
    ratios = [row["ratio"] for row in record["rows"] if row["role"] == "frozen"]
    shown = "\n".join(map(str, tables(record)))
    assert f"{fmean(ratios):.3f}× ± {stdev(ratios) / 2**0.5:.3f}" in shown


def test_orders_are_those_of_finetuning(examples):
    own = FinetuneSettings(test=examples["test"], tokenizer=examples["tokenizer"])
    config = TrainConfig(data=examples["data"], out="none", task="jsonl", finetuning=own, batch_size=4, seed=6)
    expected = TASKS["jsonl"](config, length=64).training(0, torch.device("cpu"))
    for batch in finetuning_of(examples).batches["jsonl order-6"]:
        assert all(map(torch.equal, batch, next(expected)))


def test_what_an_event_costs_is_beyond_the_updates_that_follow(monkeypatch):
    """Compiling on two processor cores takes minutes: the form is the model itself."""
    monkeypatch.setattr(compiling, "FORMS", {"layers": "off"})
    settings = compiling.Compiling(device="cpu", model="tiny", points=("16x1x1",))
    results = compiling.events(settings, "layers", Point(16, 1, 1))
    assert [event["frozen"] for event in results.values()] == [0, 4, 5]
    assert all(event["lost_s"] > -1 and event["update_s"] > 0 for event in results.values())
