"""One update: AdamW against PyTorch's plain one, its learning rate, and layers computed again."""

import math
from functools import partial

import pytest
import torch

import saf
from saf.checkpoint import groups_and_moments
from saf.errors import InputError
from saf.machine import Execution, rated_flops
from saf.models import by_layer
from saf.train.step import (
    Parallel,
    build_optimizer,
    learning_rate,
    step_if_finite_,
    update_memory,
)

LENGTH = 16


@pytest.fixture
def model():
    """Return a model with an ordinary layer, one with frozen heads, one with a pruned head too, one without queries."""
    model = saf.GPT(saf.preset("tiny", vocab_size=40, num_layers=4, num_heads=4, hidden_size=32, max_length=LENGTH))
    model.reset_parameters(torch.Generator().manual_seed(0))
    heads = [(1, 0), (1, 2), (2, 1), *((3, head) for head in range(4))]
    drawn = torch.randn(2, len(heads), LENGTH, generator=torch.Generator().manual_seed(3))
    saf.install_(model, heads, saf.CompactPattern.from_parameters(*drawn))
    saf.prune_(model, [(2, 3)])
    return model


def batch(seed: int, rows: int = 2, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def test_matrices_alone_decay(model):
    decays = {
        p: group["weight_decay"]
        for group in build_optimizer(model, weight_decay=0.5).param_groups
        for p in group["params"]
    }
    assert decays == {p: 0.5 if p.dim() >= 2 else 0.0 for p in model.parameters()}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_skips_the_step(model, bad):
    optimizer = build_optimizer(model)
    optimizer.param_groups[0]["lr"] = 1e-2

    def state(watched):
        model(batch(0)[0], targets=batch(0)[1]).backward()
        step_if_finite_(optimizer, torch.tensor([watched]))
        tensors = {**dict(model.named_parameters()), **groups_and_moments(optimizer, model)[1]}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    first, second, third = (state(watched) for watched in (1.0, 1.0, bad))
    assert first.keys() == second.keys() == third.keys()
    assert all(torch.equal(second[name], third[name]) for name in second)
    assert not torch.equal(first["embed.weight"], second["embed.weight"])


def test_the_papers_learning_rates():
    rates = [learning_rate(update / 5000, peak=6e-4, warmup=0.1) for update in (1, 250, 500, 2750, 5000, 6000)]
    assert rates == pytest.approx([6e-4 / 500, 3e-4, 6e-4, 3.3e-4, 6e-5, 6e-5])


@pytest.mark.parametrize("compile", ["off", *(pytest.param(name, marks=pytest.mark.slow) for name in ("layers", "on"))])
def test_layers_computed_again_have_the_same_bits_and_keep_less(model, compile, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(by_layer, "_programs", {})
    (once, once_bytes), (again, again_bytes) = (gradients(model, compile, again=again) for again in (False, True))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    if compile != "on":  # what one program keeps is its own affair
        assert once_bytes - again_bytes > 8 * 4 * 2 * LENGTH * 32


def gradients(model, compile: str, *, again: bool):
    """Return the loss and all gradients of a micro-batch, and the bytes that were kept for going back."""
    model.zero_grad(set_to_none=True)
    execution = Execution.of("cpu", compile=compile, activation_checkpointing=again)
    call = Parallel().engine(model, build_optimizer(model), execution).forward
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = call(batch(1)[0], targets=batch(1)[1])
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *grads], sum(kept.values())


def test_auto_compiles_on_cuda_and_by_layers_where_events_are_several(monkeypatch):
    def forms(device):
        cases = (("auto", False), ("auto", True), ("on", True), ("layers", False), ("off", True))
        found = (Execution.of(device, compile=compile, several_events=several) for compile, several in cases)
        return [(each.compile, each.by_layer) for each in found]

    named = [(True, False), (True, True), (False, False)]
    assert forms("cpu") == [(False, False)] * 2 + named
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert forms("cuda") == [(True, False), (True, True), *named]
    with pytest.raises(InputError, match="compile"):
        Execution.of("cpu", compile="none")


def test_unknown_speeds_are_not_guessed():
    assert rated_flops("NVIDIA H200", "bf16") == 989e12
    assert rated_flops("NVIDIA H200", "fp32") is rated_flops("cpu (x86_64, 2 threads)", "bf16") is None


@pytest.mark.parametrize(("model", "tokens", "measured"), [("124m", 8 * 4_096, 13.44e9), ("1b", 16_384, 41.07e9)])
def test_memory_of_an_update_is_within_four_percent_of_peaks_measured_on_a_gpu(model, tokens, measured):
    """The ordinary arms of results/bench/memory-4k.json and memory-1b.json."""
    assert update_memory(saf.preset(model), tokens).total == pytest.approx(measured, rel=0.04)
