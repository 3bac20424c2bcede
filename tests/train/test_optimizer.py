import math

import pytest
import torch

from saf.errors import CheckpointError, InputError
from saf.models import GPT, preset
from saf.train.optimizer import (
    build_optimizer,
    learning_rate,
    optimizer_state,
    parameter_groups,
    progress_by_share,
    progress_by_update,
    restore_optimizer,
    set_learning_rate_,
    step_if_finite_,
)


@pytest.fixture
def model(generator) -> GPT:
    model = GPT(preset("tiny", vocab_size=64, num_layers=2, hidden_size=32, max_length=16, position="learned"))
    model.reset_parameters(generator)
    return model


def one_step(model: GPT, optimizer, seed: int, watched: float = 1.0) -> None:
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))
    model(ids[:, :-1], targets=ids[:, 1:]).backward()
    step_if_finite_(optimizer, torch.tensor([watched]))
    optimizer.zero_grad()


def everything(model: GPT, optimizer) -> dict:
    tensors = {**dict(model.named_parameters()), **optimizer_state(optimizer, model)[1]}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_matrices_decay_and_vectors_do_not(model):
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert {id(p) for p in kept["params"]} == {id(p) for n, p in model.named_parameters() if "norm" in n}
    assert any(parameter is model.embed.weight for parameter in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_decay_shrinks_matrices_alone(model):
    optimizer = build_optimizer(model, weight_decay=0.1)
    set_learning_rate_(optimizer, 0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step_if_finite_(optimizer, torch.tensor([1.0]))
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("watched", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_changes_nothing(model, watched):
    optimizer = build_optimizer(model)
    set_learning_rate_(optimizer, 1e-2)
    one_step(model, optimizer, seed=1)
    before = everything(model, optimizer)
    one_step(model, optimizer, seed=2, watched=watched)
    after = everything(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    one_step(model, optimizer, seed=2)
    assert everything(model, optimizer)["embed.weight.step"] == 2


def test_restored_optimizer_goes_on_bit_for_bit(model, generator):
    optimizer = build_optimizer(model, betas=(0.8, 0.9), weight_decay=0.2)
    set_learning_rate_(optimizer, 1e-2)
    one_step(model, optimizer, seed=1)
    twin = GPT(model.config)
    twin.load_state_dict(model.state_dict())
    groups, tensors = optimizer_state(optimizer, model)
    restored = restore_optimizer(twin, groups, {name: tensor.clone() for name, tensor in tensors.items()})
    one_step(model, optimizer, seed=2)
    one_step(twin, restored, seed=2)
    mine, other = everything(model, optimizer), everything(twin, restored)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_refuses_a_state_of_another_model(model):
    optimizer = build_optimizer(model)
    one_step(model, optimizer, seed=1)
    groups, tensors = optimizer_state(optimizer, model)
    wider = GPT(preset("tiny", vocab_size=64, num_layers=2, hidden_size=64, max_length=16, position="learned"))
    with pytest.raises(CheckpointError, match="has shape"):
        restore_optimizer(wider, groups, tensors)
    groups[0]["names"].append("blocks.9.attention.q_proj.weight")
    with pytest.raises(CheckpointError, match=r"does not have.*blocks\.9"):
        restore_optimizer(model, groups, tensors)


def paper_rate(update: int) -> float:
    return learning_rate(progress_by_update(update, updates=5000), peak=6e-4, min_ratio=0.1, warmup=500 / 5000)


@pytest.mark.parametrize(
    ("update", "expected"),
    [(1, 6e-4 / 500), (250, 3e-4), (500, 6e-4), (2750, 3.3e-4), (5000, 6e-5), (6000, 6e-5)],
)
def test_paper_schedule(update, expected):
    assert paper_rate(update) == pytest.approx(expected, rel=1e-12)


def test_decay_is_half_a_cosine():
    expected = 6e-5 + 5.4e-4 * 0.5 * (1 + math.cos(math.pi * (1700 - 500) / 4500))
    assert paper_rate(1700) == pytest.approx(expected, rel=1e-12)


def test_rises_then_falls():
    rates = [paper_rate(update) for update in range(1, 5001)]
    assert rates[:500] == sorted(rates[:500])
    assert rates[499:] == sorted(rates[499:], reverse=True)


def test_without_warmup_starts_at_the_peak():
    assert learning_rate(0.0, peak=1.0) == 1.0


def test_later_continuation_decays_between_its_own_ends():
    rate = lambda update: learning_rate(  # noqa: E731
        progress_by_update(update, updates=7500, start=5000), peak=6e-5, min_ratio=0.1
    )
    assert rate(5000) == pytest.approx(6e-5)
    assert rate(7500) == pytest.approx(6e-6)


def test_time_continues_where_updates_stopped():
    by_update = progress_by_update(2500, updates=5000)
    assert progress_by_share(0.0, begin=by_update) == by_update
    assert progress_by_share(1.0, begin=by_update) == 1.0
    assert progress_by_share(1.5, begin=by_update) == 1.0


def test_refuses_a_warmup_as_long_as_the_schedule():
    with pytest.raises(InputError, match="share of the schedule"):
        learning_rate(0.5, peak=1.0, warmup=1.0)
