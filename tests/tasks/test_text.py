"""What the text task gives a run, and from where in the data."""

import random
from dataclasses import replace

import pytest
import torch

from saf.data import TokenData, prepare, sequential_windows
from saf.errors import CheckpointError, DataError, InputError
from saf.machine import Execution
from saf.models import GPT, preset
from saf.tasks import TASKS, TextTask
from saf.tasks.text import evaluate_perplexity
from saf.train import TrainConfig

CPU = torch.device("cpu")
LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    drawn = random.Random(0)
    (root / "text").mkdir()
    for number in range(30):
        words = (drawn.choice(["head", "token", "window", "loss"]) for _ in range(400))
        (root / "text" / f"{number}.txt").write_text(" ".join(words))
    prepare([str(root / "text")], root / "data", vocab_size=270, heldout_fraction=0.3, progress=False)
    return str(root / "data")


@pytest.fixture
def settings(folder):
    return TrainConfig(
        data=folder, out="unused", batch_size=2, accumulation=3, calibration_sequences=4, heldout_sequences=3,
        eval_windows=5, seed=3,
    )  # fmt: skip


@pytest.fixture
def task(settings):
    return TASKS[settings.task](settings, length=LENGTH)


def test_calibration_and_heldout_windows_come_in_batches_of_their_own_partitions(task, folder):
    assert [len(batch) for batch in task.calibration()] == [2, 2]
    assert [len(batch) for batch in task.heldout()] == [2, 1]
    last = sequential_windows(TokenData.open(folder).tokens("controller"), LENGTH)[-3:, :-1]
    assert torch.equal(torch.cat(task.heldout()), last)
    for again, batch in zip(task.calibration(), task.calibration(), strict=True):
        assert torch.equal(again, batch)


def test_losses_are_those_of_their_partitions_and_of_the_tokens_that_are_asked_for(task, settings, tmp_path):
    model = GPT(preset("tiny", vocab_size=320, num_layers=1, hidden_size=32, max_length=LENGTH))

    def loss(partition, limit=None):
        return evaluate_perplexity(model, task.data, partition=partition, length=LENGTH, limit=limit)["loss"]

    execution = Execution.of("cpu")
    assert task.controller_loss(model, execution) == pytest.approx(loss("controller", 5), rel=1e-6)
    report = task.report(model, execution, folder=tmp_path, checkpoints={})
    assert report["report_loss"] == pytest.approx(loss("report"), rel=1e-6)
    assert report.keys() == {"report_loss", "report_perplexity", "unigram_entropy"}
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation.json", "log_probs.safetensors"}
    some = TextTask(replace(settings, report_tokens=4 * LENGTH), length=LENGTH)
    report = some.report(model, execution, folder=tmp_path, checkpoints={})
    assert report["report_loss"] == pytest.approx(loss("report", 4), rel=1e-6)
    for tokens, match in ((LENGTH - 1, "one window"), (10**9, "at most")):
        with pytest.raises((InputError, DataError), match=match):
            TextTask(replace(settings, report_tokens=tokens), length=LENGTH).check(
                calibrates=False, scores_outputs=False
            )


def test_goes_on_only_from_its_own_data_and_updates_of_its_size(task, settings, tmp_path):
    state = {"update": 4, **task.state(4)}
    assert state["sampler_position"] == 24
    task.check_continues(state, tmp_path)
    with pytest.raises(CheckpointError, match="was trained on other data: fingerprint 0000"):
        task.check_continues({**state, "data_fingerprint": "0" * 64}, tmp_path)
    other = TextTask(replace(settings, batch_size=5), length=LENGTH)
    with pytest.raises(InputError, match=r"must be 6 .* got 5 x 3"):
        other.check_continues(state, tmp_path)


def test_too_little_calibration_text_matters_where_a_run_freezes(settings):
    few = TextTask(replace(settings, calibration_sequences=100_000), length=LENGTH)
    few.check(calibrates=False, scores_outputs=False)
    with pytest.raises(DataError, match="calibration needs 100000 windows of length 16"):
        few.check(calibrates=True, scores_outputs=False)


@pytest.mark.parametrize("sampler", ["shuffled", "random"])
def test_micro_batches_go_on_where_updates_ended_and_processes_see_together_what_one_would(settings, sampler):
    settings.sampler = sampler
    task = TASKS[settings.task](settings, length=LENGTH)
    one, shares = task.training(1, CPU), [task.training(1, CPU, first=rank, every=3) for rank in range(3)]
    seen = [torch.stack(next(one)) for _ in range(12)]
    assert all(batch.shape == (2, 2, LENGTH) for batch in seen)
    assert torch.equal(seen[0][0, :, 1:], seen[0][1, :, :-1]), "the targets are the next tokens"
    assert len({tuple(batch.flatten().tolist()) for batch in seen}) == 12
    assert all(map(torch.equal, seen, [torch.stack(next(share)) for _ in range(4) for share in shares]))
    later = task.training(3, CPU)
    assert all(map(torch.equal, seen[6:], [torch.stack(next(later)) for _ in range(6)]))
    assert task.targets_per_update == 2 * 3 * LENGTH
