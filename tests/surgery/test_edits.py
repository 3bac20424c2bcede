"""What edits do to gradients, in inference mode, to averaged weights, and when they fail half way."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import saf
from saf.errors import CheckpointError
from saf.frozen_state import description_of, restore_
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from saf.surgery import install_, uninstall_
from tests.surgery.test_install import SOME
from tests.surgery.trained_model import LENGTH, SHAPE, make, patterns, update

TOKENS = torch.randint(0, SHAPE.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(9))


def test_gradients_not_yet_used_follow_the_heads_that_stay():
    model, trainer = make()
    model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    install_(model, HeadSet([(0, 1)]), patterns(1), optimizer=trainer)
    after = {name: parameter.grad for name, parameter in model.named_parameters()}
    name = "blocks.0.attention.{}.weight".format
    slots = [row for head in (0, 2, 3, 1) for row in range(8 * head, 8 * head + 8)]
    assert torch.equal(after[name("q_proj")], before[name("q_proj")][slots[:24]])
    assert torch.equal(after[name("v_proj")], before[name("v_proj")][slots])
    assert torch.equal(after[name("o_proj")], before[name("o_proj")][:, slots])
    uninstall_(model, optimizer=trainer)
    thawed = model.blocks[0].attention.q_proj.weight.grad
    assert not thawed[8:16].any()
    assert torch.equal(thawed[:8], before[name("q_proj")][:8])
    trainer.step()


def test_heads_frozen_in_inference_mode_can_be_trained_afterwards():
    model, trainer = make()
    with torch.inference_mode():
        install_(model, SOME, patterns(6), optimizer=trainer)
        uninstall_(model, HeadSet([(0, 1)]), optimizer=trainer)
        ordinary = saf.FrozenHeads.from_patterns(patterns(2), dtype=torch.float64)
    assert update(model, trainer) > update(model, trainer)
    value = torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    saf.frozen_attention(value, ordinary).sum().backward()


def test_averaged_weights_have_the_heads_of_the_model_and_are_saved_with_them(tmp_path):
    model, trainer = make()
    install_(model, SOME, patterns(6), optimizer=trainer)
    averaged, weights = AveragedModel(model, use_buffers=True), []
    for _ in range(2):
        update(model, trainer)
        averaged.update_parameters(model)
        weights.append(model.blocks[1].attention.v_proj.weight.detach().clone())
    torch.testing.assert_close(averaged.module.blocks[1].attention.v_proj.weight.detach(), sum(weights) / 2)
    saf.save(averaged.module.float(), tmp_path)
    assert torch.equal(saf.load(tmp_path)(TOKENS[:, :-1]), averaged(TOKENS[:, :-1]))


@pytest.mark.parametrize("compare", [True, False])
def test_a_model_stays_as_it_was_where_a_pattern_is_missing(compare):
    model, other = make()[0], make()[0]
    install_(model, HeadSet([(0, 1), (1, 2)]), patterns(2))
    state, tensors = description_of(adapter_for(model))
    before = copy.deepcopy(other.state_dict())
    del tensors["1.2.rho"]
    with pytest.raises(CheckpointError, match="layer 1 head 2 must have a whole pattern"):
        restore_(other, state, tensors, compare=compare)
    assert all(map(torch.equal, other.state_dict().values(), before.values()))
