import math

import pytest
import torch

import saf
from saf.data import sequential_windows
from saf.errors import DataError, DivergenceError, InputError
from saf.models import GPT, GPTConfig
from saf.records.files import read_json, read_tensors, write_json
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

LENGTH = 32


def small(vocab_size: int = 320) -> GPT:
    shape = GPTConfig(vocab_size=vocab_size, num_layers=2, num_heads=2, hidden_size=16, max_length=LENGTH)
    model = GPT(shape)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


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


def test_losses_by_position_are_means_of_ranges_that_grow_fourfold():
    losses = torch.rand(3, 300, generator=torch.Generator().manual_seed(0))
    found = losses_by_position(-losses)
    assert [end for end, _ in found] == [16, 64, 256, 300]
    for (end, mean), first in zip(found, (0, 16, 64, 256), strict=True):
        assert mean == pytest.approx(float(losses[:, first:end].mean()), rel=1e-6)
    assert [end for end, _ in losses_by_position(torch.zeros(1, 64))] == [16, 64]


def test_files_hold_every_tokens_log_probability_and_are_checked(data, tmp_path):
    record = evaluate_perplexity(small(), data, limit=5, out=tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    read, losses = read_evaluation(folder)
    assert read == record == read_json(folder / EVALUATION)
    log_probs = read_tensors(folder / LOG_PROBS)["log_probs"]
    assert (log_probs.shape, log_probs.dtype) == ((5, LENGTH), torch.float32)
    assert torch.equal(losses, window_losses(log_probs))
    assert float(losses.mean()) == pytest.approx(record["loss"], rel=1e-14)
    assert sorted(path.name for path in folder.iterdir()) == sorted([EVALUATION, LOG_PROBS])
    alone = evaluate_perplexity(small(), data, limit=5, out=tmp_path / "alone", tokens=False)
    assert read_tensors(tmp_path / "alone" / LOG_PROBS).keys() == {"windows"}
    assert torch.equal(read_evaluation(tmp_path / "alone")[1], losses)
    write_json(folder / EVALUATION, alone)
    with pytest.raises(InputError, match=r"log_probs.safetensors is damaged: expected SHA-256"):
        read_evaluation(folder)


def test_the_batch_size_changes_nothing_and_progress_is_told(data):
    reported = []
    one = evaluate_perplexity(small(), data, limit=7, batch_size=1)
    other = evaluate_perplexity(
        small(), data, limit=7, batch_size=3, progress=lambda done, of: reported.append((done, of))
    )
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["windows_hash"] == other["windows_hash"]
    assert reported == [(3, 7), (6, 7), (7, 7)]


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


def test_windows_begin_with_the_token_asked_for_and_have_the_same_targets(data):
    model = small()
    windows = sequential_windows(data.tokens("report"), LENGTH, 3)[:, :-1]
    begun = torch.cat([torch.full((3, 1), 7), windows], dim=1)
    log_probs = torch.log_softmax(model(begun[:, :-1]), dim=-1).gather(-1, begun[:, 1:, None])
    record = evaluate_perplexity(model, data, limit=3, bos=7)
    assert record["loss"] == pytest.approx(-float(log_probs.detach().mean()), rel=1e-6)
    assert (record["bos"], record["tokens"]) == (7, 3 * LENGTH)
    assert record["windows_hash"] != evaluate_perplexity(model, data, limit=3)["windows_hash"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 64}, "ids, the model only 64"),
        ({"length": 33}, "33 tokens are longer than the model's maximum of 32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_out_of_range_are_refused(data, settings, message):
    model = small(settings.pop("vocab_size", 320))
    with pytest.raises((InputError, DataError), match=message):
        evaluate_perplexity(model, data, **settings)


def test_every_module_gets_its_mode_back_also_after_an_error(data):
    model = small().train()
    model.blocks[1].eval()
    modes, seen = [module.training for module in model.modules()], set()
    model.embed.register_forward_pre_hook(lambda *_: seen.update(module.training for module in model.modules()))
    evaluate_perplexity(model, data, limit=2)
    assert seen == {False}
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="not finite"):
        evaluate_perplexity(model, data, limit=2)
    assert [module.training for module in model.modules()] == modes
