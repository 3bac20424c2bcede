"""Two bytes a token: how near they are, and what is refused."""

import pytest
import torch

from saf.errors import InputError
from saf.evaluate.compare import compare_runs
from saf.evaluate.paired import window_losses
from saf.evaluate.perplexity import LOG_PROBS as FILE
from saf.evaluate.perplexity import TokenLosses, read_evaluation
from saf.records.files import read_json, write_json
from tests.report.synthetic import edit, write_pair


def like_text(windows: int, length: int) -> torch.Tensor:
    """Return log-probabilities as text has them: mostly small, with a tail to 20 nats."""
    generator = torch.Generator().manual_seed(0)
    return -(torch.rand(windows, length, generator=generator) ** 3 * 12 + 1e-4 * torch.arange(length)).float()


@pytest.mark.parametrize("length", [1, 7, 4096])
def test_tokens_are_within_a_step_and_window_means_within_half_a_step_over_their_number(length, tmp_path):
    log_probs = like_text(6, length)
    written = TokenLosses.of(log_probs)
    written.write(tmp_path)
    losses = TokenLosses.read(tmp_path / FILE)
    assert losses.step == pytest.approx(float(log_probs.max() - log_probs.min()) / 65_534, rel=1e-6)
    assert float((losses.log_probs - log_probs).abs().max()) < losses.step
    exact = window_losses(log_probs)
    assert torch.equal(losses.windows, exact)
    assert float((losses.log_probs.mean(dim=1) + exact).abs().max()) <= losses.step / (2 * length) + 1e-14
    rounded = window_losses(log_probs.half())
    assert length < 4096 or (losses.log_probs.mean(dim=1) + exact).abs().max() < 0.01 * (rounded - exact).abs().max()
    assert (tmp_path / FILE).stat().st_size < 2 * log_probs.numel() + 500


@pytest.mark.parametrize("values", [[[-3.0, -3.0]], [[0.0, -800.0], [-800.0, 0.0]], [[1e-7, -2.0]]])
def test_equal_extreme_and_positive_values_are_kept(values):
    log_probs = torch.tensor(values)
    losses = TokenLosses.of(log_probs)
    assert float((losses.log_probs - log_probs).abs().max()) < losses.step or losses.step == 1.0
    assert torch.equal(losses.windows, window_losses(log_probs))
    losses.check("here", windows=len(values), length=2, loss=float(losses.windows.mean()))


def damaged(folder):
    path = folder / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def without_sum(folder):
    record = read_json(folder / "evaluation.json")
    del record["log_probs_sha256"]
    write_json(folder / "evaluation.json", record)


def summed(folder, losses):
    edit(folder / "evaluation.json", log_probs_sha256=losses.write(folder))


def of_another_model(folder):
    losses = TokenLosses.of(read_evaluation(folder)[1].log_probs - 1e-6)
    summed(folder, losses)


def with_other_tokens(folder):
    losses = read_evaluation(folder)[1]
    losses.steps[3, 5] = int(losses.steps[3, 5]) + 10
    summed(folder, losses)


def of_something_else(folder):
    from saf.records.files import file_hash, write_tensors

    edit(folder / "evaluation.json", log_probs_sha256=file_hash(write_tensors(folder / FILE, {"x": torch.ones(1)})))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damaged, r"log_probs.safetensors is damaged: expected SHA-256"),
        (without_sum, r"has no SHA-256 of log_probs.safetensors"),
        (of_another_model, r"gives a mean loss of .* not one evaluation"),
        (with_other_tokens, r"gives a mean loss of .* not one evaluation"),
        (of_something_else, r"must hold windows .* got \{'x': 1\}"),
        (lambda folder: (folder / FILE).unlink(), r"log_probs.safetensors is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_log_probabilities_that_are_not_those_of_the_record_are_refused(tmp_path, harm, message):
    ordinary, frozen = write_pair(tmp_path)
    harm(frozen)
    with pytest.raises(InputError, match=message):
        compare_runs(ordinary, frozen)
