"""Activation checkpointing: updates have the same losses and gradients to the last bit, and keep fewer tensors."""

from functools import partial

import pytest
import torch

import saf
from saf.machine.execution import Execution
from saf.models import by_layer
from saf.records.files import read_json, read_lines
from saf.train import TrainConfig, pretrain
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Alone

LENGTH = 16


@pytest.fixture
def model():
    """Return a model with an ordinary layer, one with frozen heads, one with a pruned head too, one without queries."""
    made = saf.GPT(saf.preset("tiny", vocab_size=40, num_layers=4, num_heads=4, hidden_size=32, max_length=LENGTH))
    made.reset_parameters(torch.Generator().manual_seed(0))
    heads = [(1, 0), (1, 2), (2, 1), *((3, head) for head in range(4))]
    drawn = torch.randn(2, len(heads), LENGTH, generator=torch.Generator().manual_seed(3))
    saf.install_(made, heads, saf.CompactPattern.from_parameters(*drawn))
    saf.prune_(made, [(2, 3)])
    return made


def found(model, compile: str, *, again: bool):
    """Return the loss and all gradients of two micro-batches, and the bytes that the first kept for going back."""
    ids = torch.randint(0, 40, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    execution = Execution.of("cpu", compile=compile, activation_checkpointing=again)
    call = Alone().engine(model, build_optimizer(model), execution).forward
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = call(ids[:, :-1], targets=ids[:, 1:])
    loss.backward()
    call(ids[:, :-1], targets=ids[:, 1:]).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *grads], sum(kept.values())


@pytest.mark.parametrize("compile", ["off", "layers", "on"])
def test_losses_and_gradients_are_the_same_bits(model, compile, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(by_layer, "_programs", {})
    (kept, kept_bytes), (again, again_bytes) = (found(model, compile, again=again) for again in (False, True))
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)
    if compile != "on":  # what one program keeps is its own affair
        weights = sum(4 * parameter.numel() for parameter in model.parameters())
        assert again_bytes < kept_bytes
        assert kept_bytes - again_bytes > 8 * 4 * 2 * LENGTH * 32
        assert again_bytes < 2 * weights


def test_a_run_across_a_freeze_has_the_same_losses(data, tmp_path):
    settings = {
        "data": str(data),
        "model_overrides": {"num_layers": 2, "num_heads": 4, "hidden_size": 32},
        "length": 32,
        "batch_size": 2,
        "updates": 6,
        "eval_every": 0,
        "eval_windows": 2,
        "calibration_sequences": 4,
        "freeze": saf.FreezeConfig(rate=0.5, max_fit_kl=10.0),
        "tensorboard": False,
        "quiet": True,
        "device": "cpu",
    }
    lines, reports = [], []
    for again in (False, True):
        out = tmp_path / str(again)
        reports.append(pretrain(TrainConfig(**settings, out=str(out), activation_checkpointing=again))["report_loss"])
        lines.append([(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")])
        assert read_json(out / "config.json")["settings"]["activation_checkpointing"] == again
    assert lines[0] == lines[1]
    assert len(lines[0]) == 6
    assert reports[0] == reports[1]
