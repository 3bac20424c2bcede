"""Installing trainable patterns: what joins the optimiser, what leaves it, and what is saved."""

import pytest
import torch

from saf.errors import InputError, UnsupportedError
from saf.frozen_state import description_of, restore_
from saf.heads import HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.patterns import DensePattern, TrainablePattern
from saf.surgery import install_, pattern_parameters, uninstall_
from tests.surgery.trained_model import LENGTH, SHAPE, assert_equal, patterns, snapshot, update
from tests.surgery.trained_model import make as make_trained

SOME = HeadSet([(0, 1), (0, 3), (1, 2)])
TOKENS = torch.randint(0, 40, (4, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def make(**options):
    return make_trained(**{"betas": (0.8, 0.9), "weight_decay": 0.1, **options})


def split(parameters, **options) -> torch.optim.AdamW:
    """An optimiser with groups of matrices and of vectors without decay."""
    parameters = list(parameters)
    vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1]}, vectors], **options)


class Wrapper(torch.optim.Optimizer):
    """An optimiser that holds the one that steps, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def trained_of(model: GPT) -> dict[tuple[int, int], TrainablePattern]:
    return {
        (layer, head): one
        for layer, site in enumerate(adapter_for(model).sites())
        if site.frozen is not None
        for head, one in zip(site.layout.frozen, site.frozen.patterns, strict=True)
        if isinstance(one, TrainablePattern)
    }


def groups_of(trainer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in trainer.param_groups]


def test_training_starts_from_the_fixed_patterns_by_a_step_of_adam_from_zero_moments():
    (model, trainer), (twin, _) = make(), make()
    install_(model, SOME, patterns(3), optimizer=trainer, trainable=True)
    install_(twin, SOME, patterns(3))
    torch.testing.assert_close(model(TOKENS[:, :-1]), twin(TOKENS[:, :-1]), rtol=1e-12, atol=1e-12)
    assert (sum(each.numel() for each in pattern_parameters(model)), pattern_parameters(twin)) == (6 * LENGTH, [])
    source, group = trainer.param_groups
    assert (group["weight_decay"], group["lr"], group["betas"]) == (0.0, source["lr"], source["betas"])
    assert not any(parameter in trainer.state for parameter in pattern_parameters(model))
    before = [parameter.detach().clone() for parameter in pattern_parameters(model)]
    model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    gradients = [parameter.grad.clone() for parameter in pattern_parameters(model)]
    assert all(gradient.norm() > 0 for gradient in gradients)
    trainer.step()
    for parameter, old, gradient in zip(pattern_parameters(model), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 1e-2 * gradient / (gradient.abs() + 1e-8))
    losses = [update(model, trainer) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_they_join_a_group_without_decay_so_that_schedules_reach_them_or_are_refused():
    model, trainer = make(optimizer=split)
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer, lambda step: 0.5**step)
    before = groups_of(trainer)
    install_(model, SOME, patterns(3), optimizer=trainer, trainable=True)
    assert groups_of(trainer) == [before[0], before[1] + [id(parameter) for parameter in pattern_parameters(model)]]
    update(model, trainer)
    schedule.step()
    assert trainer.param_groups[1]["lr"] == 0.5e-2
    uninstall_(model, optimizer=trainer)
    assert groups_of(trainer) == before
    update(model, trainer)
    schedule.step()
    for wrapper in (lambda inner: inner, Wrapper):
        model, trainer = make()
        given = wrapper(trainer)
        torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
        untouched = snapshot(model, trainer)
        with pytest.raises(UnsupportedError, match="before making the scheduler, call"):
            install_(model, SOME, patterns(3), optimizer=given, trainable=True)
        assert_equal(snapshot(model, trainer), untouched)


def test_events_of_both_kinds_share_a_layer():
    """Fixed patterns stay as they are; trainable ones keep their parameters and moments when others come and go."""
    model, trainer = make()
    install_(model, HeadSet([(0, 1)]), patterns(1, 1), optimizer=trainer)
    install_(model, HeadSet([(0, 2)]), patterns(1, 2), optimizer=trainer, trainable=True)
    update(model, trainer)
    first = trained_of(model)[0, 2]
    moments = {name: t.clone() for name, t in trainer.state[first.alpha].items()}
    install_(model, HeadSet([(0, 0), (1, 0)]), patterns(2, 3), optimizer=trainer, trainable=True)
    assert list(trained_of(model)) == [(0, 0), (0, 2), (1, 0)]
    assert trained_of(model)[0, 2] is first
    assert_equal(trainer.state[first.alpha], moments)
    assert len(trainer.param_groups) == 2
    assert len(trainer.param_groups[1]["params"]) == 6
    update(model, trainer)
    uninstall_(model, HeadSet([(0, 0), (0, 1)]), optimizer=trainer)
    assert list(trained_of(model)) == [(0, 2), (1, 0)]
    assert trained_of(model)[0, 2] is first
    assert trainer.state[first.alpha]["step"] == 2
    assert len(trainer.param_groups[1]["params"]) == 4
    install_(model, HeadSet([(0, 3)]), patterns(1, 4), optimizer=trainer)
    update(model, trainer)
    fixed = model.blocks[0].attention.frozen.patterns[1]
    assert torch.equal(fixed.alpha, patterns(1, 4).alpha[0])
    assert fixed.alpha.grad is None


def test_state_restores_the_patterns_as_they_are():
    model, trainer = make()
    install_(model, HeadSet([(0, 0)]), patterns(1, 7), optimizer=trainer)
    install_(model, SOME, patterns(3), optimizer=trainer, trainable=True)
    update(model, trainer)
    state, tensors = description_of(adapter_for(model))
    retained = {name: tensor.clone() for name, tensor in tensors.items()}
    assert [layer["trainable"] for layer in state["layers"]] == [[1, 3], [2], []]
    other = GPT(SHAPE).double()
    restore_(other, state, tensors)
    assert all(map(torch.equal, pattern_parameters(other), pattern_parameters(model)))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(TOKENS[:, :-1]), other(TOKENS[:, :-1]))
    update(model, trainer)
    assert_equal(tensors, retained)  # what was read does not follow the training


def test_what_cannot_be_trained_is_refused_and_changes_nothing():
    model, trainer = make()
    before, groups = snapshot(model, trainer), groups_of(trainer)
    stored = DensePattern(patterns(3).dense())
    named = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    for fixed, options, message in [
        (stored, {"optimizer": trainer}, "only key and distance logits can be trained, a DensePattern has none"),
        (patterns(3), {"optimizer": trainer, "backend": "fused"}, "no gradients for key and distance logits"),
        (patterns(3), {"optimizer": named}, "named parameters"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            install_(model, SOME, fixed, **options, trainable=True)
    one = TrainablePattern.of(patterns(1)[0], dtype=torch.float64)
    with pytest.raises(InputError, match=r"pass trainable=True, or pattern\.compact"):
        install_(model, HeadSet([(0, 1)]), [one], optimizer=trainer)
    half = GPT(SHAPE).half()
    with pytest.raises(UnsupportedError, match="float16 has too little range"):
        install_(half, SOME, patterns(3), trainable=True)
    assert_equal(snapshot(model, trainer), before)
    assert groups_of(trainer) == groups
