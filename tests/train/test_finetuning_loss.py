"""The loss of finetuning is the mean over the answer tokens of an update, however it is cut into micro-batches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from saf.records.files import read_lines
from saf.tasks import FinetuneSettings, FinetuneTask
from saf.train import TrainConfig, load_model, open_checkpoint, pretrain
from tests.train.conftest import SMALL
from tests.train.group import together

ANSWERS = ["no", "the loss of a head", "of", "the update of a pattern of the model of the window", "a", "rate of loss"]
"""Of very unequal length."""
CUTS = {"8 x 1": (8, 1), "3 micro-batches": (3, 3), "1 x 8": (1, 8)}


@pytest.fixture(scope="module")
def settings(data, tmp_path_factory):
    """Settings of one update on eight examples or nine, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("unequal")
    for name, count in (("train", 12), ("test", 2)):
        records = [
            {"text": f"freeze {name} {number}: ", "choices": ANSWERS, "answer": number % len(ANSWERS)}
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return TrainConfig(
        **{**SMALL, "batch_size": 1},
        task="jsonl",
        data=str(folder / "train.jsonl"),
        finetuning=FinetuneSettings(test=str(folder / "test.jsonl"), tokenizer=str(data)),
        out=str(folder),
        length=64,
        updates=1,
        save_at=(0.0,),
        clip=None,
    )


def run(settings: TrainConfig, name: str, size: int, accumulation: int) -> Path:
    out = Path(settings.out, name)
    pretrain(replace(settings, out=str(out), batch_size=size, accumulation=accumulation))
    return out


def in_pairs(rank: int, settings: TrainConfig, kind: str) -> None:
    run(replace(settings, parallel=kind), kind, 1, 8)


def outcome(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a run's only update and its gradient, by parameter, from the first moments."""
    (line,) = read_lines(folder / "metrics.jsonl")
    checkpoint = open_checkpoint(folder / "checkpoints" / "step-1")
    beta = checkpoint.state["optimizer_groups"][0]["betas"][0]
    suffix, moments = ".exp_avg", checkpoint.tensors("optimizer")
    found = {name.removesuffix(suffix): m / (1 - beta) for name, m in moments.items() if name.endswith(suffix)}
    return line["loss"], found


def expected(settings: TrainConfig, folder: Path, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of the first examples in float64, each alone and without padding."""
    task = FinetuneTask(replace(settings, batch_size=count, accumulation=1), length=64)
    model = load_model(folder / "checkpoints" / "step-0").double()
    examples = [task.examples[number] for number in task.numbers(0, count)]
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for each in examples:
        ids = torch.tensor(each.sequence)
        log_probs = F.log_softmax(model(ids[None, :-1])[0], -1)
        begin = len(each.prompt)
        total = total - log_probs[torch.arange(begin - 1, len(ids) - 1), ids[begin:]].sum()
        tokens += len(ids) - begin
    loss = total / tokens
    loss.backward()
    assert len({len(each.sequence) - len(each.prompt) for each in examples}) > 2
    return loss.item(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_mean_over_tokens(settings: TrainConfig, folder: Path, count: int = 8) -> None:
    (loss, gradients), (exact_loss, exact) = outcome(folder), expected(settings, folder, count)
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm(), name


@pytest.mark.parametrize("cut", CUTS)
def test_micro_batches_weigh_as_many_answer_tokens_as_they_have(settings, cut):
    size, accumulation = CUTS[cut]
    assert_mean_over_tokens(settings, run(settings, cut, size, accumulation), size * accumulation)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_so_do_those_of_several_processes(settings, kind):
    together(2, in_pairs, settings, kind)
    assert_mean_over_tokens(settings, Path(settings.out, kind))
