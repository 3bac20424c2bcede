"""The text task of a run, each use from its own part of the data; held-out perplexity against plain PyTorch."""

import math
from dataclasses import replace

import pytest
import torch

import saf
from saf.data import TokenData, sequential_windows
from saf.errors import CheckpointError, DataError, DivergenceError, InputError
from saf.machine import Execution
from saf.models import GPT, preset
from saf.records.files import read_json, read_tensors, write_json
from saf.tasks import TASKS, TextTask
from saf.tasks.base import precision_in_use
from saf.tasks.text import (
    EVALUATION,
    LOG_PROBS,
    evaluate_perplexity,
    hash_windows,
    losses_by_position,
    read_evaluation,
    window_losses,
)
from saf.train import TrainConfig

CPU = torch.device("cpu")
LENGTH = 16


def small(vocab_size: int = 320) -> GPT:
    model = GPT(preset("tiny", vocab_size=vocab_size, num_layers=2, hidden_size=32, max_length=LENGTH))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def data(text_data):
    return TokenData.open(text_data)


@pytest.fixture
def settings(text_data):
    return TrainConfig(
        data=str(text_data), out="unused", batch_size=2, accumulation=3, calibration_sequences=4, heldout_sequences=3,
        eval_windows=5, seed=3,
    )  # fmt: skip


@pytest.fixture
def task(settings):
    return TASKS[settings.task](settings, length=LENGTH)


def test_calibration_and_heldout_windows_come_in_batches_of_their_own_partitions(task, data):
    assert [len(batch) for batch in task.calibration()] == [2, 2]
    assert all(map(torch.equal, task.calibration(), task.calibration()))
    assert [len(batch) for batch in task.heldout()] == [2, 1]
    last = sequential_windows(data.tokens("controller"), LENGTH)[-3:, :-1]
    assert torch.equal(torch.cat(task.heldout()), last)


def test_losses_are_those_of_their_partitions_and_of_the_tokens_that_are_asked_for(task, settings, tmp_path):
    model = small()

    def loss(partition, limit=None):
        return evaluate_perplexity(model, task.data, partition=partition, length=LENGTH, limit=limit)["loss"]

    execution = Execution.of("cpu")
    assert task.controller_loss(model, execution, 5) == pytest.approx(loss("controller", 5), rel=1e-6)
    report = task.report(model, execution, folder=tmp_path, checkpoints={})
    assert report["report_loss"] == pytest.approx(loss("report"), rel=1e-6)
    assert report["unigram_entropy"] == task.data.index["partitions"]["report"]["unigram_entropy"]
    assert {path.name for path in tmp_path.iterdir()} == {EVALUATION, LOG_PROBS}
    some = TextTask(replace(settings, report_tokens=4 * LENGTH), length=LENGTH)
    report = some.report(model, execution, folder=tmp_path, checkpoints={})
    assert report["report_loss"] == pytest.approx(loss("report", 4), rel=1e-6)
    for tokens, match in ((LENGTH - 1, "one window"), (10**9, "at most")):
        wrong = TextTask(replace(settings, report_tokens=tokens), length=LENGTH)
        with pytest.raises((InputError, DataError), match=match):
            wrong.check(calibrates=False, scores_outputs=False)


def test_goes_on_only_from_its_own_data_and_updates_of_its_size(task, settings, tmp_path):
    state = {"update": 4, **task.state(4)}
    task.check_continues(state, tmp_path)
    with pytest.raises(CheckpointError, match="was trained on other data: fingerprint 0000"):
        task.check_continues({**state, "data_fingerprint": "0" * 64}, tmp_path)
    with pytest.raises(InputError, match=r"must be 96 .* got 5 x 3 x 16"):
        TextTask(replace(settings, batch_size=5), length=LENGTH).check_continues(state, tmp_path)
    TextTask(replace(settings, batch_size=1), length=2 * LENGTH).check_continues(state, tmp_path)
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


# --- perplexity


