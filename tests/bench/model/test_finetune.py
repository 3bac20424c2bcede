"""Updates of finetuning on a task's own examples: what is timed, in which order, and what is told of it."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from saf.bench.harness.kind import Kind
from saf.bench.harness.shape import shape_of
from saf.bench.kinds import BENCHMARKS, measure
from saf.bench.model.finetune import FinetuneUpdateSettings
from saf.data.tokenizer import train_bpe
from saf.errors import InputError, UnsupportedError
from saf.records.table import Table
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tokenizer and a user's own examples of two to nine words."""
    folder = tmp_path_factory.mktemp("bench-finetune")
    words = ["the", "of", "head", "loss", "rate", "token", "window", "layer", "update"]
    texts = [" ".join(words[: 2 + number % 8]) + f" {number}" for number in range(60)]
    train_bpe(texts, vocab_size=300).save(folder / "tokenizer.json")
    for name, some in (("train", texts[:48]), ("test", texts[48:])):
        with open(folder / f"{name}.jsonl", "w") as stream:
            for text in some:
                stream.write(json.dumps({"text": text, "choices": [" yes", " no"], "answer": len(text) % 2}) + "\n")
    return {"data": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl"), "tokenizer": str(folder)}


def settings(files, **changes) -> FinetuneUpdateSettings:
    given = {
        **{"task": "jsonl", "model": "tiny", "length": 64, "batch_size": 4, "accumulation": 2, "repeats": 2},
        **{"orders": (5, 6), "rates": (0.5,), "backends": ("toeplitz",), "device": "cpu", "pairs": 2, "warmup": 1},
        **{"tolerance": 1e9, "profile": False, **files, **changes},
    }
    return FinetuneUpdateSettings(**given)


def test_every_order_is_timed_by_itself_on_its_own_examples(files, tmp_path):
    asked = settings(files)
    record = measure(asked, out=tmp_path / "finetune.json")
    assert FinetuneUpdateSettings.from_dict(record["settings"]) == asked
    assert record["left_out"] == []
    orders = ("jsonl order-5", "jsonl order-6")
    assert [(row["variant"], row["role"]) for row in record["rows"]] == [
        (order, role) for order in orders for role in ("control", "frozen", "free")
    ]
    taken = asked.micro_batches()
    assert tuple(taken) == orders
    assert all(len(each) == 2 * 2 for each in taken.values())  # the micro-batches of a block
    widths = [inputs.shape[1] for each in taken.values() for inputs, _ in each]
    assert len(set(widths)) > 1
    assert {row["point"]["length"] for row in record["rows"]} == {max(widths)}
    kind: Kind = BENCHMARKS["finetune"]
    shown = "\n".join(map(str, kind.tables(record)))
    ratios = [row["ratio"] for row in record["rows"] if row["role"] == "frozen"]
    assert f"{statistics.fmean(ratios):.3f}× ± {statistics.stdev(ratios) / 2**0.5:.3f}" in shown
    assert "order 5" in shown


def test_orders_are_those_of_finetuning_and_the_same_for_all_arms(files):
    finetuning = FinetuneSettings(test=files["test"], tokenizer=files["tokenizer"])
    config = TrainConfig(data=files["data"], out="none", task="jsonl", finetuning=finetuning, batch_size=4, seed=6)
    expected = TASKS["jsonl"](config, length=64).training(0, torch.device("cpu"))
    for inputs, targets in settings(files).micro_batches()["jsonl order-6"]:
        own = expected.take()
        assert inputs.equal(own[0])
        assert targets.equal(own[1])


def test_ways_have_rows_and_means_of_their_own(files, tmp_path):
    """Without CUDA updates are called; rows of graphs are made up here."""
    record = measure(settings(files, graphs="both"), out=tmp_path / "finetune.json")
    assert {row["variant"] for row in record["rows"]} == {"jsonl order-5", "jsonl order-6"}
    replayed = [
        {**row, "variant": f"{row['variant']} graph", "ratio": 2 * row["ratio"]}
        for row in record["rows"]
        if not row["refused"]
    ]
    kind: Kind = BENCHMARKS["finetune"]
    both = {**record, "rows": [*record["rows"], *replayed]}
    titles = [str(part.title) for part in kind.tables(both)[:2]]
    assert titles == [
        "Mean over the orders of the examples",
        "Mean over the orders of the examples, passes replayed as CUDA graphs",
    ]
    assert len(kind.main_groups(both)) == 2 * len(kind.main_groups(record))
    called, graphed = (group.arms[0].ratio for group in kind.main_groups(both))
    assert graphed == pytest.approx(2 * called)
    first = {row["variant"]: row["variant"] == "jsonl order-5" for row in record["rows"]}
    halves = {**record, "rows": [row | {"refused": first[row["variant"]]} for row in record["rows"]]}
    (accepted,) = kind.main_groups(halves)
    (own,) = (row for row in record["rows"] if row["variant"] == "jsonl order-6" and row["role"] == "frozen")
    assert accepted.variant == "jsonl mean-of-1-orders"
    assert accepted.arms[0].row | {"variant": own["variant"]} == own
    refused = {**record, "rows": [row | {"refused": True} for row in record["rows"]] + replayed}
    told = [str(part.title) for part in kind.tables(refused) if isinstance(part, Table)]
    assert titles[1] in told
    assert titles[0] not in told
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA device; use --graphs off"):
        measure(settings(files, graphs="on"))


def test_settings_that_cannot_be_used_are_refused(files, monkeypatch):
    with pytest.raises(InputError, match="points must be left out: the task's examples make them"):
        settings(files, points=("64x4",))
    shape = shape_of("tiny", 64)
    small = replace(shape, gpt=replace(shape.gpt, vocab_size=64))
    monkeypatch.setattr("saf.bench.model.models.shape_of", lambda *_: small)
    with pytest.raises(InputError, match=r"token ids up to \d+, the model tiny knows 64"):
        measure(settings(files))
    with pytest.raises(InputError, match="orders must be different seeds"):
        settings(files, orders=(1, 1))
    assert settings(files, task="sst2", batch_size=None, accumulation=None).sizes == (256, 1)
