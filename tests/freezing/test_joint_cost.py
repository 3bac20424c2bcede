"""With a budget heads are accepted by what they cost together on one half of the held-out text, never beyond it."""

import math
from dataclasses import replace

import pytest
import torch

import saf
from saf.errors import InputError, SelectionError
from tests.freezing.small_model import LENGTH, SHAPE, fluent, loss, make, tokens
from tests.freezing.test_loss_guard import loss_with
from tests.surgery.trained_model import assert_equal, snapshot

TOTAL = SHAPE.num_layers * SHAPE.num_heads


def config(budget, **settings):
    return saf.FreezeConfig(budget=budget, max_fit_kl=9, **{"rate": 0.5, **settings})


def test_the_joint_loss_of_what_is_accepted_stays_within_the_budget(text):
    budget, model, choosing, reporting, steps, runs = 0.5, fluent(), text[:2], text[2:], [], []
    hooks = [model.blocks[0].attention.register_forward_pre_hook(lambda *_: runs.append("lowest layer"))]
    hooks.append(model.norm.register_forward_pre_hook(lambda *_: runs.append("whole model")))
    options = {"accept_loss": True, "joint_progress": lambda *step: steps.append(step)}
    report = saf.freeze_(model, [tokens()], config(budget), heldout=[text], **options)
    assert steps == sorted(steps)
    assert (steps[0][0], *steps[-1]) == (0, TOTAL + TOTAL // 2, TOTAL + TOTAL // 2)
    assert runs.count("lowest layer") < runs.count("whole model") / 2  # outputs below a trial are cached
    for hook in hooks:
        hook.remove()
    joint = report.joint_cost
    assert set(joint.accepted) == set(report.heads)
    assert 0 < len(report.heads) <= TOTAL // 2
    before = loss(fluent(), choosing)
    assert loss(model, choosing) - before == pytest.approx(joint.rise, abs=1e-4)
    assert joint.rise <= math.log1p(budget)
    for head in list(joint.alone)[:3]:
        assert joint.alone[head] == pytest.approx(loss_with([head], choosing) - before, abs=1e-4)
    assert report.loss.before == pytest.approx(loss(fluent(), reporting), abs=1e-4)
    assert report.loss.after == pytest.approx(loss(model, reporting), abs=1e-4)
    assert report.loss.after - report.loss.before <= math.log1p(budget)
    for limit in (budget, (report.loss.rise + report.loss.interval[1]) / 2):
        said = replace(report, config=report.config | {"budget": limit}).cost
        assert ("ends above the budget" in said) == (report.loss.interval[1] > limit)
    assert len(joint.alone) == TOTAL  # three times the half that is asked for
    first = joint.accepted[: len(joint.accepted) // 2 + 1]
    assert joint.rises[len(first) - 1] == pytest.approx(loss_with(list(first), choosing) - before, abs=1e-4)


def test_the_budget_holds_on_the_half_that_heads_are_not_chosen_by(text):
    """Without a budget the same order goes beyond it there."""
    budget, options = 0.5, {"heldout": [text.flip(0)], "accept_loss": True}
    free = saf.freeze_(fluent(), [tokens()], config(None, joint_cost=True), **options)
    report = saf.freeze_(fluent(), [tokens()], config(budget), **options)
    assert 0 < len(report.heads) < len(free.heads)
    assert report.loss.after - report.loss.before <= math.log1p(budget) < free.loss.after - free.loss.before
    assert not set(report.joint_cost.refused) & set(report.heads)
    longer = [*report.heads, next(head for head in free.joint_cost.accepted if head not in report.heads)]
    assert loss_with(longer, text[:2]) - loss(fluent(), text[:2]) > math.log1p(budget)


def test_heads_within_the_budget_alone_and_beyond_it_together_are_not_both_taken(text):
    pair, choosing = [(0, 0), (0, 1)], text[:2]
    before = loss(fluent(), choosing)
    alone = [loss_with([head], choosing) - before for head in pair]
    together = loss_with(pair, choosing) - before
    budget = 0.99 * math.expm1(together)  # a rise of perplexity, not of the loss
    assert max(alone) < math.log1p(budget) < together < budget
    settings = config(budget, rate=2 / TOTAL, only=pair)
    report = saf.freeze_(fluent(), [tokens()], settings, heldout=[text], accept_loss=True)
    assert list(report.heads) == [pair[alone.index(min(alone))]]
    assert report.joint_cost.refused == (pair[alone.index(max(alone))],)


def test_a_budget_that_no_head_meets_leaves_the_model_alone(text):
    model = fluent()
    before = snapshot(model)
    with pytest.raises(SelectionError, match="raise budget"):
        saf.freeze_(model, [tokens()], config(1e-9), heldout=[text])
    assert_equal(snapshot(model), before)


def test_a_loss_that_fails_leaves_the_model_alone(text):
    model, calls = fluent(), []
    before = snapshot(model)

    def fail(module, inputs):
        calls.append(module)
        if len(calls) == 40:
            raise RuntimeError("interrupted")

    hook = model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        saf.freeze_(model, [tokens()], config(0.5), heldout=[text])
    hook.remove()
    assert_equal(snapshot(model), before)


@pytest.mark.parametrize(
    ("settings", "heldout", "words"),
    [
        ({}, None, "heldout="),
        ({}, [torch.zeros(1, LENGTH, dtype=torch.long)], "2 sequences"),
        ({"budget": 0.0}, None, "positive"),
        ({"heads": ((0, 0),)}, None, "joint cost"),
        ({"whole_groups": True}, None, "joint cost"),
    ],
)
def test_what_a_budget_cannot_be_used_with_is_refused(settings, heldout, words):
    with pytest.raises(InputError, match=words):
        saf.freeze_(make(), [tokens()], saf.FreezeConfig(**{"budget": 0.01, **settings}), heldout=heldout)
