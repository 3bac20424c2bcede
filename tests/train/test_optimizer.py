import pytest
import torch

from saf.errors import CheckpointError
from saf.models import GPT, preset
from saf.train.optimizer import (
    build_optimizer,
    optimizer_state,
    parameter_groups,
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