def test_the_loss_is_the_mean_over_every_target_of_the_windows(data):
    model = small().double()
    windows = sequential_windows(data.tokens("report"), LENGTH)
    log_probs = torch.log_softmax(model(windows[:, :-1]), dim=-1).gather(-1, windows[:, 1:, None])
    record = evaluate_perplexity(model, data)
    assert record["loss"] == pytest.approx(-float(log_probs.detach().mean()), rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert (record["windows"], record["tokens"]) == (len(windows), len(windows) * LENGTH)
    assert record["data_fingerprint"] == data.fingerprint
    assert record["windows_hash"] == hash_windows(windows)


def test_losses_by_position_are_means_of_ranges_that_grow_fourfold_and_those_of_windows_finite():
    losses = torch.rand(3, 300, generator=torch.Generator().manual_seed(0))
    ranges = losses_by_position(-losses)
    assert [end for end, _ in ranges] == [16, 64, 256, 300]
    for (end, mean), first in zip(ranges, (0, 16, 64, 256), strict=True):
        assert mean == pytest.approx(float(losses[:, first:end].mean()), rel=1e-6)
    assert [end for end, _ in losses_by_position(torch.zeros(1, 64))] == [16, 64]
    with pytest.raises(DivergenceError, match="1 of 3 windows"):
        window_losses(torch.zeros(3, 4).index_fill(0, torch.tensor(1), torch.nan))


def test_files_hold_every_tokens_log_probability_and_are_checked(data, tmp_path):
    folder = tmp_path / "new" / "folder"
    record = evaluate_perplexity(small(), data, limit=5, out=folder)
    read, losses = read_evaluation(folder)
    assert read == record == read_json(folder / EVALUATION)
    log_probs = read_tensors(folder / LOG_PROBS)["log_probs"]
    assert (log_probs.shape, log_probs.dtype) == ((5, LENGTH), torch.float32)
    assert torch.equal(losses, window_losses(log_probs))
    assert float(losses.mean()) == pytest.approx(record["loss"], rel=1e-14)
    alone = evaluate_perplexity(small(), data, limit=5, out=tmp_path / "alone", tokens=False)
    assert read_tensors(tmp_path / "alone" / LOG_PROBS).keys() == {"windows"}
    assert torch.equal(read_evaluation(tmp_path / "alone")[1], losses)
    write_json(folder / EVALUATION, alone)
    with pytest.raises(InputError, match=r"log_probs.safetensors is damaged: expected SHA-256"):
        read_evaluation(folder)


def test_the_batch_size_changes_nothing_and_progress_counts_windows(data):
    counts, show = [], lambda *step: counts.append(step)
    one, other = (evaluate_perplexity(small(), data, limit=7, batch_size=size, progress=show) for size in (1, 3))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["windows_hash"] == other["windows_hash"]
    assert counts[7:] == [(3, 7), (6, 7), (7, 7)]


def test_weights_in_16_bits_are_recorded_as_what_the_model_ran_in(data):
    model = small().bfloat16()
    assert evaluate_perplexity(model, data, limit=1)["precision"] == "bf16 weights"
    assert evaluate_perplexity(model, data, limit=1, precision="bf16")["precision"] == "bf16 weights, bf16 autocast"
    with pytest.raises(InputError, match="fp32 needs a model in float32, got bf16 weights"):
        evaluate_perplexity(model, data, limit=1, precision="fp32")
    model.norm.float()
    assert precision_in_use(model, "auto") == "bf16 and fp32 weights"
    assert precision_in_use(small().double(), "fp32") == "fp64 weights"
    # Logits of patterns that are trained on are float32 in any model.
    saf.freeze_(model, [torch.randint(320, (4, LENGTH))], saf.FreezeConfig(rate=0.25, trainable=True, max_fit_kl=99))
    assert precision_in_use(model.bfloat16(), "auto") == "bf16 weights"


def test_windows_begin_with_a_token_and_have_the_same_targets(data):
    model = small()
    windows = sequential_windows(data.tokens("report"), LENGTH, 3)[:, :-1]
    begun = torch.cat([torch.full((3, 1), 7), windows], dim=1)
    log_probs = torch.log_softmax(model(begun[:, :-1]), dim=-1).gather(-1, begun[:, 1:, None])
    record = evaluate_perplexity(model, data, limit=3, bos=7)
    assert record["loss"] == pytest.approx(-float(log_probs.detach().mean()), rel=1e-6)
    assert (record["bos"], record["windows_hash"]) == (7, hash_windows(begun))


def test_windows_and_tokens_that_the_model_does_not_take_are_refused(data):
    with pytest.raises(DataError, match="ids, the model only 64"):
        evaluate_perplexity(small(64), data)
    with pytest.raises(InputError, match="17 tokens are longer than the model's maximum of 16"):
        evaluate_perplexity(small(), data, length=17)
